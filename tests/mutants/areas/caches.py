"""Mutants: caches."""

from ..breaks import Group

CACHES = ("tests/caches/test_cache.py", "tests/caches/test_cache_layers.py")

GROUPS = (
    Group(
        "caches",
        "python/flashrope/cache/contiguous.py",
        CACHES,
        (
            (
                "a full cache takes one more token",
                "if longest + seqlen_new > self.capacity:",
                "if longest + seqlen_new > self.capacity + 1:",
            ),
            (
                "tokens are counted twice",
                "            self.seqlens.add_(seqlen_new)\n",
                "            self.seqlens.add_(2 * seqlen_new)\n",
            ),
            (
                "truncating keeps the padding",
                "        self._pad([min(pad, length) for pad, length in zip(self._padding, self._lengths, strict=True)])\n",
                "        self._pad(list(self._padding))\n",
            ),
            (
                "the padding of a step is forgotten",
                "        self._count(step.seqlen_new)\n        self._pad(step.padding)\n",
                "        self._count(step.seqlen_new)\n",
            ),
        ),
    ),
    Group(
        "caches",
        "python/flashrope/cache/paged.py",
        CACHES,
        (
            (
                "a fork shares the reserved pages",
                "shared = parent.pages[: -(-parent.length // self.page_size)]",
                "shared = parent.pages[:]",
            ),
            (
                "a fork does not hold its pages",
                "            self._references[page] += 1\n            self._set(child, n, page)\n",
                "            self._set(child, n, page)\n",
            ),
            (
                "appending writes into a shared page",
                "if shared is not None and references[shared] - copied[shared] > 1:",
                "if shared is not None and references[shared] - copied[shared] > 2:",
            ),
            (
                "a page at the edge is not reserved",
                "end = -(-(sequence.length + seqlen_new) // self.page_size)",
                "end = (sequence.length + seqlen_new) // self.page_size",
            ),
            (
                "truncating keeps a page",
                "self._give_back(shortened, -(-length // self.page_size))",
                "self._give_back(shortened, length // self.page_size + 1)",
            ),
            (
                "a freed page that others share is free",
                "            if not self._references[page]:\n",
                "            if self._references[page] < 2:\n",
            ),
            (
                "an undone step keeps its pages",
                "            self._references[page] = 0\n            self._free.append(page)\n",
                "            self._references[page] = 0\n",
            ),
            (
                "the table keeps a page that was given back",
                "            self._set(sequence, len(sequence.pages), UNUSED)\n",
                "            pass\n",
            ),
            (
                "only the keys of a shared page are copied",
                "            for pool in (self.k, self.v):\n",
                "            for pool in (self.k,):\n",
            ),
            (
                "a fork forgets its padding",
                "child = _Sequence(self._take_row(), shared, parent.length, parent.leftpad)",
                "child = _Sequence(self._take_row(), shared, parent.length)",
            ),
        ),
    ),
    Group(
        "caches",
        "python/flashrope/cache/step.py",
        CACHES,
        (
            (
                "a step counts though a layer wrote nothing",
                "len(self._written) == cache.layers):",
                "len(self._written) >= 1):",
            ),
            ("a step that raised counts", "if kind is None and (not self", "if (not self"),
            (
                "a later layer does not see the new keys",
                "                self._ends = seqlens + self.seqlen_new\n",
                "                self._ends = seqlens\n",
            ),
            (
                "a layer writes twice",
                "if (layer or 0) in self._written:\n            raise",
                "if False:\n            raise",
            ),
            (
                "a step is used after it was left",
                "        if self._cache._open is not self:\n",
                "        if False:\n",
            ),
            (
                "reading forgets the padding",
                "            seqlens = self._ends\n        options = with_leftpad(options, self.leftpad)\n",
                "            seqlens = self._ends\n        options = with_leftpad(options, None)\n",
            ),
            (
                "append forgets the table",
                "CacheLayout(self.seqlens, self.block_table, seq",
                "CacheLayout(self.seqlens, None, seq",
            ),
        ),
    ),
    Group(
        "caches",
        "python/flashrope/cache/storage.py",
        CACHES,
        (
            (
                "layers share their storage",
                "zip(self.k.unbind(), self.v.unbind(), strict=True)",
                "zip(self.k.unbind(), self.v[:1].expand_as(self.v).unbind(), strict=True)",
            ),
            ("half of the bytes", "return self.k.nbytes + self.v.nbytes", "return self.k.nbytes"),
            (
                "tokens become padding",
                "old, length + seqlen_new if length == old else old)",
                "old, length + seqlen_new)",
            ),
            (
                "padding becomes tokens",
                'check_integer(f"leftpad of entry {b}", new, old, ',
                'check_integer(f"leftpad of entry {b}", new, 0, ',
            ),
        ),
    ),
)
