"""Tests that the groups of several areas run."""

SCHEMES = (
    "tests/rotary/test_rotary.py",
    "tests/rotary/test_bands.py",
    "tests/rotary/test_cos_sin.py",
    "tests/rotary/test_lowering.py",
)
FORWARD = (
    "tests/operators/test_accuracy.py",
    "tests/operators/test_needles.py",
    "tests/kernels/test_tiles.py",
    "tests/rotary/test_bands.py",
    "-k",
    "triton",
)
BACKWARD = (
    "tests/operators/test_accuracy.py",
    "tests/operators/test_backward.py",
    "tests/operators/test_varlen.py",
    "-k",
    "triton or test_backward",
)
DECODE = (
    "tests/kernels/test_decode_triton.py",
    "tests/caches/test_decode.py",
    "tests/caches/test_decode_varlen.py",
    "-k",
    "triton",
)
