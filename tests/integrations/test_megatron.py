"""Tests Megatron core's GPTModel under with_scheme. Losses and gradients equal those of the stock model, packed
sequences are separate, and unsupported calls are refused. The stock attention needs the random states and the device of
CUDA, which these tests replace by those of the CPU.
"""

import contextlib
import types

import pytest
import torch
import torch.distributed as dist
from flashrope import Rotary

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.filterwarnings("ignore")

from flashrope.integrations.megatron import with_scheme
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

HEAD_DIM, SEQLEN, VOCABULARY = 16, 24, 61


@pytest.fixture(autouse=True, scope="module")
def one_process(tmp_path_factory):
    store = f"file://{tmp_path_factory.mktemp('store')}/of_ranks"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    no_states = types.SimpleNamespace(fork=contextlib.nullcontext)
    tracker = types.SimpleNamespace(get_cuda_rng_tracker=lambda: no_states)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(dot_product_attention, "tensor_parallel", tracker)


def configuration(**options) -> TransformerConfig:
    """Returns a configuration with four query heads over two key heads."""
    defaults = {
        "num_layers": 2,
        "hidden_size": 4 * HEAD_DIM,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "attention_softmax_in_fp32": True,
        "apply_rope_fusion": False,
    }
    return TransformerConfig(**defaults | options)


def model_of(config, rotary=None, spec=None, **options):
    """Returns the stock model with its own RoPE, or our model under `rotary`."""
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec() if spec is None else spec
    if rotary is not None:
        spec = with_scheme(spec, rotary)
    options = {"position_embedding_type": "rope" if rotary is None else "none"} | options
    return GPTModel(config, spec, VOCABULARY, 128, **options)


def batch(seqlen=SEQLEN):
    ids = torch.randint(0, VOCABULARY, (2, seqlen + 1), generator=torch.Generator().manual_seed(1))
    hidden = torch.ones(1, 1, seqlen, seqlen, dtype=torch.bool).triu(1)
    return ids[:, :-1], torch.arange(seqlen).expand(2, -1), hidden, ids[:, 1:]


def loss_of(model):
    ids, positions, hidden, labels = batch()
    return model(ids, positions, hidden, labels=labels)


def check_losses_and_gradients(ours, stock):
    """Checks that losses and gradients equal those of the stock model with the same weights."""
    ours.load_state_dict(stock.state_dict())
    expected, got = loss_of(stock), loss_of(ours)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    expected.mean().backward(), got.mean().backward()
    for (name, of_stock), of_ours in zip(stock.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(of_ours.grad, of_stock.grad, atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scaled_by_layer", [False, True])
def test_losses_and_gradients_are_stocks(interleaved, scaled_by_layer):
    config = configuration(rotary_interleaved=interleaved, apply_query_key_layer_scaling=scaled_by_layer)
    stock, ours = model_of(config), model_of(config, Rotary.rope(HEAD_DIM, interleaved=interleaved))
    check_losses_and_gradients(ours, stock)


def test_the_learnable_softmax_offset_is_the_calls_sinks():
    config = configuration(softmax_type="learnable")
    stock, ours = model_of(config), model_of(config, Rotary.rope(HEAD_DIM))
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if name.endswith("softmax_offset"):
                parameter.copy_(torch.linspace(-1, 2, parameter.numel()))
    check_losses_and_gradients(ours, stock)


def test_hope_trains():
    model = model_of(configuration(), Rotary.hope(HEAD_DIM, train_length=SEQLEN))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(12):
        loss = loss_of(model).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize(
    "granularity",
    [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
)
def test_recomputation_changes_nothing(granularity, monkeypatch):
    rng = "megatron.core.tensor_parallel.random."
    for name in ("_get_all_rng_states", "_set_all_rng_states"):
        monkeypatch.setattr(rng + name, lambda *states: (), raising=False)
    rotary = Rotary.hope(HEAD_DIM, train_length=SEQLEN)
    whole, again = model_of(configuration(), rotary), model_of(configuration(**granularity), rotary)
    again.load_state_dict(whole.state_dict())
    loss_of(whole).mean().backward(), loss_of(again).mean().backward()
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def attention_of(model):
    return model.decoder.layers[0].self_attention.core_attention


def test_packed_sequences_are_sequences():
    core = attention_of(model_of(configuration(), Rotary.hope(HEAD_DIM, train_length=SEQLEN)))
    lengths = [5, 11, 1]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q, k, v = (torch.randn(sum(lengths), heads, HEAD_DIM) for heads in (4, 2, 2))
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=11, max_seqlen_kv=11)
    out = core(q, k, v, None, packed_seq_params=packed)
    assert out.shape == (sum(lengths), 4 * HEAD_DIM)
    for own in (slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)):
        alone = core(*(x[own, None] for x in (q, k, v)), None)
        torch.testing.assert_close(out[own], alone[:, 0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attention_dropout": 0.1}, "attention_dropout: expected 0, got 0.1"),
        ({"window_size": (8, 0)}, r"window_size: expected None, got \(8, 0\); for a window use Rotary.local"),
        ({"kv_channels": 32}, "rotary: expected head_dim 32, the config's kv_channels, got 16"),
    ],
)
def test_configurations_are_refused_when_the_model_is_built(options, message):
    with pytest.raises(ValueError, match=message):
        model_of(configuration(**options), Rotary.rope(HEAD_DIM))


def test_models_that_rotate_themselves_are_refused():
    model = model_of(configuration(), Rotary.rope(HEAD_DIM), position_embedding_type="rope")
    with pytest.raises(ValueError, match="position_embedding_type: expected 'none'"):
        loss_of(model)


def test_multi_latent_attention_is_refused():
    with pytest.raises(
        ValueError, match="spec: expected a layer with Megatron's SelfAttention, got .*MLASelfAttention"
    ):
        with_scheme(get_gpt_layer_local_spec(multi_latent_attention=True), Rotary.rope(HEAD_DIM))


def test_calls_are_refused_by_name():
    core = attention_of(model_of(configuration(), Rotary.rope(HEAD_DIM)))
    q, k, v = (torch.randn(4, 1, heads, HEAD_DIM) for heads in (4, 2, 2))
    with pytest.raises(ValueError, match="attention_bias: expected None, got a tensor"):
        core(q, k, v, None, attention_bias=q)
    with pytest.raises(ValueError, match="attn_mask_type: expected causal or no_mask, got padding"):
        core(q, k, v, None, attn_mask_type=AttnMaskType.padding)
    ends = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="packed_seq_params: expected the format thd, got sbhd"):
        core(q[:, 0], k[:, 0], v[:, 0], None, packed_seq_params=PackedSeqParams("sbhd", ends, ends))
    with pytest.raises(ValueError, match="packed_seq_params: offsets of padded sequences"):
        core(q[:, 0], k[:, 0], v[:, 0], None, packed_seq_params=PackedSeqParams("thd", ends, ends, ends, ends, 4, 4))
