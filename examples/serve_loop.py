"""The loop of a small inference engine with continuous batching: one ragged step a round.

Prompts are read in chunks beside running sequences, so every sequence of a step has its own number of new tokens. If
the pages run out, the youngest request gives its pages back, and starts again when there is room.

    python examples/serve_loop.py
"""

from __future__ import annotations

import torch
from flashrope import OutOfPages, PagedKVCache, Rotary


def serve(cache: PagedKVCache, requests: list[dict], model, tokens_per_step: int = 64) -> None:
    """Appends tokens to every request {"tokens": [...], "length": n} until it has n tokens. model: a function of (step,
    token ids) that attends in the step and returns the next token of every sequence."""
    waiting, running, full = list(requests), {}, False
    while waiting or running:
        while waiting and not full and cache.free_pages > len(running):
            running[cache.allocate()] = waiting.pop(0)
        chunks, room = {}, tokens_per_step
        for sequence, request in running.items():
            if room:
                chunks[sequence] = request["tokens"][cache.lengths[sequence] :][:room]
                room -= len(chunks[sequence])
        try:
            with cache.step([*chunks], [len(chunk) for chunk in chunks.values()]) as step:
                answers = model(step, torch.tensor([token for chunk in chunks.values() for token in chunk]))
        except OutOfPages as error:
            if error.never and len(running) == 1:
                raise
            sequence, request = running.popitem()
            cache.free(sequence)
            waiting.insert(0, request)
            full = True  # until a request has ended
            continue
        for sequence, answer in zip(chunks, answers.tolist(), strict=True):
            request = running[sequence]
            if cache.lengths[sequence] == len(request["tokens"]):  # the whole text has been read
                request["tokens"].append(answer)
                if len(request["tokens"]) >= request["length"]:
                    cache.free(sequence)
                    del running[sequence]
                    full = False


class OneLayer:
    """A model of one layer over 50 tokens with random weights."""

    def __init__(self, rotary: Rotary, heads: tuple[int, int], dtype: torch.dtype = torch.float32):
        self.rotary, self.sizes = rotary, (heads[0], heads[1], heads[1])
        torch.manual_seed(0)
        self.table = torch.randn(50, sum(self.sizes), rotary.head_dim).to(dtype)

    def qkv(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.table[ids].split(self.sizes, 1)

    def next_tokens(self, out: torch.Tensor) -> torch.Tensor:
        return (out.flatten(1) @ self.table[:, : self.sizes[0]].flatten(1).T).argmax(1)

    def __call__(self, step, ids: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(ids)
        out = step.attend(q, self.rotary, k, v)
        return self.next_tokens(out[step.cu_seqlens[1:].long() - 1])


if __name__ == "__main__":
    model = OneLayer(Rotary.rope(64).rectify(24), (8, 2))
    pages = PagedKVCache(pages=8, page_size=16, heads_kv=2, head_dim=64, dtype=torch.float32, device="cpu")
    texts = [{"tokens": [n, n + 1, n + 2] * 9, "length": 40} for n in range(8)]
    serve(pages, texts, model)
    for text in texts:
        print(text["tokens"][27:])
