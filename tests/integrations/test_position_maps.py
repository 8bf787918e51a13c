"""Tests convert(model, self_extend=...), dual_chunk=..., cope=..., and suggest for these schemes."""

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import CALLS, PADDING, close, logits, padded, schemes, static, tiny, tokens
from flashrope import Rotary
from flashrope.integrations.transformers import convert, from_pretrained, suggest
from flashrope.schemes.fitting import dual_chunk_for, self_extend_for

ROPE = Rotary.rope(16)


def test_the_schemes():
    assert schemes(convert(tiny("llama"), self_extend=(8, 4), log_n=32)) == [ROPE.self_extend(8, 4).log_n(32)] * 3
    assert schemes(convert(tiny("llama"), dual_chunk=(160, 32))) == [ROPE.dual_chunk(160, 32)] * 3
    assert schemes(convert(tiny("llama"), dual_chunk=(160, 32, 100))) == [ROPE.dual_chunk(160, 32, 100)] * 3
    rotates = Rotary.rope(16, base=2_000_000.0)  # every third layer of this model does not rotate
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
    """Steps over a cache that end inside a chunk, at its end and after it give the logits of one call."""
    ids = torch.randint(0, 64, (1, 280), generator=torch.Generator().manual_seed(0))
    model = convert(tiny("llama"), dual_chunk=(160, 32))
    full = logits(model, ids)
    assert close(logits(model, ids, calls=[100, 127, 128, 129, 255, 256, 257, 280]), full)
    plain = logits(convert(tiny("llama")), ids)
    assert close(full[:, :128], plain[:, :128]) and not close(full[:, 128:], plain[:, 128:], 1e-3)


def test_the_scale_by_length():
    """The scale by length changes nothing up to length_scale tokens. In a step over a longer cache, the length is the
    number of all keys."""
    model, plain = convert(tiny("llama"), dual_chunk=(160, 32, 12)), convert(tiny("llama"), dual_chunk=(160, 32))
    ids = tokens()[:, :12]
    assert close(logits(model, ids), logits(plain, ids), 0)
    full = logits(model, tokens())
    assert not close(full, logits(plain, tokens()), 1e-3)
    assert close(logits(model, tokens(), padded())[:1, PADDING:], logits(model, tokens()[:1, PADDING:]))


def test_clip():
    assert schemes(convert(tiny("llama"), cope=48)) == [ROPE.cope(48)] * 3
    assert schemes(convert(tiny("llama"), cope=True)) == [ROPE.cope(tiny("llama").config.max_position_embeddings)] * 3
    hard = dict(pairs=3, taper=False)
    assert schemes(convert(tiny("llama"), cope=hard)) == [ROPE.cope(64, **hard)] * 3
    for changes, rotary in (
        (dict(rerope=6, log_n=12), ROPE.cope(48).rectify(6).log_n(12)),
        (dict(self_extend=(8, 4)), ROPE.cope(48).self_extend(8, 4)),
        (dict(dual_chunk=(160, 32)), ROPE.cope(48).dual_chunk(160, 32)),
        (dict(rotary=ROPE.ntk(4.0)), ROPE.ntk(4.0).cope(48)),
    ):
        assert schemes(convert(tiny("llama"), cope=48, **changes)) == [rotary] * 3
    local, _, whole = schemes(convert(tiny("gemma3_text"), cope=48))
    own_local, _, own = schemes(convert(tiny("gemma3_text")))
    assert (local, whole) == (own_local.cope(48), own.cope(48)) and local.bands == own_local.bands != whole.bands


def test_a_clipped_model_is_saved_and_changes_its_logits(tmp_path):
    model = tiny("llama")
    stock = logits(model, tokens())
    convert(model, cope={"pairs": 5})
    full = logits(model, tokens())
    assert not close(full, stock, 1e-3)
    assert close(logits(model, tokens(), calls=CALLS), full)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert schemes(loaded) == schemes(model) and close(logits(loaded, tokens()), full)


