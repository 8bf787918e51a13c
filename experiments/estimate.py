"""``python -m experiments estimate``: estimates the operations, time and memory for training a preset's models.

The estimate follows from the sizes only, and nothing is run. A training token takes

    6 (N + vocab_size * width) + 6 * layers * width * train_length    floating-point operations

where N is the number of weights in the layers. A weight takes two operations in the forward and four in the backward.
The second term is the causal half of attention's two matrix products. Memory holds the weights in float32, their
gradients and AdamW's two moments. In addition, every token of a micro-batch takes 20 * width + 8 * mlp_width bytes of
activations per layer and 12 * vocab_size bytes of logits.
"""

from __future__ import annotations

import argparse
import dataclasses

from flashrope.console.options import BadInput, positive

from .presets import PRESETS, Preset
from .zoo import LLAMA

SUMMARY = "tokens, FLOPs, hours and memory of a preset's training, estimated: estimate --preset 125m"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Holds the cost of training one model. ``weights`` is the number of weights, and ``memory`` is in bytes."""

    weights: int
    tokens_per_step: int
    tokens: int
    flops: float
    memory: float


def estimate(preset: Preset, vocab_size: int) -> Estimate:
    """Returns the cost of training one Llama model of this preset with this vocabulary."""
    config = dataclasses.replace(preset, vocab_size=vocab_size).config
    layer = 4 * config.width**2 + 3 * config.width * config.hidden
    embedding = vocab_size * config.width
    weights = config.layers * (layer + 2 * config.width) + embedding + config.width
    a_step = preset.batch * preset.train_length
    a_token = 6 * (config.layers * layer + embedding) + 6 * config.layers * config.width * preset.train_length
    at_once = (preset.micro_batch or preset.batch) * preset.train_length
    activations = config.layers * (20 * config.width + 8 * config.hidden) + 12 * vocab_size  # bytes per token
    return Estimate(
        weights,
        a_step,
        preset.steps * a_step,
        float(a_token) * preset.steps * a_step,
        16 * weights + at_once * activations,
    )


def run(argv: list[str], program: str) -> None:
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__.partition(": ")[2],
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--vocab-size", type=positive, metavar="N", help="default: the preset's")
    parser.add_argument(
        "--models", type=positive, metavar="N", default=1, help="number of models: encodings times seeds (default: 1)"
    )
    parser.add_argument(
        "--tflops",
        type=float,
        metavar="X",
        help="10^12 operations per second that a GPU sustains in training; needed to estimate hours",
    )
    parser.add_argument(
        "--gpus", type=positive, metavar="N", default=1, help="number of GPUs that share the work (default: 1)"
    )
    args = parser.parse_args(argv)
    preset = PRESETS[args.preset]
    if preset.architecture != LLAMA:
        raise BadInput(f"--preset: expected one of the Llama architecture, got {args.preset}")
    found = estimate(preset, args.vocab_size or preset.vocab_size)
    print(f"weights              {found.weights:,}")
    print(f"tokens a step        {found.tokens_per_step:,}")
    print(f"tokens a model       {found.tokens:,}")
    print(f"operations a model   {found.flops:.2e}")
    print(f"memory of a process  {found.memory / 1e9:.1f} GB")
    if args.tflops:
        hours = args.models * found.flops / (args.tflops * 1e12 * args.gpus) / 3600
        models = "1 model" if args.models == 1 else f"{args.models} models"
        print(f"hours                {hours:.2f} for {models} on {args.gpus} GPU at {args.tflops:g} TFLOP/s each")
