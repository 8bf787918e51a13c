"""Reads the rotary embedding of model configurations as plain data. This package does not import ``Rotary``."""
