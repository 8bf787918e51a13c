"""convert(model, self_extend=...), convert(model, dual_chunk=...), and Qwen2.5-1M's configuration."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import CALLS, PADDING, close, logits, padded, schemes, static, tiny, tokens

from flashrope import Rotary
from flashrope.integrations.transformers import convert, from_pretrained

ROPE = Rotary.rope(16)
CHUNKS = {"chunk_size": 160, "local_size": 32, "original_max_position_embeddings": 160}


def test_the_schemes():
    assert schemes(convert(tiny("llama"), self_extend=(8, 4), log_n=32)) == [ROPE.self_extend(8, 4).log_n(32)] * 3
    assert schemes(convert(tiny("llama"), dual_chunk=(160, 32))) == [ROPE.dual_chunk(160, 32)] * 3
    assert schemes(convert(tiny("llama"), dual_chunk=(160, 32, 100))) == [ROPE.dual_chunk(160, 32, 100)] * 3
    rotates = Rotary.rope(16, base=2_000_000.0)  # every third layer of this model does not
    assert schemes(convert(tiny("smollm3"), self_extend=(8, 4))) == [*[rotates.self_extend(8, 4)] * 2, Rotary.none(16)]


@pytest.mark.parametrize("changes", [dict(self_extend=(8, 4)), dict(self_extend=(6, 3), log_n=12)], ids=str)
def test_caches_and_padding_change_nothing(changes):
    model = convert(tiny("llama"), **changes)
    full = logits(model, tokens())
    assert not close(full, logits(convert(tiny("llama")), tokens()), 1e-3)
    assert close(logits(model, tokens(), calls=CALLS), full)
    assert close(logits(model, tokens(), calls=CALLS, cache=static(model)), full)
    alone = logits(model, tokens()[:1, PADDING:])
    assert close(logits(model, tokens(), padded(), calls=CALLS)[:1, PADDING:], alone)


def test_dual_chunk_over_a_cache():
    """Steps that end in a chunk, at its end and behind it."""
    ids = torch.randint(0, 64, (1, 280), generator=torch.Generator().manual_seed(0))
    model = convert(tiny("llama"), dual_chunk=(160, 32))
    full = logits(model, ids)
    assert close(logits(model, ids, calls=[100, 127, 128, 129, 255, 256, 257, 280]), full)
    plain = logits(convert(tiny("llama")), ids)
    assert close(full[:, :128], plain[:, :128]) and not close(full[:, 128:], plain[:, 128:], 1e-3)


def test_the_scale_by_length():
    """Up to length_scale tokens it changes nothing; a step over a cache of more counts all of its keys."""
    model, plain = convert(tiny("llama"), dual_chunk=(160, 32, 12)), convert(tiny("llama"), dual_chunk=(160, 32))
    ids = tokens()[:, :12]
    assert close(logits(model, ids), logits(plain, ids), 0)
    full = logits(model, tokens())
    assert not close(full, logits(plain, tokens()), 1e-3)
    assert close(logits(model, tokens(), padded())[:1, PADDING:], logits(model, tokens()[:1, PADDING:]))


def test_the_options_are_saved(tmp_path):
    model = convert(tiny("llama"), self_extend=(8, 4))
    model.save_pretrained(tmp_path)
    assert schemes(from_pretrained(tmp_path)) == [ROPE.self_extend(8, 4)] * 3


def test_the_configuration_of_qwen():
    model = tiny("llama")
    model.config.dual_chunk_attention_config = CHUNKS
    assert schemes(convert(model)) == [ROPE.dual_chunk(160, 32)] * 3
    fields = dict(head_dim=16, rope_theta=1e4, max_position_embeddings=160, num_attention_heads=4)
    with pytest.raises(ValueError, match="dual_chunk_attention_config with chunk_size and local_size, got {'chunk_si"):
        Rotary.from_hf_config(SimpleNamespace(**fields, dual_chunk_attention_config={"chunk_size": 160}))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(self_extend=(10, 4)), ValueError, "group: expected a divisor of window = 10, got 4"),
        (dict(self_extend=8), TypeError, r"self_extend: expected a pair \(window, group\), got 8"),
        (dict(dual_chunk=(300, 100)), ValueError, "chunk_size: expected .* multiple of 128.* got 300 - 100 = 200"),
        (dict(dual_chunk=(128, 128)), ValueError, "local_size: expected less than chunk_size = 128, got 128"),
        (dict(dual_chunk=(160, 32), window=8), ValueError, "dual_chunk: expected one of window, self_extend, dual_ch"),
        (dict(self_extend=(8, 4), dual_chunk=(160, 32)), ValueError, "expected one of .* got also self_extend"),
    ],
    ids=str,
)
def test_refusals(changes, error, message):
    model = tiny("llama")
    with pytest.raises(error, match=message):
        convert(model, **changes)
    assert not hasattr(model.model, "rotary_bands")


def test_layers_with_a_window_are_refused():
    with pytest.raises(ValueError, match="window: expected a model whose layers see all keys"):
        convert(tiny("gemma3_text"), self_extend=(8, 4))
