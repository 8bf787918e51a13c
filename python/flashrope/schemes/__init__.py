"""A scheme as numbers: ``Rotary``, its catalogue, frequency tables, bands and scales, and what Hugging Face's
configurations say of a scheme. lowered.py turns a scheme into the rows that kernels work with."""
