"""Tests that the groups of several areas run."""

SCHEMES = ("tests/test_rotary.py", "tests/test_bands.py", "tests/test_cos_sin.py", "tests/test_lowering.py")
FORWARD = (
    "tests/test_accuracy.py",
    "tests/test_needles.py",
    "tests/test_tiles.py",
    "tests/test_bands.py",
    "-k",
    "triton",
)
BACKWARD = ("tests/test_accuracy.py", "tests/test_backward.py", "tests/test_varlen.py", "-k", "triton or test_backward")
DECODE = ("tests/test_decode_triton.py", "tests/test_decode.py", "tests/test_decode_varlen.py", "-k", "triton")
