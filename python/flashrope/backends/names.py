"""The names of the backends, for the command line, which must not load torch to show its help."""

BACKENDS = ("triton", "cuda", "cpu", "reference")
