"""Caches of raw keys and values for decoding.

``KVCache`` has one row of slots per sequence; ``PagedKVCache`` has pages that sequences share. Lengths, page tables and
reference counts are kept on the host, so a full cache is an error and no call waits for the device.
"""

from .contiguous import KVCache
from .paged import OutOfPages, PagedKVCache

__all__ = ["KVCache", "OutOfPages", "PagedKVCache"]
