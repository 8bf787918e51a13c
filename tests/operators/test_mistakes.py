"""Mistakes that a new user makes: each message names the argument, what was expected, and what came.

More of the public calls' arguments: test_errors.py; of the caches: test_cache.py; of bands: test_bands.py.
"""

import contextlib
import inspect
import io
import math
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from flashrope import (
    KVCache,
    PagedKVCache,
    Rotary,
    attention,
    attention_varlen,
    attention_varlen_with_cache,
    attention_with_cache,
)
from flashrope.commands.main import main
from flashrope.integrations.distributed import context_parallel_attention, shard_sequence
from flashrope.operators.foreign_keywords import ELSEWHERE, INSTEAD

ROPE = Rotary.rope(16)
CALLS = (attention, attention_varlen, attention_with_cache, attention_varlen_with_cache)


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


Q, K = zeros(2, 6, 4, 16), zeros(2, 6, 2, 16)
ONE, NEW = zeros(2, 1, 4, 16), zeros(2, 1, 2, 16)


def dense(**changes):
    return attention(**{"q": Q, "k": K, "v": K, "rotary": ROPE} | changes)


def varlen(**changes):
    lengths = {"cu_seqlens_q": int32(0, 4, 9), "cu_seqlens_k": int32(0, 4, 9), "max_seqlen_q": 5, "max_seqlen_k": 5}
    tensors = {"q": zeros(9, 4, 16), "k": zeros(9, 2, 16), "v": zeros(9, 2, 16), "rotary": ROPE}
    return attention_varlen(**tensors | lengths | changes)


def cached(**changes):
    caches = {"k_cache": zeros(2, 32, 2, 16), "v_cache": zeros(2, 32, 2, 16), "cache_seqlens": int32(3, 5)}
    return attention_with_cache(**{"q": ONE, "rotary": ROPE, "k": NEW, "v": NEW} | caches | changes)


def paged(**changes):
    pages = {
        "k_cache": zeros(8, 16, 2, 16),
        "v_cache": zeros(8, 16, 2, 16),
        "block_table": int32(0, 1, 2, 3).view(2, 2),
    }
    return cached(**pages | changes)


def varlen_cached(**changes):
    caches = {"k_cache": zeros(2, 32, 2, 16), "v_cache": zeros(2, 32, 2, 16), "cache_seqlens": int32(3, 5)}
    tensors = {"q": zeros(9, 4, 16), "k": zeros(9, 2, 16), "v": zeros(9, 2, 16), "rotary": ROPE}
    queries = {"cu_seqlens_q": int32(0, 4, 9), "max_seqlen_q": 5}
    return attention_varlen_with_cache(**tensors | caches | queries | changes)


def rows(**options):
    sizes = {"batch": 2, "capacity": 32, "heads_kv": 2, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}
    return KVCache(**sizes | options)


def pages(**options):
    sizes = {"pages": 8, "page_size": 16, "heads_kv": 2, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}
    return PagedKVCache(**sizes | options)


