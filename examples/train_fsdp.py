"""Trains a language model with HoPE on one device or many: FSDP2, tensor and context parallelism, checkpoints that
resume.

    torchrun --nproc-per-node 8 examples/train_fsdp.py --text my_texts/       # GPUs (NCCL) or CPU processes (gloo)
    python examples/train_fsdp.py --preset tiny                               # one process

By default the 125M configuration of the HoPE paper (Chen et al. 2025, appendix A) over bytes instead of its 32,000
tokens: 103M parameters. The order of the data hangs on --seed alone, so a run's losses are the same, but for rounding,
on any number of devices and however they are shared out. The same command again goes on from the last checkpoint;
Ctrl-C or SIGTERM makes one. Needs the packages of the extra `demo` for the safetensors file at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flashrope import Rotary, attention
from flashrope.backends import BACKENDS
from flashrope.experiments import data
from flashrope.experiments.model import Block, LanguageModel, ModelConfig, save_checkpoint
from flashrope.experiments.train import TrainConfig, learning_rate_fraction
from flashrope.integrations.distributed import context_parallel_attention, shard_sequence

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
KEPT = 2  # checkpoints
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter, not by group: groups differ with --tp


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of one run; batch counts sequences over all devices, lengths are in bytes."""

    width: int
    layers: int
    heads: int
    mlp_width: int
    seqlen: int
    batch: int
    steps: int
    learning_rate: float
    warmup: int


PRESETS = {
    "125m": Preset(
        width=768,
        layers=12,
        heads=12,
        mlp_width=2688,
        seqlen=512,
        batch=512,
        steps=50_000,
        learning_rate=3e-4,
        warmup=2000,
    ),
    "tiny": Preset(
        width=64, layers=2, heads=4, mlp_width=96, seqlen=64, batch=8, steps=20, learning_rate=3e-3, warmup=5
    ),
}


class BadInput(ValueError):
    """An option that cannot be served; the message names it."""


