"""``python -m experiments codes``: measures how much 8-bit and 4-bit caches raise the loss of a pretrained model, and
which keys, values and layers cause the increase at 4 bits.

The model reads every window of text once for each way to store keys and values. For each window and length, the loss of
the last TARGETS tokens before the length is compared with the loss over a float32 cache. The ways "int8" and "int4" use
``CodesCache``. All other ways round keys or values by the same formula and store them in float32. So they show how much
a format would raise the loss before any kernel supports it.

``--agreement N`` runs other ways to round to int8 on the first N tokens of every window. It measures the root mean
square difference between their log probabilities and those of int8, as a share of the change that int8 makes.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from flashrope.backends.quantized import dequantize, quantize
from flashrope.cache.storage import CACHE_DTYPES
from flashrope.cli import files
from flashrope.cli.hardware import hardware
from flashrope.cli.options import BadInput, cores, need, positive
from flashrope.cli.progress import Bar
from flashrope.evaluation.by_position import HiddenStates
from flashrope.evaluation.journal import Journal
from flashrope.evaluation.loss import text_windows
from flashrope.evaluation.model import describe, load, new_cache, training_length
from flashrope.evaluation.statistics import half_interval
from flashrope.operators.functional import rotate

SUMMARY = "what int8 and int4 caches cost a pretrained model: codes --model FILE --text PATH --out DIR"
TARGETS = 1024  # the loss is measured on this many tokens before each length
BASE = "float32"
RESULT, JOURNAL = "codes.json", "codes.jsonl"
LAYERS = re.compile(r"(?P<base>.+), layer (?P<layer>\d+)|(?P<mixed>.+), layers (?P<layers>[\d+]+) in int8")


class Format(NamedTuple):
    """Says how numbers are rounded: to "int8" or "int4", with one scale for every ``group`` channels. group None: one
    scale for all channels of a row."""

    dtype: str
    group: int | None = None


class Way(NamedTuple):
    """Holds the formats of keys and values. None: they stay in float32."""

    keys: Format | None
    values: Format | None


INT8, INT4, GROUPS = Format("int8"), Format("int4"), Format("int4", 32)
WAYS = {
    BASE: Way(None, None),
    "int8": Way(INT8, INT8),
    "int4": Way(INT4, INT4),
    "int4 keys": Way(INT4, None),
    "int4 values": Way(None, INT4),
    "int4, groups of 32": Way(GROUPS, GROUPS),
    "int4 keys, groups of 32": Way(GROUPS, None),
    "int8 keys, int4 values": Way(INT8, INT4),
    "int8 keys, int4 values, groups of 32": Way(INT8, GROUPS),
}


def run(argv: list[str], program: str) -> None:
    parser = argparse.ArgumentParser(prog=program, description=__doc__.partition(": ")[2], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a checkpoint folder or a .gguf file")
    parser.add_argument("--text", metavar="PATH", nargs="+", required=True, help="text files")
    parser.add_argument("--lengths", type=positive, nargs="+", default=[2048, 4096], help="lengths in tokens")
    parser.add_argument("--windows", type=positive, default=6)
    parser.add_argument(
        "--window", type=positive, help="read under ReRoPE with this window and log n (default: the model's own scheme)"
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        default=list(WAYS),
        help=f"ways to store the cache: {', '.join(map(repr, WAYS))}; 'WAY, layer N' stores only layer N in this way; "
        "'int4, layers N+M in int8' stores layers N and M in int8 and the others in int4",
    )
    parser.add_argument(
        "--each-layer", metavar="WAY", nargs="+", default=[], help="measure these ways in one layer at a time"
    )
    parser.add_argument("--agreement", type=positive, metavar="N", help="instead compare log probabilities of N tokens")
    args = parse(parser, argv)
    args.lengths.sort()
    measure(args, command_line(program, argv))


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Adds the arguments of every measurement on a pretrained model, parses them, and sets the CPU threads."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=positive, default=cores())
    parser.add_argument("--out", metavar="DIR", type=Path, required=True)
    args = parser.parse_args(argv)
    need("transformers", extra="transformers")
    torch.set_num_threads(args.threads)
    return args


def command_line(program: str, argv: Sequence[str]) -> str:
    """Returns the command as results record it, without --out."""
    words = [word for at, word in enumerate(argv) if "--out" not in (word.partition("=")[0], *argv[at - 1 : at])]
    return shlex.join([*program.split(), *words])


@torch.no_grad()
def measure(args: argparse.Namespace, command: str) -> None:
    """Measures all ways on all windows. Writes codes.json after every window."""
    from flashrope.integrations.transformers import convert

    model, tokens = load(args.model, torch.device("cpu"))
    model = convert(model, window=args.window, log_n=True) if args.window else convert(model)
    layers = model.config.get_text_config().num_hidden_layers
    names = [BASE, *args.ways, *(f"{way}, layer {n}" for way in args.each_layer for n in range(layers))]
    ways = {name: ways_of(name, layers) for name in dict.fromkeys(names)}
    texts = {path: Path(path).read_text(encoding="utf-8") for path in args.text}
    windows = text_windows(texts, tokens, args.lengths[-1], args.windows, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": describe(model, args.model, training_length(model, args.model, None)),
        "text": [Path(path).name for path in args.text],
        "lengths": args.lengths,
        "targets": TARGETS,
        "windows": len(windows),
        "seed": args.seed,
    } | ({"window": args.window} if args.window else {})
    facts = settings | {"machine": f"{hardware('cpu')}, torch {torch.__version__}", "command": command}
    if args.agreement:
        return write_agreement(args, model, tokens, windows, facts)
    journal = Journal(args.out / JOURNAL, settings)
    done = {(row["way"], row["window"]) for row in journal.rows}
    with Bar(len(windows) * len(ways)) as bar:
        bar.start("windows and ways")
        for number, window in enumerate(windows):
            row = torch.tensor([[*tokens.start, *window]])
            for name, formats in ways.items():
                if (name, number) not in done:
                    found = losses(model, row, cache_of(model, name, formats), args.lengths)
                    journal.add({"way": name, "window": number, "losses": found})
                bar.step(1)
            write(args.out / RESULT, facts, journal.rows)
    print(table(journal.rows, args.lengths))


def ways_of(name: str, layers: int) -> list[Way]:
    """Returns the way of every layer. name: a value of --ways, which can limit a way to some layers.

    Raises:
        BadInput: the name is unknown, or the model has too few layers for it.
    """
    if name in WAYS:
        return [WAYS[name]] * layers
    found = LAYERS.fullmatch(name)
    base = found and (found["base"] or found["mixed"])
    if not found or base not in WAYS:
        raise BadInput(f"--ways: expected one of {', '.join(map(repr, WAYS))}, got {name!r}")
    inside = {int(found["layer"])} if found["layer"] else set(map(int, found["layers"].split("+")))
    if max(inside) >= layers:
        raise BadInput(f"--ways: expected layers below {layers}, got {name!r}")
    within, elsewhere = (WAYS[base], WAYS[BASE]) if found["layer"] else (WAYS["int8"], WAYS[base])
    return [within if layer in inside else elsewhere for layer in range(layers)]


def cache_of(model, name: str, ways: Sequence[Way]):
    """Returns an empty cache. If `name` is in CACHE_DTYPES, the cache has that type; otherwise layer i rounds keys and
    values as ways[i] says."""
    from transformers import Cache
    from transformers.cache_utils import DynamicLayer

    if name in CACHE_DTYPES:
        return new_cache(model, name)

    class RoundedLayer(DynamicLayer):
        def __init__(self, way: Way):
            super().__init__()
            self.way = way

        def update(self, keys, values, *args, **kwargs):
            return super().update(rounded(keys, self.way.keys), rounded(values, self.way.values), *args, **kwargs)

    return Cache(layers=[RoundedLayer(way) for way in ways])


def rounded(x: torch.Tensor, form: Format | None) -> torch.Tensor:
    """Returns x (..., head_dim) after quantizing it and converting it back."""
    if form is None:
        return x
    groups = x.unflatten(-1, (-1, form.group or x.shape[-1]))
    return dequantize(*quantize(groups, CACHE_DTYPES[form.dtype]), x.dtype).flatten(-2)


def losses(model, row: torch.Tensor, cache, lengths: Sequence[int]) -> list[float]:
    """Returns the mean loss of the last TARGETS tokens up to every length, from one pass over row (1, longest + 1)."""
    from flashrope.integrations.transformers.versions import CACHE

    hidden, found = HiddenStates(model), []
    hidden.compute(row[:, :-1], use_cache=True, **{CACHE: cache})
    for length in lengths:
        pieces = []
        for begin in range(max(length - TARGETS, 0), length, 256):
            end = min(begin + 256, length)
            logits = hidden.logits(row[:, :-1], begin, end)
            pieces.append(
                torch.nn.functional.cross_entropy(logits.float(), row[0, begin + 1 : end + 1], reduction="none")
            )
        found.append(torch.cat(pieces).double().mean().item())
    return found


# ---- how closely two ways to round to int8 agree


def write_agreement(args: argparse.Namespace, model, tokens, windows, facts: dict[str, Any]) -> None:
    """Writes agreement.json."""
    found = []
    for window in windows:
        row = torch.tensor([[*tokens.start, *window][: args.agreement + 1]])
        found.append(agreement(model, row))
        print(found[-1], flush=True)
    means = {name: fmean(each[name] for each in found) for name in found[0]}
    record = {**facts, "tokens": args.agreement, "mean": means, "windows": found}
    files.write(args.out / "agreement.json", json.dumps(record, indent=1) + "\n")


def agreement(model, row: torch.Tensor) -> dict[str, float]:
    """Returns the losses on a row of tokens, and how much the log probabilities differ from those of int8: the root
    mean square differences as shares of the change that int8 makes.

    The result has two other ways to round. "other sums" rounds in the same way but stores float32, and attention then
    adds in another order. "rotated keys" rotates keys, rounds them, and rotates them back. The vLLM plugin stores such
    keys under a scheme that rotates all keys by the same rotation.
    """
    from flashrope.integrations.transformers.plan import find_decoder, plan_of
    from flashrope.integrations.transformers.versions import CACHE
    from transformers import Cache
    from transformers.cache_utils import DynamicLayer

    config = model.config.get_text_config()
    rotary = next(iter(plan_of(find_decoder(model)).schemes.values())).rotary

    class RotatedLayer(DynamicLayer):
        def update(self, keys, values, *args, **kwargs):
            positions = self.get_seq_length() + torch.arange(keys.shape[2])
            turned = rounded(rotate(keys.transpose(1, 2), rotary, positions).contiguous(), INT8)
            keys = rotate(turned, rotary, -positions).transpose(1, 2)
            return super().update(keys, rounded(values, INT8), *args, **kwargs)

    def read(cache) -> torch.Tensor:
        return model(row[:, :-1], use_cache=True, **{CACHE: cache}).logits[0].float().log_softmax(-1)

    layers = config.num_hidden_layers
    exact, codes = read(None), read(new_cache(model, "int8"))
    others = {
        "other sums": read(cache_of(model, "", [WAYS["int8"]] * layers)),
        "rotated keys": read(Cache(layers=[RotatedLayer() for _ in range(layers)])),
    }
    cost = (codes - exact).square().mean()
    found = {name: ((each - codes).square().mean() / cost).sqrt().item() for name, each in others.items()}
    for name, each in {"float32": exact, "int8": codes, **others}.items():
        found[f"loss, {name}"] = -each.gather(1, row[0, 1:, None]).double().mean().item()
    return found


def summary(rows: Iterable[dict[str, Any]], at: int) -> dict[str, dict[str, float]]:
    """Returns {way: results at one of the lengths}. The results are the loss and its change from the float32 cache,
    both averaged over the windows."""
    of = {(row["way"], row["window"]): row["losses"][at] for row in rows}
    found = {}
    for way in dict.fromkeys(way for way, _ in of):
        pairs = [(loss, of[BASE, window]) for (name, window), loss in of.items() if name == way]
        changes = [loss - base for loss, base in pairs]
        found[way] = {"loss": fmean(loss for loss, _ in pairs), "change": fmean(changes), "windows": len(pairs)}
        if len(pairs) > 1:
            found[way]["interval_95"] = half_interval(changes)
    return found


def write(path: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    by_length = {str(length): summary(rows, at) for at, length in enumerate(facts["lengths"])}
    files.write(path, json.dumps({**facts, "results": by_length, "rows": rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]], lengths: Sequence[int]) -> str:
    found = [summary(rows, at) for at in range(len(lengths))]
    lines = [f"change of the loss from a {BASE} cache, nats per token, at {', '.join(map(str, lengths))} tokens"]
    for way in found[0]:
        cells = (f"{each[way]['change']:+.4f} ± {each[way].get('interval_95', float('nan')):.4f}" for each in found)
        lines.append(f"{way:<38}{'   '.join(cells)}")
    return "\n".join(lines)
