"""A machine that executes PTX on the CPU. README.md says how to run a kernel on it. Nothing here knows flashrope."""
