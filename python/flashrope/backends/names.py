"""The names of the backends and of cache types, for the command line, which must not load torch to show its help."""

BACKENDS = ("triton", "sdpa", "cuda", "cpu", "reference")
CACHE_DTYPES = ("int8",)
