"""Tests what convert does with the frequency tables in a model: it compares them with the configuration's, by value."""

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import HERE, ROPE_TYPES, close, logits, schemes, tiny, tokens
from flashrope import Rotary
from flashrope.integrations.transformers import convert, revert
from flashrope.integrations.transformers.conversion_plan import find_decoder
from flashrope.integrations.transformers.embeddings import fill_tables, rotary_embeddings, tables_of
from small_models import causal_lm, small_config

LONG, SHORT = tokens(), tokens(seqlen=8)
OTHER_TABLE = "model: expected a rotary embedding of the frequencies that its configuration gives, .* got other"


def growing(kind: str):
    lengths = dict(max_position_embeddings=16) if kind == "dynamic" else dict(original_max_position_embeddings=16)
    return tiny("llama", rope_scaling=dict(ROPE_TYPES[kind]), **lengths)


def tables(model) -> dict[str, torch.Tensor]:
    """Returns the tables of a model's rotary embeddings by name, whether they are buffers or attributes."""
    return {
        f"{name}.{table}": x
        for name, embedding in rotary_embeddings(find_decoder(model)).items()
        for table, x in tables_of(embedding).items()
    }


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("calls", [[LONG], [LONG, SHORT], [SHORT, LONG], [LONG, SHORT, LONG]], ids=len)
def test_tables_that_calls_replaced(kind, calls):
    """transformers replaces the table for a longer input, and then puts the first one back as the same tensor."""
    model = growing(kind)
    for ids in calls:
        stock = logits(model, ids)
    for _ in range(2):
        assert close(logits(convert(model), ids), stock)
    assert torch.equal(logits(revert(model), ids), stock)
    assert close(logits(convert(model), ids), stock)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("theta", [1e4, 5e6, 1e8])
@pytest.mark.parametrize("again", [False, True], ids=["", "back in float32"])
def test_tables_in_16_bits(dtype, theta, again):
    """The smallest frequencies of large bases are subnormal or zero in float16."""
    model = tiny("llama", rope_theta=theta, head_dim=128, num_hidden_layers=1).to(dtype)
    convert(model.float() if again else model)
    assert schemes(model) == [Rotary.rope(128, base=theta)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("change", ["one value", "all values", "a new buffer", "the scale"])
def test_edited_tables_are_refused(name, dtype, change):
    """A table that was edited is not ignored. In float16, the smallest edit that shows is a step of that type."""
    model = tiny(name).to(dtype)
    embedding = find_decoder(model).rotary_emb
    table = "full_attention_inv_freq" if hasattr(embedding, "full_attention_inv_freq") else "inv_freq"
    if change == "one value":
        getattr(embedding, table)[1] *= 1.002
    elif change == "all values":
        getattr(embedding, table).mul_(0.5)
    elif change == "a new buffer":
        setattr(embedding, table, getattr(embedding, table) / 4)
    else:
        setattr(embedding, table.replace("inv_freq", "attention_scaling"), 2.0)
    stock = logits(model, tokens()) if dtype == torch.float32 else None
    with pytest.raises(ValueError, match=OTHER_TABLE + r".* rotary=.*from_inv_freq"):
        convert(model)
    if stock is not None:
        assert torch.equal(logits(model, tokens()), stock)


def test_an_edited_table_is_taken_as_rotary():
    """The remedy that the error names gives the logits of the stock model with its edited table."""
    model = tiny("llama")
    table = model.model.rotary_emb.inv_freq
    table[3:] *= 0.25
    stock = logits(model, tokens())
    convert(model, rotary=Rotary.from_inv_freq(table, 16))
    assert close(logits(model, tokens()), stock)
    assert torch.equal(logits(revert(model), tokens()), stock)


def on_meta(name: str):
    with torch.device("meta"):
        return causal_lm(small_config(name), attn_implementation="sdpa").eval()


@pytest.mark.parametrize("name", ["llama", "modernbert-decoder", "cohere2"])
@pytest.mark.parametrize("first", ["convert", "load"])
def test_tables_on_the_meta_device(name, first):
    """Weights that are assigned leave the tables on the meta device. A converted model runs, and so does the stock
    model after revert, because the tables are made again from the configuration."""
    stock, model = tiny(name), on_meta(name)
    if first == "convert":
        convert(model)
    model.load_state_dict(stock.state_dict(), assign=True)
    model.tie_weights()
    convert(model)
    assert all(table.is_meta for table in tables(model).values())
    assert close(logits(model, tokens()), logits(stock, tokens()))
    assert torch.equal(logits(revert(model), tokens()), logits(stock, tokens()))


@pytest.mark.parametrize("name", HERE)
def test_tables_of_every_family_are_made_again(name):
    """Every family's rotary embedding can be built from its configuration, and has the same tables."""
    decoder = find_decoder(tiny(name))
    before = tables(decoder)
    for embedding in rotary_embeddings(decoder).values():
        for table, x in tables_of(embedding).items():
            setattr(embedding, table, x.to("meta"))
        fill_tables(embedding, torch.device("cpu"))
    assert before and tables(decoder).keys() == before.keys()
    assert all(torch.equal(x, before[each]) for each, x in tables(decoder).items())


def test_tables_without_values():
    """to_empty leaves arbitrary numbers in the tables. convert takes the model before to_empty, or with its scheme
    given; otherwise the error names both."""
    stock, model, late = tiny("llama"), convert(on_meta("llama")), on_meta("llama")
    for each in (model, late):
        each.to_empty(device="cpu").load_state_dict(stock.state_dict())
        for table in tables(each).values():
            if not table.is_meta:
                table.fill_(7.0)
    assert close(logits(model, tokens()), logits(stock, tokens()))
    with pytest.raises(ValueError, match=OTHER_TABLE + ".* to_empty"):
        convert(late)
    convert(late, rotary=Rotary.from_hf_config(late.config))
    assert close(logits(late, tokens()), logits(stock, tokens()))
