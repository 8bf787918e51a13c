"""What a scheme is: frequencies, bands over the distance, scales. No devices, no kernels."""
