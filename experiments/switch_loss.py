r"""Measures the loss in the first steps after a RoPE model is switched to HoPE, for the figure of docs/training.md. The
switch is made at once, or after some steps under CoPE.

    python -m experiments loss --preset loss --device cpu --threads 1
    python -m experiments.switch_loss runs/experiments-loss/models/rope-L256-s[0-2].safetensors --out docs/training \
        --threads 1

The training of every model is continued under each scheme, with the same batches and a constant learning rate. The loss
is measured on unseen windows of the training length. Its change is the difference from the loss on the same windows
before the switch.
"""

import argparse
import copy
from math import nan
from pathlib import Path
from statistics import fmean

import torch
from flashrope import Rotary
from flashrope.console import files
from flashrope.console.figure import COLOURS, MARKERS, new_figure, save
from flashrope.console.options import cores
from flashrope.lab.small_models import data
from flashrope.lab.small_models.model import LanguageModel, load_checkpoint, trained_length
from flashrope.schemes.catalogue import apply_options
from torch.nn.functional import cross_entropy

AFTER = (0, 1, 2, 4, 8, 15, 30, 45, 60)  # the loss is measured this many steps after each switch
ROPE, HOPE, COPE, BOTH = "RoPE", "HoPE at once", "CoPE", "CoPE, then HoPE"
RATE = 4e-4  # a tenth of the learning rate in training


def loss_of(model: LanguageModel, rotary: Rotary, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens[:, :-1], rotary).transpose(1, 2), tokens[:, 1:])


@torch.no_grad()
def measure(model: LanguageModel, rotary: Rotary, windows: torch.Tensor) -> float:
    return loss_of(model, rotary, windows).item()


def continued(
    model: LanguageModel,
    schemes: tuple[Rotary, Rotary],
    batches: list[torch.Tensor],
    windows: torch.Tensor,
) -> dict[int, float]:
    """Returns {n: the loss before step n}. The second scheme replaces the first in the middle of the training. From
    then on, the loss is measured under the second scheme."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.1)
    switch, found = len(batches) // 2, {}
    for step in range(len(batches) + 1):
        rotary = schemes[step >= switch]
        if step in AFTER or step - switch in AFTER:
            found[step] = measure(model, rotary, windows)
        if step < len(batches):
            loss_of(model, rotary, batches[step]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return found


def draw(rows: list[list], out: Path) -> None:
    """Draws every model, and the mean over the models. A line breaks where the second scheme takes over."""
    figure = new_figure((6.4, 3.2))
    axes = figure.subplots()
    for n, run in enumerate(dict.fromkeys(row[0] for row in rows)):
        lines: dict[str, dict[float, float]] = {}
        for _, name, step, _, change in (row for row in rows if row[0] == run):
            lines.setdefault(name, {})[step] = float(change)
        if run == BOTH:
            switch = max(step for line in lines.values() for step in line) / 2
            lines = {name: dict(sorted({**line, switch - 0.1: nan}.items())) for name, line in lines.items()}
        for line in lines.values():
            axes.plot(list(line), list(line.values()), color=COLOURS[n], linewidth=0.6, alpha=0.6)
        steps = list(next(iter(lines.values())))
        means = [fmean(line[step] for line in lines.values()) for step in steps]
        dashed = dict(linestyle="--", markerfacecolor="none", markersize=7, zorder=3) if run == ROPE else {}
        style = dict(marker=MARKERS[n], markersize=4, linewidth=1.4, label=run) | dashed
        axes.plot(steps, means, color=COLOURS[n], **style)
    axes.set_xlabel("steps after the first switch", fontsize=9)
    axes.set_title("change of the loss, nats per byte", fontsize=10, loc="left")
    axes.tick_params(labelsize=8)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.legend(fontsize=8)
    save(figure, out / "switch.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="RoPE models of the experiments or of flashrope demo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed, path in enumerate(args.models):
        model, rope = load_checkpoint(path)
        length = trained_length(path)
        hope, cope = (apply_options(rope, {name: length}) for name in ("hope", "cope"))
        corpus = data.standard_library(length + 1)
        windows = data.as_tokens(data.unseen_windows(corpus.unseen, length + 1, args.windows, 0))
        drawn = data.random_batches(corpus.train, args.batch, length, 1000 + seed)
        batches = [batch for _, batch in zip(range(2 * AFTER[-1]), drawn, strict=False)]
        before = measure(model, rope, windows)
        runs = {ROPE: (rope, rope), HOPE: (hope, hope), COPE: (cope, cope), BOTH: (cope, hope)}
        for run, schemes in runs.items():
            for step, loss in continued(model, schemes, batches, windows).items():
                rows.append([run, path.stem, step, f"{loss:.4f}", f"{loss - before:.4f}"])
            print(f"{path.stem}, {run}: {before:.3f} before, {loss:.3f} after {step} steps", flush=True)
    files.write(args.out / "switch.csv", files.csv_text(["run", "model", "step", "loss", "change"], rows))
    draw(rows, args.out)


if __name__ == "__main__":
    main()
