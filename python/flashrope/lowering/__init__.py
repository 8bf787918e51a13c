"""Turns a scheme into numbers, and into tables on a device."""
