"""Trains a small language model over bytes, with RoPE and grouped-query attention, on a text, and continues the text.

    python examples/migration/before.py [FILE] [--steps 300] [--tokens 60]

This is how such a script looks on flash-attn or SDPA. after.py beside it does the same with flashrope.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, LAYERS, HEADS, HEADS_KV, HEAD_DIM = 64, 2, 4, 2, 16
SEQLEN, BATCH = 96, 8


def flash_attn_func(q, k, v, causal=False):
    """Does what flash-attn's call does, with PyTorch's kernel, which also runs on the CPU and in float32."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def cos_and_sin(seqlen, base=10_000.0):
    inv_freq = base ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    angles = (torch.arange(seqlen).double()[:, None] * inv_freq).repeat(1, 2)[:, None]
    return angles.cos().float(), angles.sin().float()  # (seqlen, 1, head_dim)


def apply_rotary(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x, cos, sin, cache=None):
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, HEADS_KV, HEADS_KV], -2)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if cache is None:
            out = flash_attn_func(q, k, v, causal=True)
        else:
            k, v = cache.append(k, v)
            out = flash_attn_func(q, k, v, causal=q.shape[1] > 1)
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

    def forward(self, tokens, caches=None):
        x, done = self.embedding(tokens), caches[0].length if caches else 0
        cos, sin = (table[done:] for table in cos_and_sin(done + tokens.shape[1]))
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, caches[layer] if caches else None)
        return self.head(self.norm(x))


class Cache:
    """Holds the rotated keys and the values of one layer."""

    def __init__(self, capacity):
        self.k, self.v = (torch.zeros(1, capacity, HEADS_KV, HEAD_DIM) for _ in range(2))
        self.length = 0

    def append(self, k, v):
        end = self.length + k.shape[1]
        self.k[:, self.length : end], self.v[:, self.length : end] = k, v
        self.length = end
        return self.k[:, :end], self.v[:, :end]


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
    caches = [Cache(prompt.shape[1] + tokens) for _ in range(LAYERS)]
    found, read = [], prompt
    for _ in range(tokens):
        read = model(read, caches)[:, -1:].argmax(-1)
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
