"""attention_varlen_with_cache: one-token steps, chunks and whole prompts in one batch, each as if it were alone."""

import pytest
import support
import torch
from flashrope import CacheLayer, CacheTables, Rotary, attention_varlen_with_cache, attention_with_cache
from flashrope.backends import cache_tables
from flashrope.operators.fields import flatten
from support import SCHEMES
from test_decode import PAGE, Cached, layouts

# (new tokens, length with them): a chunk, a step, nothing, a long prompt, a short one, two steps, a chunk
MIXED = ((66, 112), (1, 45), (0, 7), (70, 70), (5, 5), (1, 1), (1, 90), (65, 100))


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
            k=self.packed("k"),
            v=self.packed("v"),
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
                support.check_budget(got, p, target.dtype, f"sequence {b}: ")
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
    pads = (10, 3, 0, 0, 2, 0, 1, 0)
    Packed(exact, SCHEMES[scheme](16), MIXED, leftpad=pads, page_size=page_size, placed=placed).check(exact)


@pytest.mark.interpreted(lambda target, placed: target.dtype == torch.float16)
@placed
def test_every_type(target, placed):
    Packed(target, SCHEMES["hope_rerope_log_n"](40), MIXED, page_size=PAGE, placed=placed).check(target)


@pytest.mark.interpreted(lambda exact, heads, head_dim: heads == (20, 1))
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 8), ((6, 3), 72), ((20, 1), 16)])
def test_head_dims_and_groups(exact, heads, head_dim):
    rotary = Rotary.hope(head_dim, 100).rectify(21)
    sizes = ((2, 45), (66, 80), (1, 3))
    Packed(exact, rotary, sizes, heads=heads[0], group=heads[0] // heads[1], page_size=PAGE).check(exact)


@pytest.mark.interpreted(lambda exact, causal, sizes: causal == (len(sizes) > 1))
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    "sizes", [((1, 45), (1, 9)), ((3, 45), (64, 64), (0, 3)), ((70, 70),)], ids=["steps", "short", "long"]
)
def test_batches_of_one_kind(exact, causal, sizes):
    Packed(exact, Rotary.rope(16).rectify(21).log_n(20), sizes, page_size=PAGE, causal=causal).check(exact)


@pytest.mark.interpreted(lambda exact, num_splits: num_splits == 3)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_given_splits_are_bitwise_identical_to_each_sequence_alone(exact, num_splits):
    rotary = SCHEMES["hope_rerope_log_n"](16)
    sizes = ((66, 112), (1, 45), (0, 7), (5, 5), (1, 90))
    batch = Packed(exact, rotary, sizes, page_size=PAGE, leftpad=(10, 3, 0, 2, 1))
    out, lse = batch.run(exact.impl, num_splits=num_splits)
    for b, size in enumerate(batch.sizes):
        if size:
            rows = slice(int(batch.cu_seqlens_q[b]), int(batch.cu_seqlens_q[b + 1]))
            alone = attention_with_cache(
                batch.packed("q")[None, rows],
                batch.k_cache,
                batch.v_cache,
                rotary,
                batch.cache_seqlens[b : b + 1],
                block_table=batch.block_table[b : b + 1],
                cache_leftpad=batch.cache_leftpad[b : b + 1],
                softmax_scale=batch.sequences[0].softmax_scale,
                return_lse=True,
                impl=exact.impl,
                num_splits=num_splits,
            )
            assert torch.equal(alone[0][0], out[rows]) and torch.equal(alone[1][0], lse[:, rows])


@pytest.mark.interpreted(lambda exact: True)
def test_steps_are_split_beside_prompts(exact):
    """With this capacity Triton splits the keys of the short ones; the results of several splits have less room."""
    sizes = ((64, 300), (1, 500), (70, 90), (66, 66), (1, 9), (2, 400))
    Packed(exact, Rotary.rope(16).rectify(21), sizes, heads=2, capacity=512, page_size=PAGE).check(exact)


@pytest.mark.interpreted(lambda exact: True)
def test_rows_outside_every_sequence(exact):
    """A batch padded to the size of a CUDA graph: rows and sequences that are not there."""
    batch = Packed(exact, Rotary.rope(16).rectify(9), ((1, 30), (66, 66)), page_size=PAGE)
    want_out, want_lse = batch.run(exact.impl)
    rows = lambda x: torch.cat([x, x[:5]])  # noqa: E731
    batch.packed, packed = lambda name: rows(packed(name)), batch.packed
    batch.cu_seqlens_q = torch.cat([batch.cu_seqlens_q, batch.cu_seqlens_q[-1:].expand(3)])
    batch.lengths_before = torch.cat([batch.lengths_before, batch.lengths_before.new_zeros(3)])
    batch.block_table = torch.cat([batch.block_table, batch.block_table[:1].expand(3, -1)])
    out, lse = batch.run(exact.impl, validate=False)
    assert torch.equal(out[:67], want_out) and torch.equal(lse[:, :67], want_lse)
    assert not out[67:].any() and (lse[:, 67:] == float("-inf")).all()


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_sequences_that_share_no_run(impl):
    """Empty calls: no sequence, no row, no key."""
    k_cache, v_cache = torch.randn(2, 3, 16, 1, 16)
    none, rotary = torch.zeros(1, dtype=torch.int32), Rotary.rope(16)
    empty = torch.zeros(0, dtype=torch.int32)
    out = attention_varlen_with_cache(
        torch.randn(2, 1, 16), k_cache[:0], v_cache[:0], rotary, none, empty, 0, impl=impl
    )
    assert out.shape == (2, 1, 16) and not out.any()
    starts = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    q, lengths = torch.randn(2, 1, 16), torch.zeros(3, dtype=torch.int32)
    out, lse = attention_varlen_with_cache(q, k_cache, v_cache, rotary, starts, lengths, 1, return_lse=True, impl=impl)
    assert not out.any() and (lse == float("-inf")).all()


