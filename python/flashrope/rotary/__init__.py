"""Defines schemes: frequencies, bands over the distance, and scales. Nothing here depends on devices or kernels."""
