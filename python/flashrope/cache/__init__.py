"""Caches of raw keys and values for decoding.

``KVCache`` has one row of slots per sequence; ``PagedKVCache`` has pages that sequences share. Lengths, page tables and
reference counts are kept on the host, so a full cache is an error and no call waits for the device. Either holds one
layer or all layers of a model, which a ``Step`` writes to at once.
"""

from .capture import CapturedStep
from .contiguous import KVCache
from .paged import PagedKVCache
from .pool import OutOfPages
from .step import Step

__all__ = ["CapturedStep", "KVCache", "OutOfPages", "PagedKVCache", "Step"]
