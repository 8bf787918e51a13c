"""Compares converted Hugging Face models with the library's own attention, or with the reference for other schemes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import families
from families import (
    CALLS,
    FAMILIES,
    HERE,
    PADDING,
    ROPE_TYPES,
    RUNS,
    SEQLEN,
    close,
    converted,
    logits,
    padded,
    schemes,
    static,
    tiny,
    tokens,
)
from flashrope import Rotary
from flashrope.backends import reference
from flashrope.calls.records import AttentionCall
from flashrope.integrations import transformers as integration
from flashrope.integrations.transformers import convert, suggest
from flashrope.integrations.transformers.versions import CACHES_WITHOUT_GRADIENTS
from flashrope.schemes.families import family
from transformers import AutoConfig, DynamicCache
from vision_models import KINDS

# ---- the model's own scheme: the same logits


def test_every_family_is_tested():
    assert set(FAMILIES) | {f"{name}_text" for name in KINDS} == integration.FAMILIES


def documented() -> dict[str, tuple[str, str]]:
    """Returns {family: its columns "head_dim" and "as released" in the table of docs/families.md}."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "families.md").read_text()
    rows = page.split(families.BEGIN)[1].split("\n\n")[0].splitlines()[3:]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    return {name: (small, released) for name, small, *_, released, _, _ in cells}


@pytest.mark.parametrize("name", HERE)
def test_logits_are_the_stock_models(name):
    """A converted model has the stock model's logits. Without rotation, or without the mask, they would differ by far
    more than the bound. docs/families.md lists the head_dims of the tested models for each family."""
    found, stock, model = families.difference(name)
    assert documented()[name][0] == families.widths(model)
    assert max(found.values()) <= families.BOUND, found
    assert not close(stock["padded"], stock["uncached"] * padded()[..., None], 0.05)
    assert not family(name).packs or not close(stock["packed"], stock["uncached"], 0.05)
    for module in converted(model):
        none, window = Rotary.none(module._flashrope.rotary.head_dim), module._flashrope.window
        module._flashrope.rotary = none if window is None else none.local(window)
    assert not close(RUNS["uncached"](model), stock["uncached"], 0.05)


def scaled(kind: str, **changes):
    """Returns a Llama with the given rope type. It states the training length in the field that transformers 4.57 reads
    and in the field that transformers 5 reads."""
    scaling, lengths = dict(ROPE_TYPES[kind]), {"max_position_embeddings": 16 if kind == "dynamic" else 64}
    if kind == "longrope":
        lengths["original_max_position_embeddings"] = 16
    return tiny("llama", rope_scaling=scaling, **lengths, **changes)


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_rope_types(kind):
    model = scaled(kind)
    within, beyond = tokens(seqlen=14), tokens()

    def run():
        return (
            logits(model, within),
            logits(model, within, calls=[9, 10, 13, 14]),
            # Lengths beyond the training length need other tables. They ascend, because the stock model keeps the table
            # of the longest sequence.
            logits(model, beyond[:, :20]),
            logits(model, beyond),
            logits(model, beyond, padded()),
        )

    stock = run()
    convert(model)
    assert all(map(close, run(), stock))
    assert close(logits(model, within), stock[0])  # the model is back at the table of the training length


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_model_that_read_a_long_and_a_short_text_converts(kind):
    """After such texts, transformers stores one tensor under two names: as the table in use and as the original one."""
    model = scaled(kind)
    long, short = tokens(), tokens(seqlen=10)
    stock_short = logits(model, short)  # before the long text: transformers 5.0 keeps the table of a longer one
    stock_long = logits(model, long)
    logits(model, short)
    convert(model)
    assert close(logits(model, long), stock_long)
    assert close(logits(model, short), stock_short)


@pytest.mark.parametrize("which", ["dynamic", "longrope", "phi3"])
def test_tables_that_grow_over_a_cache(which):
    """If a table grows with the length, all cached keys are rotated by the newest table, because caches hold raw keys.
    The model has only one layer: in a second layer, keys would depend on older tables."""
    if which == "phi3":  # this case also has sliding windows
        scaling = {"type": "longrope"} | {key: ROPE_TYPES["longrope"][key] for key in ("short_factor", "long_factor")}
        model = tiny(which, rope_scaling=scaling, original_max_position_embeddings=16, num_hidden_layers=1)
    else:
        model = scaled(which, num_hidden_layers=1)
    full = logits(model, tokens())
    convert(model)
    assert close(logits(model, tokens()), full)
    for cache in (None, static(model)):
        assert close(logits(model, tokens(), calls=CALLS, cache=cache)[:, -1], full[:, -1])


# ---- generate
GENERATE = {
    "greedy": dict(do_sample=False),
    "sampling": dict(do_sample=True),
    "beams": dict(do_sample=False, num_beams=3),
    "static": dict(do_sample=False, cache_implementation="static", disable_compile=True),
    "no cache": dict(do_sample=False, use_cache=False),
}


