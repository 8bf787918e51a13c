"""A configuration with ``dual_chunk_attention_config`` (Qwen2.5-1M), against a forward pass in float64 over
``attention(impl="reference")``, and the chunks against the rotary embedding that vLLM has kept."""

import logging
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; .ci/run tests it in an environment of its own")

import torch
import torch.nn.functional as F
from engine import BOUND, engine, generate
from flashrope import Rotary, attention
from models import VOCABULARY, prompt, save_model
from safetensors.torch import load_file
from vllm.v1.core import kv_cache_utils

HEADS, HEADS_KV, HEAD_DIM, LAYERS = 4, 2, 32, 3
LENGTH = 100  # of the factor
QWEN = {"chunk_size": 160, "local_size": 32, "original_max_position_embeddings": LENGTH}  # chunks of 128
ROPE = Rotary.rope(HEAD_DIM)
SCHEME = ROPE.dual_chunk(160, 32, length_scale=LENGTH)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


class Float64Model:
    """Qwen2 in float64 with keys and values of the steps so far. A step's factor by length is of the keys it has."""

    def __init__(self, folder: str, scheme: Rotary):
        self.weights = {name: x.double() for name, x in load_file(Path(folder) / "model.safetensors").items()}
        self.scheme = scheme
        self.cache = [torch.empty(2, 0, HEADS_KV, HEAD_DIM, dtype=torch.float64) for _ in range(LAYERS)]

    def step(self, tokens: list[int]) -> torch.Tensor:
        """(tokens, vocabulary): log probabilities of the token after each."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        for n in range(LAYERS):
            layer = f"model.layers.{n}"
            h = self._norm(x, f"{layer}.input_layernorm")
            q, k, v = (self._linear(h, f"{layer}.self_attn.{p}_proj").unflatten(-1, (-1, HEAD_DIM)) for p in "qkv")
            self.cache[n] = torch.cat((self.cache[n], torch.stack((k, v))), dim=1)
            out = attention(q[None], *self.cache[n][:, None], self.scheme, impl="reference")[0].flatten(-2)
            x = x + self._linear(out, f"{layer}.self_attn.o_proj")
            h, mlp = self._norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"
            gated = F.silu(self._linear(h, f"{mlp}.gate_proj")) * self._linear(h, f"{mlp}.up_proj")
            x = x + self._linear(gated, f"{mlp}.down_proj")
        return self._linear(self._norm(x, "model.norm"), "lm_head").log_softmax(-1)

    def _norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], eps=1e-6)

    def _linear(self, x, name):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


def largest_difference(folder: str, output, chunk: int = 10**6, scheme: Rotary = SCHEME) -> float:
    """Of any log probability of one output, its prompt's included; chunk: tokens of the prompt in one step."""
    model, prompt_ids, (completion,) = Float64Model(folder, scheme), output.prompt_token_ids, output.outputs
    steps = [prompt_ids[n : n + chunk] for n in range(0, len(prompt_ids), chunk)]
    expected = torch.cat([model.step(ids) for ids in [*steps, *([t] for t in completion.token_ids[:-1])]])
    entries = (output.prompt_logprobs or [])[1:]
    found = [
        abs(entry[t].logprob - expected[n, t])
        for n, (entry, t) in enumerate(zip(entries, prompt_ids[1:], strict=bool(entries)))
    ]
    for n, entry in enumerate(completion.logprobs):
        row = torch.tensor([entry[token].logprob for token in range(VOCABULARY)])
        found.append((row - expected[len(prompt_ids) - 1 + n]).abs().max())
    return float(max(found))


@pytest.fixture(scope="module")
def whole(qwen2):
    """Prompts in one step each, in one batch, that then decode. The longest passes three chunks while it decodes."""
    settings = dict(hf_overrides={"dual_chunk_attention_config": QWEN}, max_num_batched_tokens=4096)
    with engine(qwen2, None, **settings) as llm:
        return generate(llm, [prompt(n) for n in (5, 127, 129, 700)]) + generate(llm, [prompt(250)], tokens=290)


def test_whole_prompts_and_decoding(qwen2, whole):
    assert max(largest_difference(qwen2, output) for output in whole) <= BOUND
    assert len(set(whole[-1].outputs[0].token_ids)) > 30


