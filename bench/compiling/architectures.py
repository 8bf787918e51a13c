"""The architectures that the gate compiles for, and the limits of their multiprocessors."""

from __future__ import annotations

from flashrope.backends import splits

MULTIPROCESSORS = {arch: splits.MULTIPROCESSORS[arch] for arch in (80, 86, 89, 90)}
# Bytes of shared memory per block, also for architectures that the gate does not compile for.
SHARED = {arch: splits.MULTIPROCESSORS[arch].shared_per_block for arch in (*MULTIPROCESSORS, 120)}