class ParallelBlock(nn.Module):
    """``Block`` with q, k and v projected apart, so that tensor parallelism can share out their heads. It computes the
    same."""

    def __init__(self, block: Block):
        super().__init__()
        self.head_dim = block.head_dim
        self.attention_norm, self.out = block.attention_norm, block.out
        self.mlp_norm, self.gate, self.up, self.down = block.mlp_norm, block.gate, block.up, block.down
        width = block.qkv.in_features
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        for projection, weight in zip((self.q, self.k, self.v), block.qkv.weight.detach().chunk(3), strict=True):
            projection.weight = nn.Parameter(weight.clone())

    def forward(self, x: torch.Tensor, rotary: Rotary, attend) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (project(y).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        x = x + self.out(attend(q, k, v, rotary).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@dataclasses.dataclass(frozen=True)
class Devices:
    """Where this process stands: ranks are shared out as data x context x tensor parallelism, tensor fastest."""

    device: torch.device
    mesh: DeviceMesh  # ("fsdp", "tp"); parameters are sharded over data and context ranks together
    cp: DeviceMesh
    data_rank: int
    data_ranks: int

    @classmethod
    def of(cls, device: torch.device, cp: int = 1, tp: int = 1) -> Devices:
        world = dist.get_world_size()
        if world % (cp * tp):
            raise BadInput(f"--cp, --tp: expected {cp} * {tp} to divide the number of processes, {world}")
        mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("fsdp", "tp"))
        apart = init_device_mesh(device.type, (world // (cp * tp), cp, tp), mesh_dim_names=("dp", "cp", "tp"))
        return cls(device, mesh, apart["cp"], apart.get_local_rank("dp"), apart.size(0))

    def parallelize(self, model: LanguageModel, dtype: torch.dtype) -> LanguageModel:
        """Shards the model in place. In bfloat16 weights and optimizer state stay float32, and gradients are reduced in
        it."""
        model.blocks = nn.ModuleList(map(ParallelBlock, model.blocks))
        low = dtype == torch.bfloat16
        model.to(self.device, torch.float32 if low else dtype)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
        column = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel())
        for block in model.blocks:
            if self.mesh["tp"].size() > 1:
                parallelize_module(
                    block, self.mesh["tp"], column | {"out": RowwiseParallel(), "down": RowwiseParallel()}
                )
            fully_shard(block, mesh=self.mesh["fsdp"], mp_policy=policy)
        return fully_shard(model, mesh=self.mesh["fsdp"], mp_policy=policy)

    def attend(self, impl: str | None):
        if self.cp.size() == 1:
            return functools.partial(attention, impl=impl)
        return functools.partial(context_parallel_attention, group=self.cp, impl=impl)

    def part(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of this rank: its sequences, and of those its part."""
        mine = batch.chunk(self.data_ranks)[self.data_rank].to(self.device)
        return shard_sequence(mine[:, :-1], self.cp), shard_sequence(mine[:, 1:], self.cp)


class Windows:
    """Batches of windows at random places of a text, the same on every rank; ``state`` is all that a checkpoint
    needs."""

    def __init__(self, text: bytes, batch: int, seqlen: int, seed: int):
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._shape, self._offsets = (batch, 1), torch.arange(seqlen + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> torch.Tensor:
        """int64 (batch, seqlen + 1)."""
        starts = torch.randint(len(self._tokens) - len(self._offsets) + 1, self._shape, generator=self._generator)
        return self._tokens[starts + self._offsets].long()

    @property
    def state(self) -> torch.Tensor:
        return self._generator.get_state()

    @state.setter
    def state(self, state: torch.Tensor) -> None:
        self._generator.set_state(state)


def gradients(
    model, rotary: Rotary, attend, tokens: torch.Tensor, targets: torch.Tensor, micro_batch: int
) -> torch.Tensor:
    """Adds the gradients of the mean loss over all ranks' targets; returns the mean over this rank's. Ranks have equal
    shares, and FSDP takes the mean over them."""
    total = torch.zeros((), device=tokens.device, dtype=torch.float64)
    starts = range(0, len(tokens), micro_batch)
    for start in starts:
        model.set_requires_gradient_sync(start == starts[-1])
        rows = slice(start, start + micro_batch)
        logits = model(tokens[rows], rotary, attend).flatten(0, 1)
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        loss = F.cross_entropy(logits, targets[rows].flatten(), reduction="sum") / targets.numel()
        loss.backward()
        total += loss.detach()
    return total


def clip_gradients(model: nn.Module, most: float) -> torch.Tensor:
    """Scales all gradients to a norm of at most ``most``; the norm before. Those under tensor parallelism lie on a mesh
    of their own, and torch takes one mesh at a time."""
    meshes: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        meshes.setdefault(parameter.device_mesh, []).append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in parameters]).full_tensor() for parameters in meshes.values()]
    norm = torch.stack(norms).norm()
    for parameters in meshes.values():
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return norm


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; no decay of vectors. One group for every mesh and decay, as the fused step takes one mesh at a time."""
    groups: dict[tuple, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault((parameter.device_mesh, config.weight_decay if parameter.ndim >= 2 else 0.0), []).append(
            parameter
        )
    return torch.optim.AdamW(
        [{"params": parameters, "weight_decay": decay} for (_, decay), parameters in groups.items()],
        lr=config.learning_rate,
        betas=config.betas,
        fused=True,
    )


def train_config(args: argparse.Namespace) -> TrainConfig:
    """The paper's: AdamW with these betas, a warm-up counted in steps, gradients clipped at 1."""
    return TrainConfig(
        args.steps, args.batch, args.seqlen, args.learning_rate, warmup=args.warmup / args.steps, betas=(0.9, 0.999)
    )


class Run:
    """One training run: model, optimizer, place in the data, and the folder that all of them are kept in."""

    def __init__(self, args: argparse.Namespace, devices: Devices, windows: Windows, settings: dict):
        torch.manual_seed(args.seed)  # the same weights on every rank, whatever the number of ranks
        sizes = ModelConfig(args.width, args.layers, args.heads, args.mlp_width)
        self.rotary = Rotary.hope(sizes.head_dim, args.seqlen) if args.scheme == "hope" else Rotary.rope(sizes.head_dim)
        self.model = devices.parallelize(LanguageModel(sizes), DTYPES[args.dtype])
        self.config = train_config(args)
        self.optimizer = make_optimizer(self.model, self.config)
        self.args, self.devices, self.windows, self.settings = args, devices, windows, settings
        self.attend, self.step, self.folder = devices.attend(args.impl), 0, Path(args.out)

    def train_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean loss over this rank's targets, norm of the gradient)"""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * learning_rate_fraction(self.step, self.config)
        loss = gradients(
            self.model, self.rotary, self.attend, *self.devices.part(self.windows.next()), self.args.micro_batch
        )
        norm = clip_gradients(self.model, self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss, norm

    def checkpoints(self) -> list[Path]:
        """The whole ones, oldest first: .metadata is written last."""
        return sorted(path.parent for path in self.folder.glob("step-*/.metadata"))

    def save(self) -> None:
        dcp.save(self._state(), checkpoint_id=self.folder / f"step-{self.step:08d}")
        if dist.get_rank() == 0:
            for old in self.checkpoints()[:-KEPT]:
                shutil.rmtree(old)

    def resume(self) -> None:
        """Goes on from the newest checkpoint, if there is one. The numbers of ranks may have changed since."""
        found = self.checkpoints()
        if not found:
            return
        state = {"settings": "", "step": 0}
        dcp.load(state, checkpoint_id=found[-1])
        made_with, step = json.loads(state["settings"]), state["step"]
        differing = [
            f"{name} {value!r} (now {self.settings[name]!r})"
            for name, value in made_with.items()
            if value != self.settings[name]
        ]
        if differing:
            raise BadInput(
                f"--out: {found[-1]} was made with {', '.join(differing)}; choose another folder or the same settings"
            )
        state = self._state()
        dcp.load(state, checkpoint_id=found[-1])
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=FLAT)
        self.windows.state, self.step = state["windows"], step

    def _state(self) -> dict:
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": optimizer,
            "windows": self.windows.state,
            "step": self.step,
            "settings": json.dumps(self.settings),
        }

    def export(self, path: Path) -> None:
        """The model as one safetensors file, which `flashrope generate --model` reads."""
        whole = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            for i in range(self.args.layers):
                qkv = [whole.pop(f"blocks.{i}.{name}.weight") for name in "qkv"]
                whole[f"blocks.{i}.qkv.weight"] = torch.cat(qkv)
            model = LanguageModel(self.model.config)
            model.load_state_dict(whole)
            save_checkpoint(path, model, self.rotary, self.args.seqlen)


class Stop:
    """Ctrl-C and SIGTERM, which need not reach every rank: all of them hear of it between two steps. torchrun sends a
    second signal after the first, so none ends the process at once; it kills after 30 s."""

    def __init__(self):
        self._heard = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)

    def _hear(self, number: int, _) -> None:
        self._heard = number

    def agreed(self) -> int:
        """The signal that any rank heard, or 0."""
        heard = torch.tensor(self._heard)
        dist.all_reduce(heard, dist.ReduceOp.MAX)  # on the CPU, over gloo: waits for no GPU
        return int(heard)


class Log:
    """Loss and speed, to the terminal and as JSON lines to log.jsonl; only rank 0 writes."""

    def __init__(self, run: Run, every: int):
        self._run, self._every, self._path = run, every, run.folder / "log.jsonl"
        self._since, self._at, self._tokens = run.step, time.perf_counter(), run.args.batch * run.args.seqlen
        if dist.get_rank() == 0:
            run.folder.mkdir(parents=True, exist_ok=True)
            lines = self._path.read_text().splitlines() if self._path.exists() else []
            kept = [
                line for line in lines if json.loads(line)["step"] <= run.step
            ]  # not what is about to be done again
            self._path.write_text("".join(f"{line}\n" for line in kept))

    def __call__(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        run, step = self._run, self._run.step
        if step % self._every and step != run.config.steps and step != 1:
            return
        dist.all_reduce(loss)
        loss, norm = loss.item() / dist.get_world_size(), norm.item()
        if not math.isfinite(loss):
            raise RuntimeError(
                f"training diverged: the loss is {loss} at step {step}; a lower --learning-rate may help"
            )
        now = time.perf_counter()
        speed = self._tokens * (step - self._since) / (now - self._at)
        self._since, self._at = step, now
        if dist.get_rank() == 0:
            print(
                f"step {step} of {run.config.steps}, loss {loss:.4f}, gradient norm {norm:.3f}, {speed:,.0f} tokens/s",
                flush=True,
            )
            with self._path.open("a") as file:
                file.write(
                    json.dumps({"step": step, "loss": loss, "grad_norm": norm, "tokens_per_second": round(speed)})
                    + "\n"
                )


def train(args: argparse.Namespace, device: torch.device) -> int:
    devices = Devices.of(device, args.cp, args.tp)
    check(args, devices.data_ranks)
    corpus = data.from_path(args.text, args.seqlen + 1) if args.text else data.standard_library(args.seqlen + 1)
    names = [*(field.name for field in dataclasses.fields(Preset)), "seed", "scheme", "dtype"]
    settings = {name: getattr(args, name) for name in names} | {"text": corpus.record()["train"]["sha256"]}
    run = Run(args, devices, Windows(corpus.train, args.batch, args.seqlen, args.seed), settings)
    run.resume()
    if dist.get_rank() == 0:
        count = sum(p.numel() for p in run.model.parameters())
        print(
            f"{count / 1e6:.1f}M parameters, {args.scheme}, {corpus.name}: {len(corpus.train):,} bytes; "
            f"{devices.data_ranks} x {args.cp} x {args.tp} processes (data x context x tensor) on {device.type}, {args.dtype}; "
            f"step {run.step} of {args.steps}",
            flush=True,
        )
    log, stop, signalled = Log(run, args.log_every), Stop(), 0
    while run.step < args.steps and not signalled:
        log(*run.train_step())
        signalled = stop.agreed()
        if signalled or run.step == args.steps or run.step % args.save_every == 0:
            run.save()
    if signalled and run.step < args.steps:
        if dist.get_rank() == 0:
            print(
                f"stopped by {signal.Signals(signalled).name} after step {run.step}; the same command goes on from there",
                flush=True,
            )
        return 128 + signalled
    run.export(run.folder / "model.safetensors")
    return 0


def check(args: argparse.Namespace, data_ranks: int) -> None:
    if importlib.util.find_spec("safetensors") is None:  # said now, not after the last step
        raise BadInput("safetensors: expected it to be installed; pip install 'flashrope[demo]' brings it")
    if args.batch % data_ranks:
        raise BadInput(f"--batch: expected a multiple of the {data_ranks} ranks that share it out, got {args.batch}")
    if args.cp > 1 and args.seqlen % (2 * args.cp):
        raise BadInput(f"--seqlen: expected a multiple of 2 * --cp = {2 * args.cp}, got {args.seqlen}")
    if args.heads % args.tp or args.mlp_width % args.tp:
        raise BadInput(f"--tp: expected to divide heads = {args.heads} and mlp_width = {args.mlp_width}, got {args.tp}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    positive = functools.partial(_least, 1)
    parser.add_argument(
        "--text", metavar="PATH", help="a file or folder to train on instead of Python's standard library"
    )
    parser.add_argument(
        "--out", metavar="DIR", default="runs/fsdp", help="checkpoints, log.jsonl and model.safetensors"
    )
    parser.add_argument("--preset", choices=PRESETS, default="125m")
    parser.add_argument("--scheme", choices=("hope", "rope"), default="hope")
    parser.add_argument("--tp", type=positive, default=1, help="tensor parallelism: ranks that share out the heads")
    parser.add_argument("--cp", type=positive, default=1, help="context parallelism: ranks that share out a sequence")
    parser.add_argument("--micro-batch", type=positive, default=64, help="sequences that a rank reads at once")
    parser.add_argument(
        "--save-every", type=positive, default=1000, help="steps between checkpoints; the newest two are kept"
    )
    parser.add_argument("--log-every", type=positive, default=10)
    parser.add_argument("--seed", type=functools.partial(_least, 0), default=0, help="of the weights and the batches")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=DTYPES, help="by default bfloat16 on a GPU and float32 on the CPU")
    parser.add_argument(
        "--impl", choices=BACKENDS, help="the attention implementation; by default the one for the device"
    )
    sizes = parser.add_argument_group("sizes (by default the preset's)")
    for field in dataclasses.fields(Preset):
        sizes.add_argument(
            "--" + field.name.replace("_", "-"),
            type=float if field.name == "learning_rate" else positive,
            help=", ".join(f"{name} {getattr(preset, field.name):g}" for name, preset in PRESETS.items()),
        )
    args = parser.parse_args(arguments)
    for field in dataclasses.fields(Preset):
        if getattr(args, field.name) is None:
            setattr(args, field.name, getattr(PRESETS[args.preset], field.name))
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    return args


def _least(least: int, text: str) -> int:
    if int(text) < least:
        raise ValueError
    return int(text)


def main() -> int:
    args = parse()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(args.device, local if args.device == "cuda" else None)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # without torchrun
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo", **alone)
    try:
        return train(args, device)
    except (BadInput, data.TextError) as error:
        if dist.get_rank() == 0:
            print(f"train_fsdp: error: {error}", file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
