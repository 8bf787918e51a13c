"""Compares a converted model with ``dual_chunk_attention_config`` (Qwen2.5-1M) with a float64 forward pass by the
formula, and with the scheme that vLLM's plugin reads from the same configuration."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import logits, schemes, tiny
from flashrope import Rotary
from flashrope.integrations.transformers import convert, from_pretrained
from flashrope.integrations.vllm.configured import adopt_chunks
from flashrope.integrations.vllm.engine_plan import make_plan
from flashrope.schemes.dual_chunk import asks_for_chunks, read_chunks
from vllm_configs import config

SIZES = {"chunk_size": 160, "local_size": 32}  # chunks of 128
QWEN = {**SIZES, "original_max_position_embeddings": 100}
SPARSE = {"sparse_attention_enabled": True, "sparse_attention_config": [{}]}
BASE, BOUND = 1e4, 1e-4
ROPE = Rotary.rope(16, base=BASE)


def qwen(chunks=QWEN, **options):
    model = tiny("qwen2", max_position_embeddings=512, use_sliding_window=False, layer_types=None)
    model.config.dual_chunk_attention_config = chunks
    return convert(model, **options)


class Float64Model:
    """Computes Qwen2 in float64 with the weights of a model. A factor that depends on a call's number of keys scales
    its scores.

    The key at j rotates by j mod 128. Let n be the number of chunk boundaries between a query and a key. The query at i
    rotates by i mod 128 if n = 0, by min(i mod 128 + 128, 160) if n = 1, and by 160 if n is larger.
    """

    def __init__(self, model, length: float | None = 100):
        self.model, self.length = copy.deepcopy(model).double(), length
        self.cache = [torch.empty(2, 0, 2, 16, dtype=torch.float64) for _ in model.model.layers]

    def call(self, ids) -> torch.Tensor:
        """Returns the logits (tokens, vocabulary) of ids that follow the ids of earlier calls."""
        x = self.model.model.embed_tokens.weight[ids]
        for n, layer in enumerate(self.model.model.layers):
            part, h = layer.self_attn, self._norm(x, layer.input_layernorm)
            q, k, v = (getattr(part, f"{name}_proj")(h).unflatten(-1, (-1, 16)) for name in "qkv")
            self.cache[n] = torch.cat((self.cache[n], torch.stack((k, v))), 1)
            x = x + part.o_proj(self._attend(q, *self.cache[n]).flatten(-2))
            h, mlp = self._norm(x, layer.post_attention_layernorm), layer.mlp
            x = x + mlp.down_proj(F.silu(mlp.gate_proj(h)) * mlp.up_proj(h))
        return self.model.lm_head(self._norm(x, self.model.model.norm))

    def _attend(self, q, k, v) -> torch.Tensor:
        j, heads = torch.arange(len(k)), q.shape[1] // k.shape[1]
        i = j[-len(q) :]
        k, v = (x.repeat_interleave(heads, 1) for x in (k, v))
        of_query = torch.stack((i % 128, (i % 128 + 128).clamp(max=160), torch.full_like(i, 160)))
        keys = rotated(k, j % 128)
        scores = torch.stack([torch.einsum("ihd,jhd->hij", rotated(q, at), keys) for at in of_query])
        apart = (i[:, None] // 128 - j // 128).clamp(0, 2)
        scores = scores.gather(0, apart.expand(1, q.shape[1], -1, -1))[0] / 4
        if self.length is not None:
            scores = scores * max(1, 0.1 * math.log(len(k) / self.length) + 1)
        weights = scores.masked_fill(j > i[:, None], -torch.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, v)

    def _norm(self, x, norm):
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def rotated(x, at) -> torch.Tensor:
    angles = at[:, None, None] * BASE ** -(torch.arange(8, dtype=torch.float64) / 8)
    one, two = x.chunk(2, -1)
    return torch.cat((one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()), -1)


def tokens(count, seed=0):
    return torch.randint(3, 60, (1, count), generator=torch.Generator().manual_seed(seed))


def expected(model, ids, calls=(), **options) -> torch.Tensor:
    reference, ends = Float64Model(model, **options), list(calls) or [ids.shape[1]]
    return torch.cat([reference.call(ids[0, start:end]) for start, end in zip([0, *ends], ends, strict=False)])[None]


def difference(a, b) -> float:
    return float((a - b).abs().max())


@pytest.fixture(scope="module")
def model():
    with torch.no_grad():
        yield qwen()


CALLS = {
    "one call": [300],
    "at the edges of chunks and of the length": [99, 100, 101, 127, 128, 129, 256, 257, 300],
    "one token at a time": [90, *range(91, 135), 300],
}


@pytest.mark.parametrize("calls", CALLS)
def test_logits_are_those_of_the_formula(model, calls):
    """Over a cache, the factor of each call depends on the number of keys so far. Without the factor, or without
    chunks, the logits are different."""
    ids, ends = tokens(300), CALLS[calls]
    found = logits(model, ids, calls=ends)
    assert difference(found, expected(model, ids, ends)) <= BOUND
    assert difference(found, expected(model, ids, ends, length=None)) > 100 * BOUND
    assert difference(logits(qwen(dual_chunk=False), ids, calls=ends), found) > 100 * BOUND
    short = ids[:, :100]
    assert difference(logits(model, short), logits(qwen(dual_chunk=False), short)) <= BOUND


def test_batches(model):
    """In a batch, each sequence has the factor for its own number of keys. Left padding and the keys of other sequences
    in a packed row are not counted."""
    long, short = tokens(300), tokens(170, seed=1)
    alone = [expected(model, ids) for ids in (long, short)]
    ids = torch.cat((long, F.pad(short, (130, 0))))
    mask = torch.ones_like(ids)
    mask[1, :130] = 0
    for found in (logits(model, ids, mask), logits(model, ids, mask, calls=[300])):
        assert difference(found[:1], alone[0]) <= BOUND and difference(found[1:, 130:], alone[1]) <= BOUND
    rows = torch.cat((torch.arange(300), torch.arange(170)))[None]
    found = logits(model, torch.cat((long, short), 1), position_ids=rows)
    assert difference(found[:, :300], alone[0]) <= BOUND and difference(found[:, 300:], alone[1]) <= BOUND


def test_gradients_have_the_factor(model):
    ids, ours = tokens(200), copy.deepcopy(model)
    theirs = Float64Model(model)
    with torch.enable_grad():
        for outputs in (ours(ids, use_cache=False).logits[0], theirs.call(ids[0])):
            outputs[-1].logsumexp(-1).backward()
    for one, two in zip(ours.model.layers, theirs.model.model.layers, strict=True):
        for name in ("q_proj", "k_proj"):
            found, wanted = (getattr(layer.self_attn, name).weight.grad for layer in (one, two))
            assert difference(found, wanted) <= 1e-4 * float(wanted.abs().max())


# ---- what is read


READ = {
    "chunks": (SIZES, {}, ROPE.dual_chunk(160, 32)),
    "with the factor": (QWEN, {}, ROPE.dual_chunk(160, 32, 100)),
    "a length of 0": ({**QWEN, "original_max_position_embeddings": 0}, {}, ROPE.dual_chunk(160, 32)),
    "sparse": ({**QWEN, **SPARSE}, {}, ROPE.dual_chunk(160, 32, 100)),
    "log n": (QWEN, {"log_n": 64}, ROPE.dual_chunk(160, 32, 100).log_n(64)),
    "other chunks": (QWEN, {"dual_chunk": [288, 32]}, ROPE.dual_chunk(288, 32)),
    "none": (QWEN, {"dual_chunk": False}, ROPE),
    "a window in their place": (QWEN, {"dual_chunk": False, "rerope": 64}, ROPE.rectify(64)),
    "another scheme": (QWEN, {"rotary": Rotary.hope(16, 64).text}, Rotary.hope(16, 64)),
}


@pytest.mark.parametrize("case", READ)
def test_convert_reads_what_vllm_serves(case):
    chunks, options, rotary = READ[case]
    model = qwen(chunks, **options)
    assert set(schemes(model)) == {rotary}
    asking = config(options or None, hf=dict(head_dim=16, hidden_size=64, dual_chunk_attention_config=chunks))
    adopt_chunks(asking.model_config)
    assert {layer.rotary for layer in make_plan(asking).layers} == {rotary}


def test_one_reader_of_the_field():
    """If several configurations ask for chunks, the first of them decides on the chunks and on sparse attention."""
    empty, whole = SimpleNamespace(dual_chunk_attention_config={}), SimpleNamespace()
    text = SimpleNamespace(dual_chunk_attention_config={**QWEN, **SPARSE})
    other = SimpleNamespace(dual_chunk_attention_config=SIZES)
    assert read_chunks(empty, whole, text, other) == ([160, 32, 100], True)
    assert read_chunks(other, text) == ([160, 32], False)
    assert read_chunks(empty, whole) is None and not asks_for_chunks(empty) and asks_for_chunks(other)


def test_from_hf_config():
    fields = dict(head_dim=16, rope_theta=BASE, max_position_embeddings=160, num_attention_heads=4)
    read = Rotary.from_hf_config(SimpleNamespace(**fields, dual_chunk_attention_config=QWEN))
    assert read == ROPE.dual_chunk(160, 32, 100)
    for chunks, message in (
        ({"chunk_size": 160}, "expected chunk_size and local_size, got none of local_size"),
        ({**QWEN, "chunks": 3}, "expected names among chunk_size, .*, got 'chunks'"),
    ):
        with pytest.raises(ValueError, match=f"^dual_chunk_attention_config: {message}"):
            Rotary.from_hf_config(SimpleNamespace(**fields, dual_chunk_attention_config=chunks))
    with pytest.raises(TypeError, match="^dual_chunk_attention_config: expected a dict with chunk_size, .* got 160"):
        Rotary.from_hf_config(SimpleNamespace(**fields, dual_chunk_attention_config=160))


@pytest.mark.parametrize("options", [{}, {"dual_chunk": False}, {"dual_chunk": (288, 32)}], ids=str)
def test_saved_and_loaded(tmp_path, options):
    model = qwen(**options)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path) if options else convert(type(model).from_pretrained(tmp_path))
    assert schemes(loaded) == schemes(model)


def test_a_window_beside_the_chunks_is_refused():
    with pytest.raises(ValueError, match="^rectify: this scheme has self_extend or dual_chunk already"):
        qwen(rerope=64)
    with pytest.raises(ValueError, match="dual_chunk: expected at most one of rerope, .* got also rerope"):
        qwen(rerope=64, dual_chunk=(160, 32))
