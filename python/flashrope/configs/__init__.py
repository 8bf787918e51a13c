"""Reads the rotary embedding of model configurations as plain data. It does not import ``Rotary``."""