@pytest.mark.parametrize("how", GENERATE)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral"])
def test_generate(name, how):
    model, ids = tiny(name), tokens(seqlen=14)

    def run():
        torch.manual_seed(3)
        return model.generate(ids, attention_mask=padded(14), max_new_tokens=6, min_new_tokens=6, **GENERATE[how])

    stock = run()
    convert(model)
    assert torch.equal(run(), stock)


SLIDING = [] if families.VERSION == (5, 0) else ["gemma3_text", "cohere2"]  # 5.0 cannot crop their caches


@pytest.mark.parametrize("name", ["llama", *SLIDING])
def test_assisted_decoding(name):
    """Assisted decoding gives the stock model's tokens. A call then has several guessed tokens, and the cache drops the
    rejected tokens."""
    model, ids = tiny(name), tokens(1, 12)
    stock = model.generate(ids, max_new_tokens=8, do_sample=False)
    convert(model)
    for assistance in (
        dict(assistant_model=tiny(name, num_hidden_layers=3)),
        dict(assistant_model=convert(tiny(name))),
        dict(prompt_lookup_num_tokens=3),
    ):
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, **assistance), stock)


@pytest.mark.parametrize("changes", [dict(rerope=6, log_n=16), dict(leaky_rerope=(6, 4.0)), dict(hope=24)])
def test_a_row_with_padding_is_the_row_alone(changes):
    model = convert(tiny("llama"), **changes)
    ids, mask = tokens(), padded()
    alone = logits(model, ids[:1, PADDING:])
    for calls, cache in ((None, None), (CALLS, None), (CALLS, static(model))):
        assert close(logits(model, ids, mask, cache=cache, calls=calls)[:1, PADDING:], alone)


# ---- changes: the requested scheme, in the layers that it applies to


def test_changes_build_the_schemes():
    rope = Rotary.rope(16)
    assert schemes(convert(tiny("llama"), rerope=6)) == [rope.rectify(6)] * 3
    leaky = convert(tiny("llama"), leaky_rerope=(6, 4.0), log_n=32)
    assert schemes(leaky) == [rope.rectify(6, 4.0).log_n(32, clip=True)] * 3
    assert schemes(convert(tiny("llama"), log_n=True)) == [rope.log_n(64, clip=True)] * 3
    assert schemes(convert(tiny("llama"), hope=48)) == [Rotary.hope(16, 48)] * 3
    yarn = tiny("llama", rope_scaling=dict(ROPE_TYPES["yarn"]))
    assert schemes(convert(yarn, hope=48)) == [Rotary.hope(16, 48).yarn(4.0, 16)] * 3
    half = rope.interpolate(2.0)
    assert schemes(convert(tiny("llama"), rotary=half, log_n=32)) == [half.log_n(32)] * 3


def test_layers_that_differ():
    local = Rotary.rope(16, interleaved=True).local(8)
    assert schemes(convert(tiny("cohere2"), log_n=32)) == [local, local, Rotary.none(16).log_n(32)]
    found = schemes(convert(tiny("gemma3_text"), hope=48))
    assert [rotary.bands[-1].stop for rotary in found] == [8, 8, float("inf")]
    assert found[0].frequencies != found[2].frequencies and found[0].frequencies[-1] == 0
    rope = Rotary.rope(16, base=2_000_000.0)
    assert schemes(convert(tiny("smollm3"), rerope=6)) == [rope.rectify(6), rope.rectify(6), Rotary.none(16)]
    quarter = rope.interpolate(4.0)
    assert schemes(convert(tiny("smollm3"), rotary=quarter)) == [quarter, quarter, Rotary.none(16)]
    pairs = Rotary.rope(16, interleaved=True)
    assert schemes(convert(tiny("cohere2"), rotary=pairs)) == [pairs.local(8), pairs.local(8), Rotary.none(16)]
    given = {"sliding_attention": rope, "full_attention": quarter}
    assert schemes(convert(tiny("gemma3_text"), rotary=given)) == [rope.local(8), rope.local(8), quarter]


@pytest.mark.parametrize("changes", [{}, dict(rerope=6), dict(leaky_rerope=(6, 4.0), log_n=8), dict(hope=24)], ids=str)
def test_a_layer_is_the_formula(changes):
    model = convert(tiny("llama"), **changes)
    layer = model.model.layers[0].self_attn
    seen = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer, name).register_forward_hook(
            lambda module, args, out, name=name: seen.__setitem__(name, out.double())
        )
    layer.o_proj.register_forward_pre_hook(lambda module, args: seen.__setitem__("out", args[0]))
    logits(model, tokens())
    q, k, v = (seen[name].unflatten(-1, (-1, 16)) for name in ("q_proj", "k_proj", "v_proj"))
    expected, _ = reference.dense_attention(q, k, v, AttentionCall(schemes(model)[0], True, 16**-0.5))
    assert close(seen["out"], expected.flatten(-2))


