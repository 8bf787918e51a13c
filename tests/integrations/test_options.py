"""Tests that all readers of the options agree on the scheme of every layer. The readers are convert, a saved model,
the vLLM plugin and flashrope loss."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
import vllm_configs

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import schemes, tiny
from flashrope import Rotary
from flashrope.integrations.scheme_options import read_options
from flashrope.integrations.transformers import convert, from_pretrained
from flashrope.integrations.vllm.engine_plan import make_plan
from flashrope.lab.evaluation.checkpoint import load
from flashrope.lab.evaluation.readings import applicable
from flashrope.schemes.catalogue import SCHEMES, known_options
from transformers import AutoConfig

ROPE = Rotary.rope(16)
VALUES = {  # {stage: the options to choose from}; {} means that none is given
    "rotary": [{}, {"rotary": ROPE.interpolate(2.0)}],
    "table": [{}, {"ntk": 2.0}, {"yarn": (4.0, 16)}],
    "cut": [
        {},
        {"hope": 48},
        {"cope": 48},
        {"cope": True},
        {"cope": {"pairs": 3, "taper": False}},
        {"p_rope": 0.5},
    ],
    "bands": [
        {},
        {"rerope": 0},
        {"rerope": 6},
        {"leaky_rerope": (6, 4.0)},
        {"string": (8, 3)},
        {"self_extend": (8, 4)},
        {"dual_chunk": (160, 32)},
        {"dual_chunk": (160, 32, 100)},
    ],
    "scale": [{}, {"log_n": 32}, {"log_n": True}, {"log_n": 32, "log_n_clip": False}],
}
COMBINATIONS = [
    {name: value for part in parts for name, value in part.items()}
    for parts in itertools.product(*VALUES.values())
    if not ("rotary" in parts[0] and parts[1])  # interpolations do not stack
]


def planned(folder, max_model_len: int = 64) -> list[Rotary]:
    """Returns the scheme of every layer that vLLM's plugin reads from a saved model."""
    config = AutoConfig.from_pretrained(folder)
    if not hasattr(config, "flashrope"):
        config.flashrope = {}
    asking = vllm_configs.config(text=config, model={"max_model_len": max_model_len})
    return [layer.rotary for layer in make_plan(asking).layers]


def test_the_combinations_have_every_option():
    found = set().union(*COMBINATIONS)
    beside = {option.beside.name for option in known_options().values() if option.beside}
    assert found == {"rotary", *known_options(), *beside}
    assert len(COMBINATIONS) == 4 * 6 * 8 * 4


def test_what_is_read_reads_as_itself():
    """A configuration holds the options that were read. Reading them again changes nothing."""
    config = SimpleNamespace(max_position_embeddings=64)
    for options in COMBINATIONS:
        read = read_options(options, config)
        assert read_options(read, SimpleNamespace()) == read, options


# A part takes every ninth combination. Every part contains every value: the last two stages have 8 and 4 values, which
# have no factor in common with 9, and a value of an earlier stage lasts for 32 successive combinations or more.
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 9))])
def test_every_reader_makes_the_same_schemes(part, tmp_path):
    """Every reader makes the same schemes from each combination of options. The weights are saved only once, and the
    configuration for each combination."""
    model = tiny("llama", vocab_size=256)  # bytes: flashrope loss needs no tokenizer
    model.save_pretrained(tmp_path)
    seen = {}
    for options in COMBINATIONS[part::9]:
        in_memory = schemes(convert(model, **options))
        assert len(in_memory) == 3
        model.config.save_pretrained(tmp_path)
        assert schemes(from_pretrained(tmp_path)) == in_memory, options
        assert planned(tmp_path) == in_memory, options
        measured, _ = load(str(tmp_path), torch.device("cpu"))
        (scheme,), skipped = applicable(measured, ["stock"], 64, 64)
        scheme.apply()
        found = schemes(measured)
        assert not skipped and (found == in_memory if options else not found), options
        seen[json.dumps(model.config.to_dict().get("flashrope"))] = in_memory[0]
    assert len(set(seen.values())) >= len(seen) - 1  # True and the length that it stands for are one scheme


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "stock"])
def test_what_the_commands_measure_can_be_saved_and_served(name, tmp_path):
    model = tiny("llama", max_position_embeddings=256)
    (scheme,), _ = applicable(model, [name], 256, 1024)
    scheme.apply()
    in_memory = schemes(model)
    assert in_memory != [Rotary.rope(16)] * 3
    model.save_pretrained(tmp_path)
    assert schemes(from_pretrained(tmp_path)) == in_memory
    assert planned(tmp_path, 1024) == in_memory
