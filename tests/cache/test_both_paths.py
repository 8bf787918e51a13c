"""A cached call gives the same results and writes the same bytes directly in the backend and through the operators:
under a dispatch mode, with a tensor subclass, and compiled. Every option of the calls has a case."""

import inspect

import pytest
import support
import torch
from caching import PAGE, Cached, door, planned, same
from flashrope import Rotary, attention_varlen_with_cache, attention_with_cache, rotate
from flashrope.operators import torch_library as library
from torch.utils._python_dispatch import TorchDispatchMode

D, LENGTHS = 32, (41, 18, 65)
ROPE, REROPE = Rotary.rope(D), Rotary.rope(D).rectify(8).log_n(32)
WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale", "slot_positions")
NOT_COMPARED = {"impl", "return_lse", "validate", "unknown", "options"}  # options: of plan_cache


def rotated(k: torch.Tensor) -> torch.Tensor:
    return rotate(k, ROPE, impl="reference")


# (scheme, options of Cached, options of the call)
CASES: dict[str, tuple[Rotary, dict, dict]] = {
    "contiguous": (REROPE, {}, {}),
    "paged, padded, scaled": (REROPE, {"page": PAGE, "leftpad": (3, 0, 9)}, {"softmax_scale": 0.3}),
    "not causal": (REROPE, {"queries": 3, "causal": False}, {}),
    "splits": (REROPE, {"page": PAGE}, {"num_splits": 2}),
    "sinks": (REROPE, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {}),
    "int8": (REROPE, {"page": PAGE, "cache_dtype": "int8"}, {}),
    "int8, contiguous": (REROPE, {"cache_dtype": "int8", "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {}),
    "rotated keys": (ROPE, {"stored": rotated}, {}),
    "rotated keys, several": (ROPE.log_n(20), {"stored": rotated, "queries": 4, "leftpad": (3, 0, 9)}, {}),
    "rotated keys, paged, packed": (ROPE, {"stored": rotated, "page": PAGE, "queries": (2, 1, 4)}, {}),
    "narrow values": (REROPE, {"head_dim_v": 16}, {}),
    "values in keys": (REROPE, {"values": slice(8, 24), "page": PAGE}, {}),
    "key weight": (REROPE, {"key_weight": torch.linspace(0.5, 2.0, D)}, {}),
    "packed": (REROPE, {"page": PAGE, "queries": (2, 1, 4)}, {}),
    "packed, padded": (REROPE, {"queries": (2, 1, 4), "leftpad": (3, 0, 9)}, {}),
    "mapped": (REROPE, {"page": PAGE, "queries": (2, 1, 4), "mapped": True}, {}),
    "packed, all options": (
        ROPE,
        {"page": PAGE, "queries": (2, 1, 4), "sinks": torch.zeros(4), "causal": False},
        {"softmax_scale": 0.3, "num_splits": 2},
    ),
    "packed, key weight": (REROPE, {"queries": (2, 1, 4), "key_weight": torch.linspace(0.5, 2.0, D)}, {}),
    "packed, int8": (REROPE, {"page": PAGE, "queries": (2, 1, 4), "cache_dtype": "int8"}, {}),
    "positions": (ROPE, {"page": PAGE, "new": 0}, {}),
    "positions, packed": (ROPE, {"page": PAGE, "new": 0, "queries": (2, 1, 4)}, {}),
    "positions, stored by the call": (ROPE, {"page": PAGE}, {}),
}


def call_of(impl: str, name: str):
    """Returns the public function of a case and its arguments."""
    rotary, options, given = CASES[name]
    target = support.Target(impl, torch.float32, support.device_of(impl))
    c = Cached(target, rotary, LENGTHS, **{"queries": 1, **options})
    if name.startswith("positions"):
        entries = c.block_table.shape[1]
        first = torch.zeros(3, entries, dtype=torch.int32)
        first[0, 1] = 4  # hides four rows
        tables = {"page_first": first, "page_lengths": torch.full_like(first, PAGE) - first}
        tables["page_positions"] = torch.arange(entries, dtype=torch.int32).mul(PAGE).expand(3, -1).contiguous() + 5
        if "stored" in name:
            tables = {"slot_positions": torch.arange(c.pages * PAGE).view(-1, PAGE) % (5 * PAGE) + 0.5}
        elif "packed" in name:
            given = {"positions": torch.arange(7.0) + 60, "slot_positions": torch.rand(c.pages, PAGE)}
        else:
            tables["positions"] = torch.full((3, 1), 70.0)
            tables["slot_positions"] = torch.rand(c.pages, PAGE)
        c = c.at(**tables)
    public, arguments = c.arguments()
    return public, arguments | given | {"impl": impl, "return_lse": True}


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A subclass that changes nothing."""


def under_a_mode(public, arguments):
    with Watching():
        return public(**arguments)


def with_a_subclass(public, arguments):
    return public(**arguments | {"q": arguments["q"].as_subclass(Wrapped)})


def compiled(public, arguments):
    torch._dynamo.reset()
    return torch.compile(public, fullgraph=True, backend="aot_eager")(**arguments)


INTERPRETED = ("int8", "rotated keys, paged, packed", "values in keys", "packed, all options", "positions, packed")
EVERY = [(name, "reference", (with_a_subclass, compiled)) for name in CASES]
EVERY += [(name, impl, (under_a_mode,)) for name in CASES for impl in (None, "sdpa")]
EVERY += [(name, "triton", (under_a_mode,)) for name in INTERPRETED]
EVERY += [("packed, key weight", impl, (compiled,)) for impl in (None, "sdpa", "triton")]


@pytest.mark.parametrize("name, impl, paths", [pytest.param(*x, id=f"{x[0]}-{x[1]}") for x in EVERY])
def test_both_paths(name, impl, paths, monkeypatch):
    public, arguments = call_of(impl, name)
    used: list[int] = []
    monkeypatch.setattr(library, "attend_once", counted(library.attend_once, used))
    plain = copied(name, arguments)
    wanted = public(**plain)
    assert not used, "the plain call went through the operator"
    written = [n for n in WRITTEN if arguments.get(n) is not None]
    if arguments["k"] is not None:
        assert any(not same(plain[n], arguments[n]) for n in written)
    for path in paths:
        used.clear()
        own = copied(name, arguments)
        got = path(public, own)
        assert used, f"{path.__name__}: the call did not go through the operator"
        for x, y in zip(got, wanted, strict=True):
            assert torch.equal(x.as_subclass(torch.Tensor), y), path.__name__
        for n in written:
            assert same(plain[n], own[n]), f"{path.__name__}: {n}"


def copied(name: str, arguments: dict) -> dict:
    own = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    if "values" in CASES[name][1]:
        own["v_cache"] = own["k_cache"][..., CASES[name][1]["values"]]
    return own


def counted(method, calls: list):
    def count(*args):
        calls.append(1)
        return method(*args)

    return count


@pytest.mark.parametrize(
    "public", [attention_with_cache, attention_varlen_with_cache, planned], ids=lambda f: f.__name__
)
def test_every_option_has_a_case(public):
    """Every argument of the call is given in a case, with a value that is not its default."""
    given: set[str] = set()
    defaults = {name: p.default for name, p in inspect.signature(public).parameters.items()}
    for name in CASES:
        _, arguments = call_of("cpu", name)
        if door(arguments) is public:
            given |= {n for n, x in arguments.items() if x is not None and x is not defaults.get(n)}
    assert set(defaults) - NOT_COMPARED <= given
