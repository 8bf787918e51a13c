"""The backends of the attention operators: triton, cuda, cpu and reference."""
