"""A scheme as numbers and tables on a device."""
