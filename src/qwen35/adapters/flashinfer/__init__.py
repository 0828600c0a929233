"""FlashInfer's kernels of the gated delta rule."""
