"""Trains a small language model over bytes, with RoPE and grouped-query attention, on a text, and continues the text.

    python examples/migration/after.py [FILE] [--steps 300] [--tokens 60]

before.py beside it does the same on flash-attn or SDPA.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from flashrope import KVCache, Rotary, attention
from torch import nn

WIDTH, LAYERS, HEADS, HEADS_KV, HEAD_DIM = 64, 2, 4, 2, 16
SEQLEN, BATCH = 96, 8
ROTARY = Rotary.rope(HEAD_DIM, base=10_000.0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x, layer, step=None):
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, HEADS_KV, HEADS_KV], -2)
        out = attention(q, k, v, ROTARY, causal=True) if step is None else step.attend(q, ROTARY, k, v, layer=layer)
        return self.out(out.flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.norm2 = nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, *attention):
        x = x + self.attention(self.norm1(x), *attention)
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens, step=None):
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, step)
        return self.head(self.norm(x))


def train(model, text, steps):
    """Trains the model. Returns the loss of every step, in nats per byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        starts = torch.randint(len(text) - SEQLEN, (BATCH, 1), generator=generator)
        batch = text[starts + torch.arange(SEQLEN + 1)].long()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def generate(model, prompt, tokens):
    """Returns the most likely bytes after the prompt, int64 (1, seqlen)."""
    size = dict(batch=1, capacity=prompt.shape[1] + tokens, heads_kv=HEADS_KV, head_dim=HEAD_DIM)
    cache = KVCache(**size, layers=LAYERS, dtype=torch.float32, device="cpu")
    found, read = [], prompt
    for _ in range(tokens):
        with cache.step(read.shape[1]) as step:
            read = model(read, step)[:, -1:].argmax(-1)
        found.append(read.item())
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default=argparse.__file__, help="the text; default: a module of Python")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=60)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model, text = LanguageModel(), torch.frombuffer(bytearray(Path(args.file).read_bytes()), dtype=torch.uint8)
    losses = train(model, text, args.steps)
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {args.steps} steps")
    found = generate(model, text[None, :48].long(), args.tokens)
    print(bytes(found).decode(errors="replace"))
    return losses, found


if __name__ == "__main__":
    main()