@pytest.mark.parametrize("changes", [dict(rerope=6, log_n=12), dict(leaky_rerope=(6, 2.0)), dict(hope=24)], ids=str)
def test_a_cache_changes_nothing(changes):
    model = convert(tiny("llama"), **changes)
    full = logits(model, tokens())
    assert close(logits(model, tokens(), calls=CALLS), full)
    assert close(logits(model, tokens(), calls=CALLS, cache=static(model)), full)
    cache = DynamicCache(config=model.config)
    logits(model, tokens(), calls=CALLS, cache=cache)
    cache.crop(-8)
    with torch.no_grad():
        assert close(model(tokens()[:, -8:], past_key_values=cache, logits_to_keep=3).logits, full[:, -3:])


# ---- training
def gradients(model, mask=None, **kwargs) -> dict[str, torch.Tensor]:
    ids = tokens()
    model.zero_grad()
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    model(ids, attention_mask=mask, labels=labels, use_cache=False, **kwargs).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "cohere2", "gpt_oss"])
@pytest.mark.parametrize("case", ["plain", "left", "right", "packed"])
def test_gradients(name, case):
    if not family(name).packs and case == "packed":
        return
    model = tiny(name).train()
    mask = {"left": padded(), "right": padded(left=0, right=6)}.get(case)
    kwargs = {"position_ids": families.PACKED} if case == "packed" else {}
    stock = gradients(model, mask, **kwargs)
    mine = gradients(convert(model), mask, **kwargs)
    assert stock.keys() == mine.keys()
    for parameter, grad in stock.items():
        assert close(mine[parameter], grad, 1e-5 * max(1.0, float(grad.abs().max()))), parameter


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = convert(tiny("llama"), rerope=6).train()
    expected = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found = gradients(model)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_packed_sequences_without_gradients_under_gradient_checkpointing():
    """A forward without gradients, in a model with gradient checkpointing, keeps packed sequences separate if it makes
    no cache. From transformers 5.24 on it makes a cache unless use_cache=False. With a cache, masks do not separate
    packed sequences, so the call is refused."""
    model = convert(tiny("llama"))
    ids, positions = tokens(1), torch.tensor([[*range(7), *range(SEQLEN - 7)]])
    expected = logits(model, ids, position_ids=positions)
    model.train().gradient_checkpointing_enable()
    with torch.no_grad():
        if CACHES_WITHOUT_GRADIENTS:
            with pytest.raises(ValueError, match="^position_ids: .* packed sequences need use_cache=False"):
                model(ids, position_ids=positions)
        else:
            assert close(model(ids, position_ids=positions).logits, expected)
        assert close(model(ids, position_ids=positions, use_cache=False).logits, expected)
    assert close(model(ids, position_ids=positions).logits.detach(), expected)


def test_autocast():
    model = tiny("llama")

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return logits(model, tokens(), padded(), calls=CALLS).float()

    stock = run()
    assert close(run(), stock, 0.0)
    convert(model)
    assert close(run(), stock, 0.15)  # bfloat16 keeps 8 bits of logits of size 3


# ---- suggest
def test_suggest():
    model = tiny("llama")
    found = suggest(model, 256)
    assert found.changes == {"rerope": 32, "log_n": 64} and "half of the training length 64" in found.reason
    assert suggest(model.config, 64).changes == {}
    assert schemes(convert(model, **found.changes)) == [Rotary.rope(16).rectify(32).log_n(64, clip=True)] * 3
    with pytest.raises(
        ValueError, match="rerope: expected a layer that sees all keys, got a sliding window of 8 keys in every"
    ):
        suggest(tiny("mistral"), 256)
    with pytest.raises(ValueError, match="target_length: expected a positive integer, got 0"):
        suggest(model, 0)
    with pytest.raises(ValueError, match="got object without max_position_embeddings and num_hidden_layers"):
        suggest(object(), 16)
    with pytest.raises(ValueError, match="model_or_config: .* got 'Qwen/Qwen3-0.6B' without max_position_embeddings"):
        suggest("Qwen/Qwen3-0.6B", 16)
    for name in ("max_position_embeddings", "num_hidden_layers"):
        fields = {"max_position_embeddings": 64, "num_hidden_layers": 2, "rope_theta": 1e4} | {name: None}
        with pytest.raises(ValueError, match=f"got SimpleNamespace without {name}$"):
            suggest(SimpleNamespace(**fields), 256)
    with pytest.raises(ValueError, match="expected a model with a rotary embedding, got GPT2Config without rope_theta"):
        suggest(AutoConfig.for_model("gpt2"), 4096)


def test_true_stands_for_values_of_the_training_length():
    rope = Rotary.rope(16)
    model = tiny("llama", max_position_embeddings=512)
    assert schemes(convert(model, rerope=True))[0] == rope.rectify(256)
    assert (
        model.config.flashrope
        == {"rerope": 256}
        == {"rerope": suggest(tiny("llama", max_position_embeddings=512), 1024).changes["rerope"]}
    )
    assert schemes(convert(model, hope=True))[0] == Rotary.hope(16, 512)
    assert model.config.flashrope == {"hope": 512}
    chosen = suggest(tiny("llama", max_position_embeddings=512), 1024, "dual-chunk").changes
    assert schemes(convert(model, dual_chunk=True))[0] == rope.dual_chunk(*chosen["dual_chunk"])
