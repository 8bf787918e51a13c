"""A small vision transformer with two-dimensional RoPE on pictures of different sizes, packed without padding. This
file is self-contained: copy it and change it.

    python packed_vit.py                     # under a minute on a CPU
    python packed_vit.py --positions none    # the same model without positions gets about 1 in 4 right

Every picture shows a cross and a ring on noise, and the model says on which side of the cross the ring is: above,
right, below or left. The model is trained on pictures of 4 to 8 patches a side, and measured on larger ones, too.
A batch is one row of tokens with ``cu_seqlens``. Every picture starts with a class token at position (0, 0), which does
not rotate. The script needs only flashrope.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from flashrope import Rotary, attention_varlen
from torch import nn

PATCH = 4  # pixels a side
CROSS = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0]]) * 2.0
RING = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]]) * 2.0
TRAINED = (4, 8)  # patches a side
MEASURED = ((6, 6), (8, 8), (5, 12), (12, 12))  # (rows, columns); the last two pictures are larger than any in training
SIDES = ("above", "right", "below", "left")


class Batch(NamedTuple):
    """A batch of pictures, one after another."""

    patches: torch.Tensor  # (patches, PATCH * PATCH)
    positions: torch.Tensor  # (tokens, 2): row and column; (0, 0) for class tokens
    is_class: torch.Tensor  # (tokens,)
    cu_seqlens: torch.Tensor  # (pictures + 1,) int32
    longest: int
    labels: torch.Tensor  # (pictures,) index into SIDES


def picture(rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """Returns pixels (rows * PATCH, columns * PATCH), and the side of the cross that the ring is on."""
    while True:
        cross, ring = (
            [int(torch.randint(n, (), generator=generator)) for n in (rows, columns)] for _ in ("cross", "ring")
        )
        down, right = ring[0] - cross[0], ring[1] - cross[1]
        if abs(down) != abs(right):
            break
    pixels = torch.randn(rows * PATCH, columns * PATCH, generator=generator) * 0.5
    for (row, column), mark in ((cross, CROSS), (ring, RING)):
        pixels[row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] += mark
    side = (2 if down > 0 else 0) if abs(down) > abs(right) else (1 if right > 0 else 3)
    return pixels, side


def pack(pictures: list[tuple[torch.Tensor, int]]) -> Batch:
    """Returns pictures of any sizes as one batch, without padding."""
    patches, positions, lengths = [], [], []
    for pixels, _ in pictures:
        parts = pixels.unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH)  # (rows, columns, PATCH, PATCH)
        rows, columns = parts.shape[:2]
        patches.append(parts.reshape(rows * columns, PATCH * PATCH))
        grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        positions.append(torch.cat((torch.zeros(1, 2, dtype=torch.int64), grid)))
        lengths.append(1 + rows * columns)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    is_class = torch.zeros(int(cu_seqlens[-1]), dtype=torch.bool)
    is_class[cu_seqlens[:-1]] = True
    labels = torch.tensor([side for _, side in pictures])
    return Batch(torch.cat(patches), torch.cat(positions), is_class, cu_seqlens.to(torch.int32), max(lengths), labels)


def to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in batch))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, rotary: Rotary):
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:  # (tokens, width)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)  # raw (tokens, heads, head_dim)
        positions = batch.positions if self.rotary.axis else None
        ends, longest = batch.cu_seqlens, batch.longest
        seen = attention_varlen(q, k, v, self.rotary, ends, ends, longest, longest, causal=False, positions=positions)
        x = x + self.out(seen.flatten(1))
        return x + self.mlp(x)


class VisionTransformer(nn.Module):
    def __init__(self, rotary: Rotary, heads: int = 2, layers: int = 2):
        super().__init__()
        width = heads * rotary.head_dim
        self.embed = nn.Linear(PATCH * PATCH, width)
        self.class_token = nn.Parameter(torch.randn(width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, rotary) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(SIDES)))

    def forward(self, batch: Batch) -> torch.Tensor:  # (pictures, sides)
        x = self.class_token.expand(len(batch.is_class), -1)
        x = x.masked_scatter(~batch.is_class[:, None], self.embed(batch.patches))
        for block in self.blocks:
            x = block(x, batch)
        return self.head(x[batch.is_class])


def scheme(positions: str, head_dim: int = 32) -> Rotary:
    """Returns the scheme. positions: "axial": half of the pairs rotate by the row, and half by the column. "raster":
    all pairs rotate by the token's index. "none": no pair rotates."""
    if positions == "axial":
        return Rotary.axial(head_dim, axes=2, base=100.0)
    return Rotary.rope(head_dim, base=100.0) if positions == "raster" else Rotary.none(head_dim)


def train(model: nn.Module, steps: int, batch: int, learning_rate: float, seed: int, device: torch.device) -> list:
    """Trains the model in place. Returns the loss of every step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    losses = []
    for step in range(steps):
        sizes = torch.randint(TRAINED[0], TRAINED[1] + 1, (batch, 2), generator=generator).tolist()
        packed = to_device(pack([picture(*size, generator) for size in sizes]), device)
        loss = F.cross_entropy(model(packed), packed.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"step {step + 1:>5}  loss {sum(losses[-100:]) / 100:.3f}", flush=True)
    return losses


@torch.no_grad()
def measure(model: nn.Module, rows: int, columns: int, count: int, seed: int, device: torch.device) -> float:
    """Returns the share of pictures of one size that the model gets right."""
    generator = torch.Generator().manual_seed(1_000_003 + seed)
    packed = to_device(pack([picture(rows, columns, generator) for _ in range(count)]), device)
    return (model(packed).argmax(-1) == packed.labels).double().mean().item()


def main(arguments: list[str] | None = None) -> dict[tuple[int, int], float]:
    parser = argparse.ArgumentParser(description="A vision transformer on packed pictures of different sizes.")
    parser.add_argument("--positions", choices=("axial", "raster", "none"), default="axial")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32, help="pictures a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    args = parser.parse_args(arguments)
    torch.manual_seed(args.seed)
    rotary = scheme(args.positions)
    print(rotary)
    model, started = VisionTransformer(rotary).to(args.device), time.monotonic()
    train(model, args.steps, args.batch, args.learning_rate, args.seed, args.device)
    print(f"trained in {time.monotonic() - started:.0f} s")
    right = {size: measure(model, *size, 500, args.seed, args.device) for size in MEASURED}
    for (rows, columns), share in right.items():
        note = "" if max(rows, columns) <= TRAINED[1] else "  (larger than in training)"
        print(f"{rows:>3} x {columns:<3} patches: {100 * share:.1f}% right{note}")
    return right


if __name__ == "__main__":
    main()
