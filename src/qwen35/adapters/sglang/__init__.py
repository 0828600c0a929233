"""SGLang: its Triton kernels of the gated delta rule behind our port."""
