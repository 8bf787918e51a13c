"""Tests that examples/train_fsdp.py and torchtitan with the override give the same losses from the same weights and
batches."""

import pytest
import torch
import trainings
from torch.distributed.tensor import DTensor, distribute_tensor

STEPS = 50


def in_torchtitan(names, scheme):
    """Returns a torchtitan Trainer with the sizes of the example's preset. names: the arguments of the example."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.models.common import CosSinRoPE
    from torchtitan.models.llama3 import _build_llama3_layers

    config = trainings.settings("llama3", {"scheme": scheme}, seqlen=names.seqlen, training=trainings.FLOAT64)
    model = config.model_spec.model
    eps = torch.finfo(torch.float64).eps  # default of torch.nn.RMSNorm
    model.dim, model.vocab_size, model.enable_weight_tying = names.width, 256, True
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = 256, names.width
    model.lm_head.out_features, model.lm_head.in_features = 256, names.width
    model.norm.normalized_shape = names.width
    model.layers = _build_llama3_layers(
        n_layers=names.layers,
        dim=names.width,
        n_heads=names.heads,
        hidden_dim=names.mlp_width,
        rope=CosSinRoPE.Config(dim=names.width // names.heads, max_seq_len=4096),
        fuse_qkv=False,
        attn_backend="varlen",
    )
    for norm in [model.norm, *(each for layer in model.layers for each in (layer.attention_norm, layer.ffn_norm))]:
        norm.eps = eps
    config.training.local_batch_size = names.batch
    config.loss = CrossEntropyLoss.Config(global_vocab_size=256)
    config.optimizer = OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=pattern,
                optimizer_name="AdamW",
                optimizer_kwargs={"lr": names.learning_rate, "betas": (0.9, 0.999), "weight_decay": decay},
            )
            for pattern, decay in ((r".*norm.*", 0.0), (r".*", 0.1))
        ]
    )
    return trainings.trainer(config)


def weights_of(model) -> dict[str, torch.Tensor]:
    """Returns the example's weights under torchtitan's names."""
    parts = {
        "attention_norm": "attention_norm",
        "mlp_norm": "ffn_norm",
        "q": "attention.qkv_linear.wq",
        "k": "attention.qkv_linear.wk",
        "v": "attention.qkv_linear.wv",
        "out": "attention.wo",
        "gate": "feed_forward.w1",
        "up": "feed_forward.w3",
        "down": "feed_forward.w2",
    }
    found = {}
    for name, value in model.named_parameters():
        if name.startswith("blocks."):
            _, layer, part, _ = name.split(".")
            name = f"layers.{layer}.{parts[part]}.weight"
        found["lm_head.weight" if name == "embedding.weight" else name] = trainings.whole(value)
    return found


@torch.no_grad()
def give(model, weights) -> None:
    for name, parameter in model.named_parameters():
        value = weights.pop("lm_head.weight" if name == "tok_embeddings.weight" else name)
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        parameter.copy_(value)
    assert not weights


@pytest.mark.parametrize("scheme, name", [("hope", "hope"), ("rope", "stock")])
def test_fifty_steps(tmp_path, scheme, name):
    from test_train_fsdp import example, make_run

    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + i) for i in torch.randint(26, (20_000,), generator=trainings.seeded(0))))
    arguments = ["--text", str(path), "--scheme", scheme, "--steps", str(STEPS)]
    ours = make_run(arguments, tmp_path / "ours")
    batches = make_run(arguments, tmp_path / "batches").windows
    with trainings.all_in_float64():
        run = in_torchtitan(ours.args, name)
        give(run.model_parts[0], weights_of(ours.model))
        run.lr_schedulers.step = lambda: None
        for step in range(STEPS):
            loss, _ = ours.train_step()
            for optimizer in run.optimizers.optimizers:
                for group in optimizer.param_groups:
                    fraction = example().learning_rate_fraction(step, ours.args.warmup, STEPS)
                    group["lr"] = ours.args.learning_rate * fraction
            inputs, targets = (each.contiguous() for each in ours.devices.part(batches.next()))
            positions = torch.arange(inputs.shape[1]).expand_as(inputs)
            (got,) = trainings.steps_of(run, 1, iter([({"input": inputs, "positions": positions}, targets)]))
            assert got == pytest.approx(float(loss), rel=1e-9), step
    trained = weights_of(ours.model)
    for key, parameter in run.model_parts[0].named_parameters():
        want = trained["lm_head.weight" if key == "tok_embeddings.weight" else key]
        torch.testing.assert_close(trainings.whole(parameter), want, rtol=1e-9, atol=1e-9, msg=key)