def parallel(function, *tensors, **options):
    """In a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return function(*tensors, **options)
    finally:
        dist.destroy_process_group()


class Usage(Exception):
    """What a command that exits with code 2 says."""


def command(*words):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        try:
            code = main(list(words))
        except SystemExit as stop:
            code = stop.code
    assert code == 2, (code, stderr.getvalue())
    raise Usage(stderr.getvalue().splitlines()[-1])


T, V, M = TypeError, ValueError, "meta"
FIELDS = '{"head_dim": 16, "frequencies": [1.0], '

# what happened: (call, error, the argument, what is expected, what came)
MISTAKES = {
    # flash-attn's and SDPA's habits
    "dropout as the fourth": (lambda: attention(Q, K, K, 0.0), T, "rotary", "a flashrope.Rotary", "float"),
    "cos and sin": (lambda: dense(rotary=(Q, Q)), T, "rotary", "a flashrope.Rotary", "tuple"),
    "a base": (lambda: dense(rotary=10_000), T, "rotary", "a flashrope.Rotary", "int"),
    "a builder, not called": (lambda: dense(rotary=Rotary.rope), T, "rotary", "a flashrope.Rotary", "method"),
    "window_size": (lambda: dense(window_size=(128, 0)), T, "window_size", "rotary.local(w + 1)", "(128, 0)"),
    "no dropout": (lambda: dense(dropout_p=0.0), T, "dropout_p", "no dropout; leave it out", "dropout_p=0.0"),
    "softcap": (lambda: varlen(softcap=30.0), T, "softcap", "nothing, these kernels have no soft", "30.0"),
    "alibi": (lambda: varlen(alibi_slopes=Q), T, "alibi_slopes", "no ALiBi", "a tensor of shape (2, 6, 4, 16)"),
    "is_causal": (lambda: dense(is_causal=True), T, "is_causal", "causal, which is True by", "is_causal=True"),
    "attn_mask": (lambda: dense(attn_mask=None), T, "attn_mask", "attention_varlen for packed", "attn_mask=None"),
    "scale": (lambda: cached(scale=0.1), T, "scale", "softmax_scale", "scale=0.1"),
    "enable_gqa": (lambda: dense(enable_gqa=True), T, "enable_gqa", "from the shapes; leave it out", "True"),
    "probabilities": (lambda: dense(return_attn_probs=True), T, "return_attn_probs", "return_lse", "True"),
    "softmax_lse": (lambda: cached(return_softmax_lse=True), T, "return_softmax_lse", "return_lse", "True"),
    "deterministic": (lambda: cached(deterministic=True), T, "deterministic", "no backward", "True"),
    "rotary_cos": (lambda: cached(rotary_cos=Q), T, "rotary_cos", "rotary, a Rotary", "a tensor of shape"),
    "cache_batch_idx": (lambda: cached(cache_batch_idx=Q), T, "cache_batch_idx", "block_table", "a tensor of"),
    "block_tables": (lambda: varlen_cached(block_tables=Q), T, "block_tables", "block_table", "a tensor of"),
    "page_table": (lambda: paged(page_table=3), T, "page_table", "block_table", "page_table=3"),
    "pages without a cache": (lambda: varlen(block_table=3), T, "block_table", "attention_varlen_with_cac", "3"),
    "seqused_k": (lambda: varlen(seqused_k=3), T, "seqused_k", "cache_seqlens", "seqused_k=3"),
    "s_aux": (lambda: dense(s_aux=3), T, "s_aux", "sinks", "s_aux=3"),
    "position_ids": (lambda: dense(position_ids=3), T, "position_ids", "positions", "position_ids=3"),
    "a typing error": (lambda: dense(softmax_scal=1.0), T, "softmax_scal", "softmax_scale", "softmax_scal=1.0"),
    "an unknown word": (lambda: dense(zebra=1.0), T, "zebra", "one of q, k, v, rotary, causal", "zebra=1.0"),
    "window_size of a cache": (lambda: rows().attend(ONE, ROPE, NEW, NEW, window_size=3), T, "window_size",
                               "rotary.local", "window_size=3"),
    # shapes, dtypes, devices
    "numpy": (lambda: dense(q=Q.numpy()), T, "q", "a tensor", "ndarray"),
    "packed in attention": (lambda: dense(q=Q[0]), V, "q", "(batch, seqlen, heads, head_dim)", "(6, 4, 16)"),
    "dense in varlen": (lambda: varlen(q=Q), V, "q", "(total, heads, head_dim)", "(2, 6, 4, 16)"),
    "q and k exchanged": (lambda: dense(q=K, k=Q, v=Q), V, "q", "a multiple of heads_kv = 4", "got 2; shapes"),
    "one query, transposed": (lambda: dense(q=zeros(2, 4, 1, 16)), V, "q", "heads_kv = 2", "got 1; shapes are (b"),
    "bfloat16 keys": (lambda: dense(k=K.bfloat16()), T, "k", "torch.float32 as in q", "torch.bfloat16"),
    "float8": (lambda: dense(q=Q.to(torch.float8_e4m3fn)), T, "q", "float16, bfloat16, float", "float8_e4m3fn"),
    "keys on meta": (lambda: dense(k=K.to(M)), V, "k", "device cpu as in q", "meta"),
    "positions on meta": (lambda: dense(positions=zeros(6, device=M)), V, "positions", "device cpu", "meta"),
    "values of another length": (lambda: dense(v=K[:, :5]), V, "v", "shape (2, 6, 2, 16) as k", "(2, 5, 2, 16)"),
    "head_dim 100": (lambda: dense(q=zeros(2, 6, 4, 100), k=zeros(2, 6, 2, 100)), V, "q", "of 8 up to 256", "100"),
    "another model's scheme": (lambda: dense(rotary=Rotary.rope(64)), V, "rotary", "head_dim 16 as in q", "64"),
    "a list of positions": (lambda: dense(positions=[0, 1]), T, "positions", "a tensor", "list"),
    "positions by axis first": (lambda: dense(positions=zeros(3, 2, 6)), V, "positions", "(2, 6) or", "(3, 2, 6)"),
    "positions of ReRoPE": (lambda: dense(rotary=ROPE.rectify(4), positions=zeros(6)), V, "positions",
                            "a scheme whose distance is d everywhere", "Band(start=4, stop=inf, slope=0.0, offset=4"),
    "axial without": (lambda: dense(rotary=Rotary.axial(16)), V, "positions", "(batch, seqlen, 2)", "got None"),
    "a tensor as scale": (lambda: dense(softmax_scale=torch.tensor(0.5)), T, "softmax_scale", "a number", "tensor"),
    "no scale": (lambda: dense(softmax_scale=math.nan), V, "softmax_scale", "a finite number", "nan"),
    "causal=None": (lambda: dense(causal=None), T, "causal", "True or False", "None"),
    "Hugging Face's impl": (lambda: dense(impl="sdpa"), V, "impl", "None or one of triton, cuda, cpu,", "'sdpa'"),
    "sinks of key heads": (lambda: dense(sinks=zeros(2)), V, "sinks", "shape (4,)", "(2,)"),
    "a list of sinks": (lambda: dense(sinks=[0.0] * 4), T, "sinks", "a tensor", "list"),
    "sinks on meta": (lambda: dense(sinks=zeros(4, device=M)), V, "sinks", "device cpu as q", "meta"),
    # cu_seqlens
    "int64": (lambda: varlen(cu_seqlens_q=int32(0, 4, 9).long()), T, "cu_seqlens_q", "int32", "torch.int64"),
    "lengths, not sums": (lambda: varlen(cu_seqlens_q=int32(4, 5)), V, "cu_seqlens_q", "to start at 0", "got 4"),
    "a list of sums": (lambda: varlen(cu_seqlens_k=[0, 4, 9]), T, "cu_seqlens_k", "an int32 tensor", "list"),
    "sums on meta": (lambda: varlen(cu_seqlens_k=int32(0, 9).to(M)), V, "cu_seqlens_k", "device cpu", "meta"),
    "too many rows": (lambda: varlen(cu_seqlens_q=int32(0, 4, 12)), V, "cu_seqlens_q", "end at 9 at most", "12"),
    "other sequences": (lambda: varlen(cu_seqlens_k=int32(0, 4)), V, "cu_seqlens_k", "shape (3,)", "(2,)"),
    "a small maximum": (lambda: varlen(max_seqlen_q=3), V, "max_seqlen_q", "the longest sequence, 5", "got 3"),
    "a tensor as maximum": (lambda: varlen(max_seqlen_k=torch.tensor(5)), V, "max_seqlen_k", "integer", "tensor(5)"),
    # caches and block tables
    "one length for all": (lambda: cached(cache_seqlens=5), T, "cache_seqlens", "an int32 tensor", "int"),
    "long lengths": (lambda: cached(cache_seqlens=int32(3, 5).long()), T, "cache_seqlens", "int32", "torch.int64"),
    "one length of two": (lambda: cached(cache_seqlens=int32(3)), V, "cache_seqlens", "shape (2,)", "(1,)"),
    "lengths on meta": (lambda: cached(cache_seqlens=int32(3, 5).to(M)), V, "cache_seqlens", "device cpu", "meta"),
    "k without v": (lambda: cached(v=None), V, "v", "both or none of k and v", "only k"),
    "query heads as keys": (lambda: cached(k=ONE), V, "k", "shape (2, 1, 2, 16)", "(2, 1, 4, 16)"),
    "a KVCache as k_cache": (lambda: cached(k_cache=rows()), T, "k_cache", "a tensor", "KVCache"),
    "an int8 cache": (lambda: cached(k_cache=zeros(2, 32, 2, 16).char()), T, "k_cache", "float16, bfloat16", "int8"),
    "pages without a table": (lambda: paged(block_table=None), V, "k_cache", "need a block_table", "got 8"),
    "a gradient": (lambda: cached(q=ONE.clone().requires_grad_()), V, "q, k, v", "no gradient", "torch.no_grad"),
    "no splits": (lambda: cached(num_splits=0), V, "num_splits", "None or a number from 1 to 256", "got 0"),
    "pages of 24": (lambda: paged(k_cache=zeros(8, 24, 2, 16), v_cache=zeros(8, 24, 2, 16)), V, "k_cache",
                    "pages of 16, 32, 64", "page_size 24"),
    "a long table": (lambda: paged(block_table=zeros(2, 4).long()), T, "block_table", "int32", "torch.int64"),
    "one row of a table": (lambda: paged(block_table=int32(0, 1)), V, "block_table", "(2, max_pages)", "(2,)"),
    "a list as table": (lambda: paged(block_table=[[0], [1]]), T, "block_table", "an int32 tensor", "list"),
    "a page too far": (lambda: paged(block_table=int32(0, 1, 9, 9).view(2, 2), validate=True), V,
                       "block_table: sequence 1, entry 0", "a page of the cache, 0 to 7", "got 9"),
    "a page for two": (lambda: paged(block_table=int32(0, 1, 0, 1).view(2, 2), validate=True), V,
                       "block_table: sequence 1, entry 0", "no other entry writes to", "got 0"),
    "a full cache": (lambda: cached(cache_seqlens=int32(3, 32), validate=True), V,
                     "cache_seqlens: sequence 1", "at most 31, with room for 1 new keys in 32 slots", "got 32"),
    "a negative length": (lambda: cached(cache_seqlens=int32(-1, 3), validate=True), V,
                          "cache_seqlens: sequence 0", "at least 0", "got -1"),
    "padding beyond": (lambda: cached(cache_leftpad=int32(0, 9), validate=True), V,
                       "cache_leftpad: sequence 1", "0 to 6, its length", "got 9"),
    "a slot too far": (lambda: varlen_cached(slot_mapping=torch.arange(9) + 60, validate=True), V,
                       "slot_mapping: token 4", "a slot below 64", "got 64"),
    "a slot twice": (lambda: varlen_cached(slot_mapping=int32(*[7] * 9), validate=True), V,
                     "slot_mapping: token 1", "a slot of its own", "got 7"),
    "slots for nothing": (lambda: varlen_cached(k=None, v=None, slot_mapping=torch.arange(9)), V,
                          "slot_mapping", "k and v to place", "none"),
    "a dtype by name": (lambda: rows(dtype="bfloat16"), T, "dtype", "float16, bfloat16, float32", "bfloat16"),
    "a device called gpu": (lambda: rows(device="gpu"), V, "device", "a torch.device, its name or No", "'gpu'"),
    "no capacity": (lambda: rows(capacity=0), V, "capacity", "at least 1", "got 0"),
    "rotary forgotten": (lambda: rows().attend(ONE, NEW, NEW), T, "v", "a tensor", "NoneType"),
    "half-precision q": (lambda: rows().attend(ONE.half(), ROPE, NEW, NEW), T, "q", "torch.float32 as", "float16"),
    "padding of one": (lambda: rows().step(3, leftpad=[1]), V, "leftpad", "a list of 2 numbers", "[1]"),
    "no such layer": (lambda: rows().layer(2), V, "layer", "at least 0 and at most 0", "got 2"),
    "page_size 24": (lambda: pages(page_size=24), V, "page_size", "16, 32, 64, 128 or 256", "got 24"),
    "a bare sequence": (lambda: pages().append(0, NEW, NEW), T, "sequences", "a list of numbers that", "got 0"),
    # builders
    "an odd head_dim": (lambda: Rotary.rope(15), V, "head_dim", "an even integer of at least 2", "got 15"),
    "head_dim as text": (lambda: Rotary.rope("128"), V, "head_dim", "an even integer", "'128'"),
    "a factor as rotary_dim": (lambda: Rotary.rope(64, rotary_dim=0.5), V, "rotary_dim", "an even integer", "0.5"),
    "a wide rotary_dim": (lambda: Rotary.rope(64, rotary_dim=128), V, "rotary_dim", "head_dim = 64", "128"),
    "a base of 1": (lambda: Rotary.rope(64, 1), V, "base", "more than 1", "got 1.0"),
    "a negative length of training": (lambda: Rotary.hope(64, -1), V, "train_length", "a positive", "got -1"),
    "a share as window": (lambda: ROPE.rectify(0.5), V, "window", "a non-negative integer", "got 0.5"),
    "flash-attn's window": (lambda: ROPE.local((128, 0)), V, "window", "a non-negative integer", "(128, 0)"),
    "a negative factor": (lambda: ROPE.rectify(8, -2.0), V, "factor", "a positive number", "got -2.0"),
    "Hugging Face's ntk": (lambda: ROPE.ntk(2.0, "dynamic"), V, "variant", '"old", "aware"', "'dynamic'"),
    "log n of 1": (lambda: ROPE.log_n(1), V, "train_length", "more than 1", "got 1.0"),
    "three axes in 64": (lambda: Rotary.axial(64, axes=3), V, "axes", "a divisor of the 32 pairs", "got 3"),
    "freqs_cis": (lambda: Rotary.from_inv_freq(torch.ones(8, dtype=torch.complex64), 16), T, "inv_freq",
                  "of real numbers", "torch.complex64"),
    "a name as table": (lambda: Rotary.from_inv_freq("llama", 16), T, "inv_freq", "a tensor, array", "'llama'"),
    "no table": (lambda: Rotary.from_inv_freq(None, 16), T, "inv_freq", "a tensor, array", "None"),
    "a table of angles": (lambda: Rotary.from_inv_freq(zeros(9, 8), 16), V, "inv_freq", "one dimension", "(9, 8)"),
    "a model's name": (lambda: Rotary.from_hf_config("llama"), T, "config", "a model configuration", "str"),
    "no configuration": (lambda: Rotary.from_hf_config(None), T, "config", "AutoConfig", "NoneType"),
    "nothing": (lambda: Rotary.from_text(""), V, "text", "JSON, the text of a Rotary", "''"),
    "its repr": (lambda: Rotary.from_text(repr(ROPE)), V, "text", "JSON, the text of a", "'Rotary(head_dim=16"),
    "a scheme's name": (lambda: Rotary.from_text("rope"), V, "text", "JSON, the text of a Rotary", "'rope'"),
    "JSON, read": (lambda: Rotary.from_text({"head_dim": 16}), T, "text", "a string", "dict"),
    "other JSON": (lambda: Rotary.from_text('{"rope_theta": 1e4}'), V, "text", "with head_dim, freq", "rope_theta"),
    "a field too much": (lambda: Rotary.from_text(FIELDS + '"theta": 1}'), V, "text", "the fields head_dim,", "theta"),
    "bands of two": (lambda: Rotary.from_text(FIELDS + '"bands": [[0, 1]]}'), T, "bands[0]", "a Band (", "[0, 1]"),
    # context parallelism
    "no process group": (lambda: context_parallel_attention(Q, K, K, ROPE), RuntimeError, "group",
                         "torch.distributed to be initialised", "init_process_group first"),
    "a rank as group": (lambda: parallel(context_parallel_attention, Q, K, K, ROPE, group=0), T, "group",
                        "a ProcessGroup, a DeviceMesh or None", "int"),
    "an odd part": (lambda: parallel(context_parallel_attention, Q[:, :5], K[:, :5], K[:, :5], ROPE), V, "q",
                    "two chunks of equal length", "got 5 positions"),
    "whole keys": (lambda: parallel(context_parallel_attention, Q[:, :4], K, K, ROPE), V, "k",
                   "batch and seqlen (2, 4) as in q", "(2, 6)"),
    "causal as text": (lambda: parallel(context_parallel_attention, Q, K, K, ROPE, causal="yes"), T, "causal",
                       "True or False", "'yes'"),
    "a scale by length over ranks": (
        lambda: parallel(context_parallel_attention, Q, K, K, ROPE.dual_chunk(160, 32, length_scale=100)), V, "rotary",
        "none with length_scale", "got 100"),
    "an odd sequence": (lambda: parallel(shard_sequence, Q[:, :5]), V, "x", "divides into 2 * 1 = 2", "got 5"),
    "a wrong dimension": (lambda: parallel(shard_sequence, Q, dim=7), V, "dim", "a dimension of x", "got 7"),
    # the command line
    "no such command": (lambda: command("demmo"), Usage, "command", "'demo', 'generate'", "'demmo'"),
    "no such preset": (lambda: command("demo", "--preset", "big"), Usage, "--preset", "'tiny', 'cpu', 'gpu'", "'big'"),
    "no such option": (lambda: command("demo", "--step", "3"), Usage, "--step", "mean --steps?", "unknown option"),
    "negative steps": (lambda: command("demo", "--steps", "-3"), Usage, "--steps", "a positive integer", "got -3"),
    "--device gpu": (lambda: command("demo", "--device", "gpu"), Usage, "--device", "auto, cpu, cuda or cuda:N", "gpu"),
    "--impl flash": (lambda: command("demo", "--impl", "flash"), Usage, "--impl", "'triton', 'cuda', 'cpu'", "'flash'"),
    "a benchmark": (lambda: command("bench"), Usage, "'bench'", "run python -m bench", "is not part of the installed"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "name", "expected", "given"), MISTAKES.values(), ids=MISTAKES.keys())
def test_the_message_names_the_argument_what_was_expected_and_what_came(call, error, name, expected, given):
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    where = message if isinstance(raised.value, Usage) else message[: len(name) + 2]
    assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", where), message
    rest = message.replace(name, "", 1)
    assert expected in rest and given in rest.replace(expected, "", 1), message
    assert isinstance(raised.value, Usage) or re.search("expected|cannot serve", message), message


def test_enough_mistakes():
    assert len(MISTAKES) >= 60


def test_the_calls_without_a_mistake():
    """The calls that the mistakes change in one place."""
    for call in (dense, varlen, cached, paged, varlen_cached):
        assert call().shape[-2:] == (4, 16)
    assert paged(validate=True).shape == varlen_cached(slot_mapping=torch.arange(9), validate=True)[:2, None].shape
    assert parallel(context_parallel_attention, Q, K, K, ROPE).shape == Q.shape


# ---- keywords


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_every_foreign_keyword_names_ours(call):
    parameters = inspect.signature(call).parameters
    needed = [Q] * sum(x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters.values())
    for name in (INSTEAD.keys() | ELSEWHERE.keys()) - parameters.keys():
        message = f"^{name}: expected .*, got {name}=3, an unexpected keyword argument of {call.__name__}$"
        with pytest.raises(TypeError, match=message):
            call(*needed, **{name: 3})


def test_the_names_in_the_hints_are_ours():
    """A keyword with a one-word hint is an argument of one of the calls; hints name no argument of another house."""
    own = {name for call in CALLS for name in call.__code__.co_varnames[: call.__code__.co_argcount]}
    for name, hint in INSTEAD.items():
        assert re.search(r"\W", hint) or hint in own, (name, hint)
        assert name not in own - {"deterministic"}, name
    assert ELSEWHERE.keys() <= own


@pytest.mark.parametrize("wrong", [{"window_size": (3, 0)}, {"softmax_scal": 0.5}])
def test_a_compiled_call_refuses_them_too(wrong):
    torch.compiler.reset()
    with pytest.raises(Exception, match="unexpected keyword argument"):
        torch.compile(dense, fullgraph=True, backend="eager")(**wrong)


# ---- layouts


def like(batch, *shape):
    return torch.zeros(batch, *shape, 16)


SUSPECT = {
    "grouped heads": (like(1, 32, 48), like(1, 8, 48), "32 queries and only 8 keys.* the first 24 rows"),
    "a batch of them": (like(2, 8, 12), like(2, 4, 12), "8 queries and only 4 keys"),
    "long and equal heads": (like(1, 8, 300), like(1, 8, 300), "300 heads and only 8 queries"),
}


@pytest.mark.parametrize(("q", "k", "why"), SUSPECT.values(), ids=SUSPECT.keys())
def test_a_transposed_layout_is_suspected(q, k, why):
    shapes = rf"\(batch, seqlen, heads, head_dim\), got shape {re.escape(str(tuple(q.shape)))} with k"
    with pytest.warns(UserWarning, match=f"^q: expected {shapes}.*{why}.*transpose") as caught:
        attention(q, k, k, ROPE)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("q", "k", "options"),
    [
        (like(1, 48, 32), like(1, 48, 8), {}),
        (like(1, 32, 48), like(1, 8, 48), {"causal": False}),
        (like(1, 9, 4), like(1, 8, 4), {}),  # legal: the first row has no key
        (like(1, 8, 4), like(1, 4, 2), {}),
        (like(1, 8, 4), like(1, 0, 4), {}),
        (like(1, 1, 32), like(1, 64, 8), {}),
    ],
)
def test_a_layout_that_is_not_suspected(q, k, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, k, ROPE, **options)


# ---- the type of lse


@pytest.mark.parametrize("impl", [None, "cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lse_is_float64_for_float64_and_float32_for_all_others(dtype, impl):
    def of(*shape):
        return torch.zeros(*shape, dtype=dtype)

    lengths, options = int32(6, 6), {"return_lse": True, "impl": impl, "sinks": of(4)}
    q, k, packed_q, packed_k = of(2, 6, 4, 16), of(2, 6, 2, 16), of(12, 4, 16), of(12, 2, 16)
    cu_seqlens = int32(0, 6, 12)
    results = [
        attention(q, k, k, ROPE, **options),
        attention(q[:, :0], k, k, ROPE, **options),
        attention(q, k[:, :0], k[:, :0], ROPE, **options),
        attention_varlen(packed_q, packed_k, packed_k, ROPE, cu_seqlens, cu_seqlens, 6, 6, **options),
        attention_with_cache(q, k, k, ROPE, lengths, **options),
        attention_varlen_with_cache(packed_q, k, k, ROPE, cu_seqlens, lengths, 6, **options),
    ]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        results.append(attention(of(2, 6, 4, 16), of(2, 6, 2, 16), of(2, 6, 2, 16), ROPE, **options))
    for out, lse in results:
        assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
