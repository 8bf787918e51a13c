"""attention_varlen_with_cache: one-token steps, chunks and whole prompts in one batch, each as if it were alone."""

import pytest
import support
import torch
from support import COEFFICIENT, SCHEMES
from test_decode import Cached, layouts

from flashrope import attention_varlen_with_cache

# (new tokens, length with them): a step, nothing, a long prompt, a short one, a chunk, two steps, a chunk
MIXED = ((1, 45), (0, 7), (70, 70), (5, 5), (66, 112), (1, 1), (1, 90), (65, 100))


class Packed(Cached):
    """Sequences with queries of different lengths. placed: the caller says which slots the new keys go to."""

    def __init__(self, target, rotary, sizes, heads=4, group=2, leftpad=None, capacity=128, page_size=0, **options):
        self.placed = options.pop("placed", False)
        self.sizes = [size for size, _ in sizes]
        sequences = [
            support.problem(target, rotary, size, length, heads=heads, group=group, seed=10 * b, **options)
            for b, (size, length) in enumerate(sizes)
        ]
        super().__init__(sequences, 0, capacity, leftpad, page_size)  # all keys are in the cache
        starts = torch.tensor([0, *self.sizes], device=self.cache_seqlens.device).cumsum(0)
        self.cu_seqlens_q = starts.to(torch.int32)
        self._remove_new_keys()

    def _remove_new_keys(self):
        """Their slots become NaN; slot_mapping says where they were."""
        slots = []
        for b, (size, length) in enumerate(zip(self.sizes, self.cache_seqlens.tolist(), strict=True)):
            for slot in range(length - size, length):
                if self.page_size:
                    page = int(self.block_table[b, slot // self.page_size])
                    slots.append(page * self.page_size + slot % self.page_size)
                else:
                    slots.append(b * self.capacity + slot)
        self.slot_mapping = torch.tensor(slots, device=self.cache_seqlens.device)
        for cache in (self.k_cache, self.v_cache):
            cache.flatten(0, 1)[self.slot_mapping] = torch.nan
        self.lengths_before = self.cache_seqlens - torch.tensor(self.sizes, dtype=torch.int32).to(self.cache_seqlens)

    def packed(self, name):
        last = (
            getattr(p, name)[0, getattr(p, name).shape[1] - size :]
            for p, size in zip(self.sequences, self.sizes, strict=True)
        )
        return torch.cat(list(last))

    def run(self, impl, **options):
        p = self.sequences[0]
        tables = {"block_table": self.block_table, "cache_leftpad": self.cache_leftpad}
        tables |= {"slot_mapping": self.slot_mapping} if self.placed else {}
        return attention_varlen_with_cache(
            self.packed("q"),
            self.k_cache,
            self.v_cache,
            p.rotary,
            self.cu_seqlens_q,
            self.cache_seqlens if self.placed else self.lengths_before,
            max(self.sizes),
            self.packed("k"),
            self.packed("v"),
            causal=p.causal,
            softmax_scale=p.softmax_scale,
            return_lse=True,
            impl=impl,
            **{"validate": True} | tables | options,
        )

    def check(self, target, **options):
        out, lse = self.run(target.impl, **options)
        assert out.dtype == target.dtype and lse.dtype == support.lse_type(target)
        for b, p in enumerate(self.sequences):
            rows = slice(int(self.cu_seqlens_q[b]), int(self.cu_seqlens_q[b + 1]))
            if self.sizes[b]:
                got = {"out": out[None, rows], "lse": lse[None, :, rows]}
                ratios = support.excess(got, *support.exact_and_bound(p), target.dtype)
                over = {name: ratio for name, ratio in ratios.items() if not ratio <= COEFFICIENT[target.dtype]}
                assert not over, f"sequence {b}: error over u * bound {over}"
        for cache, name in ((self.k_cache, "k"), (self.v_cache, "v")):
            assert torch.equal(cache.flatten(0, 1)[self.slot_mapping], self.packed(name))


placed = pytest.mark.parametrize("placed", [False, True], ids=["appended", "placed"])


@pytest.mark.interpreted(
    lambda exact, scheme, page_size, placed: scheme == "hope_rerope_log_n" and bool(page_size) == placed
)
@placed
@layouts
@pytest.mark.parametrize("scheme", ["none", "rope_interleaved", "hope_rerope_log_n", "leaky", "yarn_leaky_local_log_n"])
def test_mixed_batch(exact, scheme, page_size, placed):
    pads = (3, 0, 0, 2, 10, 0, 1, 0)
    Packed(exact, SCHEMES[scheme](16), MIXED, leftpad=pads, page_size=page_size, placed=placed).check(exact)
