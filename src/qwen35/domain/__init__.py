"""What is true of Qwen3.5's two contracts, in the standard library alone."""