def test_suggest_by_name():
    model = tiny("llama", max_position_embeddings=256)
    expected = {
        "rerope": dict(rerope=128, log_n=256),
        "cope": dict(cope=256),
        "self-extend": dict(self_extend=(128, 16)),
        "dual-chunk": dict(dual_chunk=(256, 128)),
    }
    assert {name: suggest(model, 2048, name).changes for name in expected} == expected
    for changes in expected.values():
        convert(model, **changes)
    assert suggest(tiny("mistral"), 256, "cope").changes == {"cope": 64}  # sliding windows stay as they are
    for name, message in (
        (
            "self-extend",
            "self_extend: expected a layer that sees all keys, got a sliding window of 8 keys in every layer",
        ),
        ("xpos", "scheme: expected one of stock, .* dual-chunk-log-n, got 'xpos'"),
    ):
        with pytest.raises(ValueError, match=message):
            suggest(tiny("mistral"), 256, name)
    with pytest.raises(ValueError, match="dual_chunk: expected a training length above 128, .*, got 64"):
        suggest(tiny("llama"), 256, "dual-chunk")


def test_the_group_of_self_extend():
    """The group is the smallest divisor of the window that keeps the farthest pair below the training length."""
    for length in (32, 48, 100, 4096):
        for longest in (length, length + 1, 4 * length, 8 * length):
            window, group = self_extend_for(length, longest)
            assert window == length // 2 and window % group == 0

            def farthest(group, window=window, longest=longest):
                bands = [band for band in Rotary.rope(16).self_extend(window, group).bands]
                return float(bands[-1].queries.of(torch.tensor(longest - 1.0)))  # the first key is at 0

            assert farthest(group) < length
            smaller = [other for other in range(1, group) if window % other == 0]
            assert all(farthest(other) >= length for other in smaller)
    with pytest.raises(ValueError, match="no group that divides window 7 brings 500 tokens within .* length 14"):
        self_extend_for(14, 500)


def test_the_chunks_of_dual_chunk_attention():
    for length, chunks in ((129, (129, 1)), (256, (256, 128)), (512, (512, 128)), (4096, (4096, 1024))):
        assert dual_chunk_for(length) == chunks
        Rotary.rope(16).dual_chunk(*chunks)
    with pytest.raises(ValueError, match="dual_chunk: expected a training length above 128, .* got 128"):
        dual_chunk_for(128)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(self_extend=(10, 4)), ValueError, "group: expected a divisor of window = 10, got 4"),
        (dict(self_extend=8), TypeError, r"self_extend: expected a pair \(window, group\), got 8"),
        (dict(dual_chunk=(300, 100)), ValueError, "chunk_size: expected .* multiple of 128.* got 300 - 100 = 200"),
        (
            dict(dual_chunk=(128, 128)),
            ValueError,
            "local_size: .* less than chunk_size = 128, got 128; chunks would be empty",
        ),
        (
            dict(dual_chunk=(160, 32), rerope=8),
            ValueError,
            "dual_chunk: expected at most one of rerope, leaky_rerope, string, self",
        ),
        (dict(self_extend=(8, 4), dual_chunk=(160, 32)), ValueError, "expected at most one of .* got also self_extend"),
        (
            dict(cope=48, hope=48),
            ValueError,
            "cope: expected at most one of hope, p_rope, cope, got also hope",
        ),
        (dict(cope={"length": 48}), ValueError, "cope: expected True, a length or a dict .* taper, got 'length'"),
        (dict(cope={"pairs": 9}), ValueError, "pairs: expected None or an integer from 0 to 8, the pairs that rotate"),
        (dict(cope=-1), ValueError, "train_length: expected a positive finite number, got -1"),
    ],
    ids=str,
)
def test_refusals(changes, error, message):
    model = tiny("llama")
    with pytest.raises(error, match=message):
        convert(model, **changes)
    assert not hasattr(model.model, "_flashrope")


def test_layers_with_a_window_are_refused():
    with pytest.raises(ValueError, match="self_extend: expected a layer that sees all keys, got a sliding window of 8"):
        convert(tiny("mistral"), self_extend=(8, 4))
