"""qwen35: one contract between Qwen3.5 serving and the kernels that do its work."""
