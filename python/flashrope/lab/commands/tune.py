"""``flashrope tune``: measures tiles on this GPU and stores the fastest tiles for all later calls."""

from __future__ import annotations

import argparse
import sys

from ...backends import tuned_tiles as store

PASSES = ("forward", "backward", "atomic", "decode", "prefill")
DTYPES = ("bf16", "fp16")
SECONDS = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="BxSxHxKxD",
        help="batch, seqlen, query heads, key heads, head_dim, such as 8x4096x32x8x128; in decode and prefill seqlen "
        "is the capacity of the cache (default: 32 and 8 heads, head_dim 128, one shape for every class of length)",
    )
    parser.add_argument(
        "--passes",
        nargs="+",
        choices=PASSES,
        default=["forward", "backward", "decode"],
        help="atomic: the backward of deterministic=False; prefill: a chunk of a prompt over a cache (default: forward "
        "backward decode)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="type to measure with; both types use the same tuned tiles"
    )
    parser.add_argument(
        "--bands",
        nargs="+",
        type=int,
        choices=(1, 2),
        default=[1, 2],
        help="1: RoPE, HoPE; 2: ReRoPE and other schemes with several bands (default: 1 2)",
    )
    parser.add_argument("--seconds", type=_positive(float), default=SECONDS, help="time limit of the whole run")
    parser.add_argument("--jobs", type=_positive(int), help="threads that compile (default: one per processor)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--show", action="store_true", help="print the stored winners and measure nothing")
    instead.add_argument("--reset", action="store_true", help="remove the file of winners and measure nothing")


def _positive(kind: type):
    def parse(text: str):
        number = kind(text)
        if not number > 0:
            raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
        return number

    parse.__name__ = kind.__name__
    return parse


def run(args: argparse.Namespace) -> int:
    if args.reset:
        print(f"{'removed' if store.reset() else 'there was no'} {store.path()}")
        return 0
    if args.show:
        print("\n".join(shown()))
        return 0
    import torch

    from ...backends import triton as backend

    if not torch.cuda.is_available():
        return _error("no CUDA device was found; tiles are tuned on the GPU that will use them")
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := backend.unsupported_reason(torch.empty(1, device=device, dtype=torch.bfloat16)):
        return _error(reason)
    return tune(device, args)


def tune(device, args: argparse.Namespace) -> int:
    """Examines the workloads that the options name, and stores the winner of each workload as soon as it is known."""
    import torch

    from ...backends.triton.chosen_tiles import setup_of
    from ...backends.triton.device import compute_capability
    from ...console.progress import Bar
    from ..tuning import measure, workloads

    try:
        shapes = [workloads.parse_shape(text) for text in args.shapes or ()]
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
        chosen = workloads.chosen(args.passes, shapes, dtype, args.bands)
    except ValueError as error:
        return _error(f"--shapes: {error}")
    setup = setup_of(device, compute_capability(device))
    print(f"{setup.device}, triton {setup.triton}, flashrope {setup.flashrope}: {len(chosen)} classes of calls")
    bar, done = Bar(measure.steps(chosen, device), limit=args.seconds), 0
    try:
        for examined in measure.examine(chosen, device, args.seconds, bar, args.jobs or 0):
            bar.clear()
            print("\n".join(report(examined)), flush=True)
            done += 1
            if winner := examined.record():
                store.update(setup, {examined.workload.shape_class: winner})
    except OSError as error:
        bar.clear()
        return _error(f"{store.path()} cannot be written: {error}")
    bar.clear()
    for workload in chosen[done:]:
        print(f"not reached: {workload.shape_class}; allow more --seconds, or name fewer --shapes, --passes or --bands")
    print(f"the winners are in {store.path()}; flashrope tune --reset removes them")
    return 0


def report(examined) -> list[str]:
    """Returns lines about the results for one workload: the winner, and the candidates that were dropped."""
    shape, winner, default = examined.workload.shape_class, examined.winner, examined.default
    if winner is None:
        lines = [f"{shape}: no candidate could be timed, so the default tile stays in use"]
    elif winner is default:
        lines = [f"{shape}: {winner.tile.description}, {winner.milliseconds.median:.3f} ms (the default tile)"]
    else:
        was = f", default {default.milliseconds.median:.3f} ms" if default.milliseconds else ""
        lines = [f"{shape}: {winner.tile.description}, {winner.milliseconds.median:.3f} ms{was}"]
    return lines + [f"  dropped {each.tile.description}: {each.dropped}" for each in examined.outcomes if each.dropped]


def shown() -> list[str]:
    """Returns lines that describe the file of tuned tiles."""
    from ...triton_kernels.configs import Tile

    tuned = store.tuned()
    if not tuned:
        return [f"no tuned tiles ({store.path()})"]
    lines = [f"tuned tiles ({store.path()})"]
    for setup, winners in tuned.items():
        number = setup.capability
        capability = number if isinstance(number, str) else f"{number // 10}.{number % 10}"
        lines.append(f"  {setup.device}, {capability}, triton {setup.triton}, flashrope {setup.flashrope}")
        for shape, winner in winners.items():
            times = f"{winner.milliseconds:.3f} ms, default {winner.default_milliseconds:.3f} ms"
            lines.append(f"    {shape}: {Tile(*winner.tile).description}, {times}")
    return lines


def _error(message: str) -> int:
    print(f"flashrope tune: error: {message}", file=sys.stderr)
    return 2
