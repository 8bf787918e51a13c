"""Caches of keys and values for decoding.

``KVCache`` has one row of slots per sequence. ``PagedKVCache`` has pages that sequences share. The host keeps lengths,
page tables and reference counts, so a full cache raises an error, and no call waits for the device. A cache holds one
layer or all layers of a model. A ``Step`` writes to all layers.
"""

from .capture import CapturedStep
from .contiguous import KVCache
from .paged import PagedKVCache
from .pool import OutOfPages
from .step import Step

__all__ = ["CapturedStep", "KVCache", "OutOfPages", "PagedKVCache", "Step"]
