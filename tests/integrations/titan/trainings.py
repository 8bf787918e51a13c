"""Makes torchtitan 0.3.0 run on the CPU, and runs short trainings with it. torchtitan itself does not support the CPU.
torchtitan looks for an accelerator when it is imported, so call ``start`` first. torchtitan's own attention,
FlexAttention, has no backward on the CPU. scaled_dot_product_attention replaces it here, with the mask that
FlexAttention would get.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import re
import tempfile
import zlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

OVERRIDE = "flashrope.integrations.torchtitan.attention"
SAVE = "flashrope.integrations.torchtitan.save_attention"
WRAPPED = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")  # wrappers add this to the names of parameters
SEQLEN, BATCH = 32, 2


class _CPU:
    """Extends torch.cpu by the functions of an accelerator that torchtitan calls."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    get_device_name = staticmethod(lambda device=None: "cpu")
    get_device_properties = staticmethod(lambda device=None: SimpleNamespace(total_memory=1 << 30))
    memory_stats = staticmethod(lambda device=None: {})
    reset_peak_memory_stats = empty_cache = staticmethod(lambda: None)


FLOAT64 = {"dtype": "float64", "mixed_precision_param": "float64", "mixed_precision_reduce": "float64"}
SHARPEN = 12.0  # without this factor attention is nearly uniform, which would hide a wrong rotation


@contextlib.contextmanager
def all_in_float64():
    """Makes torchtitan compute tables, rotations and losses in float64. Without this it uses float32 for models of
    every type."""
    single = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.Tensor.float = single


@functools.cache
def start() -> None:
    """Joins the process group, or makes a group that has only this process. Call this before torchtitan is imported."""
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        path = tempfile.mkdtemp(prefix="flashrope-titan-")
        dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", 1), rank=0, world_size=1)
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does when it makes the group
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", _CPU()
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.components.tokenizer import HuggingFaceTokenizer  # noqa: F401
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.common import attention

    attention.FlexAttention._compiled_flex_attn = staticmethod(_flex_attention)
    attention._compiled_create_block_mask = create_block_mask
    TORCH_DTYPE_MAP["float64"] = torch.float64
    DATASETS["words"] = DatasetConfig(path="", loader=_words, sample_processor=lambda sample: sample["text"])


def _flex_attention(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
    from torch.nn.attention.flex_attention import create_mask

    assert score_mod is None and not return_aux.lse
    mask = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return out, None


def _words(path: str):
    """Returns documents of 2 to 7 words, so that rows of 32 tokens hold several documents."""
    from datasets import Dataset

    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefgh") for _ in range(draw.randint(1, 4))) for _ in range(12)]
    return Dataset.from_dict({"text": [" ".join(draw.choices(words, k=draw.randint(2, 7))) for _ in range(200)]})


def write_tokenizer(folder) -> None:
    """Writes a tokenizer of bytes, <s> and </s>."""
    import tokenizers
    import transformers

    pieces = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({piece: n for n, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


@functools.cache
def _tokenizer() -> str:
    folder = tempfile.mkdtemp(prefix="flashrope-titan-")
    write_tokenizer(folder)
    return folder


def settings(family: str = "llama3", given: dict | None = None, layers: int = 2, *, seqlen: int = SEQLEN, **fields):
    """Returns a Trainer.Config of a debug model with fewer layers.

    given: the options of the override. None: no override, torchtitan's own attention. fields: fields to replace in
    parts of the configuration, such as parallelism={"tensor_parallel_degree": 2}.
    """
    start()
    from importlib import import_module

    registry = import_module(f"torchtitan.models.{family}.config_registry")
    config = getattr(registry, f"{family}_debugmodel")()
    model = config.model_spec.model
    model.layers = model.layers[:layers]
    config.hf_assets_path = _tokenizer()
    config.dataloader.dataset = "words"
    config.activation_checkpoint = None
    config.training = dataclasses.replace(
        config.training, seq_len=seqlen, local_batch_size=BATCH, steps=20, mixed_precision_param="float32"
    )
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 2, None
    config.debug.seed = 1
    config.debug.enable_structured_logging = False
    config.validator.enable = False
    config.override.imports = [] if given is None else [(OVERRIDE, given)]
    for name, values in fields.items():
        part = getattr(config, name)
        setattr(config, name, dataclasses.replace(part, **values) if isinstance(values, dict) else values)
    return config


def trainer(config):
    from torchtitan.trainer import Trainer

    with tempfile.TemporaryDirectory(prefix="flashrope-titan-") as folder:
        config.dump_folder = config.dump_folder if config.checkpoint.enable else folder
        run = Trainer(config)
    _draw_weights(run)
    return run


@torch.no_grad()
def _draw_weights(run) -> None:
    """Draws weights that are the same for every type and layout. torchtitan itself draws other weights for each of
    them."""
    for name, parameter in run.model_parts[0].named_parameters():
        name = WRAPPED.sub("", name)
        draw = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        width = 0.02 * (SHARPEN if "wqkv" in name else 1)
        draw = (1 + 0.1 * draw if draw.ndim == 1 else draw * width).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            draw = distribute_tensor(draw, parameter.device_mesh, parameter.placements)
        parameter.copy_(draw)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def first_step(config) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns the loss over all ranks and the gradients, both of the first batch."""
    with all_in_float64() if config.training.dtype == "float64" else contextlib.nullcontext():
        run = trainer(config)
        loss = _loss(run, iter(run.dataloader))
    return loss, {WRAPPED.sub("", name): whole(p.grad) for name, p in run.model_parts[0].named_parameters()}


def _loss(run, batches) -> float:
    inputs, labels = next(batches)
    count = (labels != -100).sum()
    mesh = run.parallel_dims.get_optional_mesh("loss")
    if mesh is not None:
        dist.all_reduce(count, group=mesh.get_group())
    loss = run.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=count)
    loss = whole(loss)
    if mesh is not None:
        dist.all_reduce(loss, group=mesh.get_group())
    return float(loss)


def losses(config, steps: int) -> list[float]:
    """Returns the losses that torchtitan's own ``train_step`` reports, one per step."""
    with all_in_float64() if config.training.dtype == "float64" else contextlib.nullcontext():
        return steps_of(trainer(config), steps)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def steps_of(run, steps: int, batches=None) -> list[float]:
    """Runs training steps and returns their losses. batches: pairs of inputs and labels. None: the run's own
    batches."""
    found = []
    run.metrics_processor.log = lambda step, loss, *args, **kwargs: found.append(loss)
    run.metrics_processor.should_log = lambda step: True
    batches = batches or run.batch_generator(run.dataloader)
    for _ in range(steps):
        run.step += 1
        run.train_step(batches)
    return found


def states(run) -> dict[str, torch.Tensor]:
    return {name: whole(value) for name, value in run.model_parts[0].state_dict().items()}


def first_on_rank(family: str, given: dict | None, fields: dict) -> tuple[float, dict[str, torch.Tensor]]:
    """Runs ``first_step`` in the processes of ``ranks.Ranks``, after starting torchtitan there."""
    return first_step(settings(family, given, 1, **fields))
