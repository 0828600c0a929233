"""What the library needs from a kernel: Protocols and their call objects."""
