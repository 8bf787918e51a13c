"""Tests Gemma 4 in the released shapes: what ``convert`` serves, and what it refuses before a forward."""

import importlib
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import released
from families import BOUND, CALLS, SEQLEN, close, logits, padded, schemes, static, tiny, tokens
from flashrope import Rotary
from flashrope.integrations.transformers import CodesCache, convert, revert
from flashrope.integrations.transformers import attending as attention
from flashrope.integrations.transformers.versions import VERSION
from released import GEMMAS
from small_models import vary
from test_transformers import gradients
from transformers import DynamicCache

pytestmark = pytest.mark.skipif(not GEMMAS, reason="this transformers has no Gemma 4")
E2B, SINGLE = "Gemma 4 E2B, E4B", "Gemma 4 26B-A4B"
THREE = [E2B, "Gemma 4 12B", SINGLE]  # 31B is left out because it is 26B-A4B without experts


@pytest.fixture
def rows(monkeypatch):
    """Records the number of query rows in every layer's call."""
    found, attend = [], attention._attend

    def watched(scheme, query, *arguments):
        found.append(query.shape[2])
        return attend(scheme, query, *arguments)

    monkeypatch.setattr(attention, "_attend", watched)
    return found


def test_schemes():
    """Global layers have 512 channels, and a quarter of their pairs rotate."""
    local, every = Rotary.rope(256, 10_000.0).local(8), Rotary.p_rope(512, 0.25, base=1e6)
    found = schemes(convert(released.released(E2B)))
    assert found[0] == found[2] == local
    assert found[1] == found[3] and found[1].head_dim == 512
    assert found[1].inv_freq.tolist() == every.inv_freq.tolist()


@pytest.mark.skipif(VERSION < (5, 18), reason="this transformers computes all rows in layers that share keys")
@pytest.mark.parametrize("mask", [None, padded()], ids=["plain", "padded"])
@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
def test_rows_that_sharing_layers_drop(rows, cache, kept, mask):
    """Layers that read an earlier layer's keys compute only the rows whose logits were requested, as in the stock
    model."""
    model = released.released(E2B)
    expected = logits(model, tokens(), mask)[:, -kept:]
    convert(model)
    caches = {None: None, "dynamic": DynamicCache(config=model.config), "static": static(model)}
    with torch.no_grad():
        keeping = {"use_cache": False} if cache is None else {"past_key_values": caches[cache]}
        found = model(tokens(), attention_mask=mask, logits_to_keep=kept, **keeping).logits
    assert close(found if mask is None else found * mask[:, -kept:, None], expected, 2 * BOUND)
    assert rows == [SEQLEN, SEQLEN, kept or SEQLEN, kept or SEQLEN]


def test_dropped_rows_with_gradients():
    """The gradients of the kept rows equal those of the stock model."""
    found = {}
    for converted in (False, True):
        model = released.released(E2B).train()
        if converted:
            convert(model)
        model(tokens(), attention_mask=padded(), use_cache=False, logits_to_keep=2).logits.sum().backward()
        found[converted] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found[True].keys() == found[False].keys()
    for name, grad in found[False].items():
        assert close(found[True][name], grad, 1e-5 * max(1.0, float(grad.abs().max()))), name


@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize("case", ["plain", "left", "packed", "checkpointed"])
def test_gradients(name, case):
    model = released.released(name).train()
    if case == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mask = padded() if case == "left" else None
    kwargs = {"position_ids": torch.cat([torch.arange(11), torch.arange(17)])[None].expand(2, -1)}
    kwargs = kwargs if case == "packed" else {}
    stock = gradients(model, mask, **kwargs)
    mine = gradients(convert(model), mask, **kwargs)
    assert stock.keys() == mine.keys()
    for parameter, grad in stock.items():
        assert close(mine[parameter], grad, 1e-5 * max(1.0, float(grad.abs().max()))), parameter