# ---- wrong tables

HOSTILE = {
    "negative length": ("cache_seqlens", -5),
    "largest length": ("cache_seqlens", 2**31 - 1),
    "negative page": ("block_table", -3),
    "huge page": ("block_table", 2147480000),
    "huge slot": ("slot_mapping", 2**40),
    "pad beyond": ("cache_leftpad", 1 << 30),
}


@pytest.mark.interpreted(lambda exact, entry: entry[1] in (-5, 2147480000, 2**40))
@pytest.mark.parametrize("entry", HOSTILE.values(), ids=HOSTILE.keys())
def test_wrong_entries_affect_only_their_sequence(exact, entry):
    name, value = entry
    placed = name == "slot_mapping"
    sizes = ((1, 30), (4, 20), (66, 80), (1, 9))
    make = lambda: Packed(exact, Rotary.rope(16).rectify(9), sizes, leftpad=(2, 1, 0, 0), page_size=PAGE, placed=placed)  # noqa: E731
    right, wrong = make(), make()
    if name == "cache_seqlens":
        wrong.lengths_before[1] = value
    elif name == "block_table":
        wrong.block_table[1] = value
    else:
        getattr(wrong, name)[1] = value
    with pytest.raises(ValueError, match=rf"{name}: (sequence 1|token 1)\b"):
        wrong.run(exact.impl)
    out, lse = wrong.run(exact.impl, validate=False)
    want_out, want_lse = right.run(exact.impl)
    others = torch.tensor([0, *range(5, 72)])
    assert torch.equal(out[others], want_out[others]) and torch.equal(lse[:, others], want_lse[:, others])
    for b in (0, 2, 3):
        pages = right.block_table[b][right.block_table[b] < 1000].long()
        for x, y in ((wrong.k_cache, right.k_cache), (wrong.v_cache, right.v_cache)):
            assert torch.equal(x[pages].nan_to_num(7), y[pages].nan_to_num(7))


# ---- the call

SLOTS = torch.tensor([3, 41, 42])


def arguments(**changes):
    call = dict(
        q=torch.randn(3, 4, 16),
        k_cache=torch.randn(2, 32, 2, 16),
        v_cache=torch.randn(2, 32, 2, 16),
        rotary=Rotary.rope(16),
        cu_seqlens_q=torch.tensor([0, 1, 3], dtype=torch.int32),
        cache_seqlens=torch.tensor([3, 9], dtype=torch.int32),
        max_seqlen_q=2,
        k=torch.randn(3, 2, 16),
        v=torch.randn(3, 2, 16),
    )
    return call | changes


def test_negative_slots_are_left_out(exact):
    """Slot -1 would be the last one before the cache, which is the end of a larger tensor."""
    call = arguments(slot_mapping=torch.tensor([3, -1, 42]), impl=exact.impl)
    call = {name: x.to(exact.device) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    whole = torch.cat((torch.zeros_like(call["k_cache"]), call["k_cache"]))
    before, call["k_cache"] = whole.clone(), whole[2:]
    attention_varlen_with_cache(**call)
    changed = (whole != before).flatten(0, 1).any(-1).any(-1).nonzero().flatten()
    assert changed.tolist() == [64 + 3, 64 + 42]


@pytest.mark.parametrize("slot_mapping", [None, SLOTS], ids=["appended", "placed"])
def test_compile_keeps_the_write(slot_mapping):
    def step(**call):
        out = attention_varlen_with_cache(**call)
        return out + 0, call["k_cache"].sum()

    call = arguments(slot_mapping=slot_mapping)
    other = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    for a, b in zip(step(**call), torch.compile(step, fullgraph=True, backend="aot_eager")(**other), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(call["k_cache"], other["k_cache"]) and torch.equal(call["v_cache"], other["v_cache"])


def test_opcheck():
    call = arguments()
    cache, lengths, starts = (call["k_cache"], call["v_cache"]), call["cache_seqlens"], call["cu_seqlens_q"]
    new, text = (call["k"], call["v"]), Rotary.rope(16).rectify(5).text
    layer = flatten(CacheLayer, CacheLayer(*cache))
    for slots in (SLOTS, None):
        tables = flatten(CacheTables, CacheTables(lengths, new=cache_tables.Packed(starts, 2, slots, slots is None)))
        for rotary in (None, Rotary.rope(16).text):
            torch.library.opcheck(torch.ops.flashrope.append_to_cache, (*layer, *new, *tables, rotary, "cpu"))
    torch.library.opcheck(
        torch.ops.flashrope.attention_with_cache,
        (call["q"], *layer, *tables, 0, text, False, True, 0.25, "cpu"),
    )


def test_rows_behind_sequences_of_equal_length(exact):
    q, k, v = (support.random((1, 3, heads, 16), exact, heads)[0] for heads in (4, 2, 2))
    k_cache, v_cache = torch.zeros(2, 2, 16, 2, 16, device=exact.device)
    starts, seqlens = (support.int32(x, exact.device) for x in ([0, 1, 2], [3, 5]))
    out, lse = attention_varlen_with_cache(
        q, k_cache, v_cache, Rotary.rope(16), starts, seqlens, 1, k=k, v=v, return_lse=True, impl=exact.impl
    )
    assert out.shape == q.shape and lse.shape == (4, 3)
    assert out[:2].all() and not out[2].any() and lse[:, 2].isneginf().all() and lse[:, :2].isfinite().all()