@pytest.mark.parametrize(
    "scheme",
    [ROPE, ROPE.dual_chunk(160, 32), ROPE.dual_chunk(144, 16, LENGTH), ROPE.dual_chunk(160, 32, 128)],
    ids=["no chunks", "no factor", "another local_size", "another length"],
)
def test_the_configuration_shows(qwen2, whole, scheme):
    """Prompts within the first chunk and the length are as without the field; the others are not."""
    short, *_, long, _ = whole
    assert largest_difference(qwen2, short, scheme=scheme) <= BOUND
    assert largest_difference(qwen2, long, scheme=scheme) > 100 * BOUND


def test_chunked_prefill_and_prefix_hits(qwen2):
    """Steps of 64 tokens: the factor is that of the keys so far. Hits skip steps whose keys are the same."""
    settings = dict(hf_overrides={"dual_chunk_attention_config": QWEN}, max_num_batched_tokens=64, max_num_seqs=4)
    with engine(qwen2, None, **settings) as llm:
        (first,) = generate(llm, [prompt(450)], tokens=8)
        (hit,) = generate(llm, [prompt(450)], tokens=8, all_prompt=False)
    assert hit.num_cached_tokens == 448
    assert largest_difference(qwen2, first, chunk=64) <= BOUND < 10 * BOUND < largest_difference(qwen2, first)
    assert largest_difference(qwen2, hit, chunk=64) <= BOUND


def test_the_field_beside_it(qwen2, caplog):
    """Other options of the field are kept, false switches the chunks off, and sparse attention is named."""
    sparse = {"sparse_attention_config": [{}] * LAYERS}
    asked = (({"log_n": 64}, {}, SCHEME.log_n(64)), ({"dual_chunk": False}, sparse, ROPE))
    vllm_logger, seeds = logging.getLogger("vllm"), set()
    vllm_logger.addHandler(caplog.handler)
    try:
        for options, more, scheme in asked:
            caplog.clear()
            overrides = {"dual_chunk_attention_config": {**QWEN, **more}, "flashrope": options}
            with engine(qwen2, None, hf_overrides=overrides) as llm:
                seeds.add(kv_cache_utils.NONE_HASH)
                (output,) = generate(llm, [prompt(300)])
            del llm  # its end would end what the next engine uses
            assert largest_difference(qwen2, output, scheme=scheme) <= BOUND
            assert any("sparse_attention_config" in each.getMessage() for each in caplog.records) == bool(more)
    finally:
        vllm_logger.removeHandler(caplog.handler)
    assert len(seeds) == 2


def test_the_chunks_are_vllms(monkeypatch):
    """DualChunkRotaryEmbedding, which vLLM has kept, rotates queries for the same chunk, the one before and earlier
    ones. What its former backend made of them: one softmax over the three, over keys times the factor by length."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import dual_chunk_rope

    device = torch.device
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(dual_chunk_rope.torch, "device", lambda name: device("cpu"))
    with set_current_vllm_config(VllmConfig()):
        theirs = dual_chunk_rope.DualChunkRotaryEmbedding(
            HEAD_DIM, HEAD_DIM, 512, 10000.0, True, torch.float32, 160, 32
        )
    monkeypatch.undo()
    torch.manual_seed(0)
    n = 500
    q, k, v = torch.randn(3, n, 2, HEAD_DIM)
    positions = torch.arange(n)
    queries, keys = theirs.forward_native(positions, q.flatten(1), k.flatten(1))
    queries = queries.view(n, 5, 2, HEAD_DIM)[:, :3]  # the two others are for choosing what sparse attention sees
    keys = keys.view(n, 2, HEAD_DIM) * max(1.0, 0.1 * torch.tensor(n / LENGTH).log().item() + 1)
    scores = torch.einsum("nahd,mhd->ahnm", queries, keys) * HEAD_DIM**-0.5
    before = (positions[:, None] // 128 - positions // 128).clamp(0, 2)  # chunks between query and key
    chosen = scores.gather(0, before.expand(1, 2, n, n))[0]
    chosen = chosen.masked_fill(positions[:, None] < positions, float("-inf"))
    expected = torch.einsum("hnm,mhd->nhd", chosen.softmax(-1), v)
    ours = attention(q[None], k[None], v[None], SCHEME, impl="reference")[0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