def test_other_schemes():
    """Global layers may get another scheme. Local layers keep theirs, because they see only a window and no distance
    beyond it."""
    model = released.released(E2B)
    for options in (dict(rerope=2), dict(log_n=12)):
        full = logits(convert(model, **options), tokens())
        assert not close(full, logits(revert(model), tokens()), 0.05)
        convert(model, **options)
        assert close(logits(model, tokens(), calls=CALLS), full)
        assert close(logits(model, tokens(), calls=CALLS, cache=static(model)), full)
        revert(model)


def wrapped(name: str):
    """Returns the multimodal model around a text decoder."""
    text = released.released(name).config
    vision = dict(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        patch_size=4,
        pooling_kernel_size=1,
        position_embedding_size=64,
    )
    ids = dict(image_token_id=60, video_token_id=61, audio_token_id=62, boi_token_id=58, eoi_token_id=59)
    torch.manual_seed(0)
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **ids)
    return vary(transformers.Gemma4ForConditionalGeneration(config).eval())


@pytest.mark.parametrize("name", [E2B, SINGLE])
def test_the_decoder_inside_a_multimodal_model(name, recwarn):
    """The decoder inside a multimodal model computes text as the stock model does. In the larger models the tokens of
    an image see one another. convert warns of this, and a call with an image raises an error about its mask. In E2B and
    E4B image tokens are causal like text."""
    model, ids = wrapped(name), tokens() % 50
    stock = logits(model, ids, padded()), model.generate(ids, max_new_tokens=4, do_sample=False)
    types = torch.zeros_like(ids)
    types[:, 4:8] = 1
    pictured = model(ids, mm_token_type_ids=types).logits
    convert(model)
    said = [str(each.message) for each in recwarn if "images" in str(each.message)]
    assert close(logits(model, ids, padded()), stock[0], 2 * BOUND)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), stock[1])
    if name == E2B:
        assert not said and close(model(ids, mm_token_type_ids=types).logits, pictured, 2 * BOUND)
    else:
        assert len(said) == 1 and said[0].startswith("model: only text is supported (gemma4_text lets the tokens of")
        with pytest.raises(ValueError, match="mask_function: .* got or_masks"):
            model(ids, mm_token_type_ids=types)


def test_what_is_refused():
    with pytest.raises(ValueError, match="model: expected causal attention in every layer"):
        convert(tiny("gemma4_text", use_bidirectional_attention="all"))
    model = convert(released.released(E2B))
    with pytest.raises(ValueError, match="cache_dtype: .* at most 256 channels for int8, got head_dim 512"):
        CodesCache(model.config, "int8")


@pytest.mark.slow
def test_the_example(tmp_path, monkeypatch, capsys):
    """examples/train_gemma4.py trains on packed rows, and its losses equal those of the stock model."""
    pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")
    root = Path(__file__).resolve().parents[2]
    monkeypatch.syspath_prepend(str(root / "examples"))
    example = importlib.import_module("train_gemma4")
    packed, attend, losses = [], attention._attend_packed, {}

    def watched(q, k, v, rotary, sequences, options):
        packed.append((q.shape[-1], sequences.cu_seqlens.numel() - 1, q.requires_grad))
        return attend(q, k, v, rotary, sequences, options)

    monkeypatch.setattr(attention, "_attend_packed", watched)
    for name in ("mine", "stock"):
        if name == "stock":
            monkeypatch.setattr(example.train_hf, "convert", lambda model: model)
        given = ["--text", str(root / "docs" / "scope.md"), "--device", "cpu", "--dtype", "float32", "--steps", "3"]
        given += ["--batch", "2", "--warmup", "1", "--log-every", "1", "--learning-rate", "1e-3"]
        assert example.main([*given, "--out", str(tmp_path / name)]) == 0
        losses[name] = [float(each) for each in re.findall(r"'loss': '?([\d.]+)", capsys.readouterr().out)]
    assert len(losses["mine"]) == 3 and losses["mine"] == pytest.approx(losses["stock"], abs=2e-3)
    assert {(width, sequences) for width, sequences, _ in packed} == {(256, 2), (512, 2)}
    assert len(packed) == 3 * 4 * 2 and sum(with_gradients for *_, with_gradients in packed) >= 3 * 4  # checkpointed
