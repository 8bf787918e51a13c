"""Trains a language model with HoPE on one or more devices: FSDP2, tensor and context parallelism, and checkpoints to
resume from. This file is self-contained: copy it and change it.

    torchrun --nproc-per-node 8 train_fsdp.py --text my_texts/       # GPUs (NCCL) or CPU processes (gloo)
    python train_fsdp.py --preset tiny                               # one process

The default is the 125M configuration of the HoPE paper (Chen et al. 2025, appendix A) over bytes instead of its 32,000
tokens: 103M parameters. The order of the data depends only on --seed, so the losses of a run are the same up to
rounding on any number of devices and in any layout. Running the same command again resumes from the last checkpoint.
Ctrl-C and SIGTERM write a checkpoint. The script needs flashrope and safetensors.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from flashrope import Rotary, attention
from flashrope.integrations.distributed import context_parallel_attention, shard_sequence
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

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
IMPLS = ("triton", "cuda", "cpu", "reference")
MAX_CHECKPOINTS = 2  # older checkpoints are deleted
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.999), 0.1, 1.0  # AdamW's betas and decay, gradient-norm clip: as in the paper
FINAL_FRACTION = 0.05  # learning rate at the last step, as a fraction of the peak
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # keys by parameter, not by group: groups differ with --tp


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of one run. ``batch`` is the number of sequences over all devices. ``seqlen`` is in bytes."""

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
    "125m": Preset(768, 12, 12, 2688, seqlen=512, batch=512, steps=50_000, learning_rate=3e-4, warmup=2000),
    "tiny": Preset(64, 2, 4, 96, seqlen=64, batch=8, steps=20, learning_rate=3e-3, warmup=5),
}


class BadInput(ValueError):
    """Raised for an option with a value that cannot be used. The message names the option."""


class Block(nn.Module):
    """Attention and a SwiGLU MLP, each after an RMSNorm. q, k and v have separate projections, so that tensor
    parallelism can split them by heads."""

    def __init__(self, width: int, heads: int, mlp_width: int):
        super().__init__()
        self.head_dim = width // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, mlp_width, bias=False) for _ in range(2))
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x: torch.Tensor, rotary: Rotary, attend) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (project(y).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        x = x + self.out(attend(q, k, v, rotary).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    """A decoder over bytes, without biases. The output projection is tied to the embedding."""

    def __init__(self, width: int, layers: int, heads: int, mlp_width: int):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads, mlp_width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        for block in self.blocks:  # so that the residual stream's variance does not grow with depth
            for layer in (block.out, block.down):
                nn.init.normal_(layer.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, tokens: torch.Tensor, rotary: Rotary, attend=attention) -> torch.Tensor:
        """Returns the logits (batch, seqlen, 256) of tokens, int64 (batch, seqlen)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotary, attend)
        return F.linear(self.norm(x), self.embedding.weight)


@dataclasses.dataclass(frozen=True)
class Devices:
    """The place of this process among all ranks. The ranks are arranged as data x context x tensor parallelism, and the
    tensor rank varies fastest."""

    device: torch.device
    mesh: DeviceMesh  # ("fsdp", "tp"); fsdp is data and context ranks together
    cp: DeviceMesh
    data_rank: int
    data_ranks: int

    @classmethod
    def of(cls, device: torch.device, cp: int = 1, tp: int = 1) -> Devices:
        world = dist.get_world_size()
        if world % (cp * tp):
            raise BadInput(f"--cp, --tp: expected {cp} * {tp} to divide the number of processes, {world}")
        mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("fsdp", "tp"))
        by_kind = init_device_mesh(device.type, (world // (cp * tp), cp, tp), mesh_dim_names=("dp", "cp", "tp"))
        return cls(device, mesh, by_kind["cp"], by_kind.get_local_rank("dp"), by_kind.size(0))

    def parallelize(self, model: LanguageModel, dtype: torch.dtype) -> LanguageModel:
        """Shards the model in place. With bfloat16, the weights, the optimizer state and the reduction of gradients
        stay in float32."""
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
        """Returns this rank's inputs and targets: its part of every sequence that its context group shares."""
        mine = batch.chunk(self.data_ranks)[self.data_rank].to(self.device)
        return shard_sequence(mine[:, :-1], self.cp), shard_sequence(mine[:, 1:], self.cp)


class Windows:
    """Batches of windows at random places of the text, the same on every rank. ``state`` is what a checkpoint
    stores."""

    def __init__(self, text: bytes, batch: int, seqlen: int, seed: int):
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._shape, self._offsets = (batch, 1), torch.arange(seqlen + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> torch.Tensor:
        """Returns int64 (batch, seqlen + 1)."""
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
    """Accumulates the gradients of the mean loss over all targets. Returns the mean loss of this rank. All ranks have
    the same number of targets, and FSDP averages the gradients over ranks."""
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


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scales all gradients to a norm of at most ``max_norm``. Returns the norm before scaling. Parameters under tensor
    parallelism are on a different mesh, and torch handles one mesh at a time."""
    meshes: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        meshes.setdefault(parameter.device_mesh, []).append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in parameters]).full_tensor() for parameters in meshes.values()]
    norm = torch.stack(norms).norm()
    for parameters in meshes.values():
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Returns AdamW, without weight decay for vectors. Parameters on different meshes are in different groups, because
    the fused step handles one mesh at a time."""
    groups: dict[tuple, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        decay = WEIGHT_DECAY if parameter.ndim >= 2 else 0.0
        groups.setdefault((parameter.device_mesh, decay), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": parameters, "weight_decay": decay} for (_, decay), parameters in groups.items()],
        lr=learning_rate,
        betas=BETAS,
        fused=True,
    )


def learning_rate_fraction(step: int, warmup: int, steps: int) -> float:
    """Returns the fraction of the peak learning rate at ``step``, counted from 0: linear warm-up, then cosine decay."""
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + math.cos(math.pi * done))


class Run:
    """One training run: model, optimizer, position in the data, and the folder of its checkpoints."""

    def __init__(self, args: argparse.Namespace, devices: Devices, windows: Windows, settings: dict):
        torch.manual_seed(args.seed)  # the same weights for any number of ranks
        head_dim = args.width // args.heads
        self.rotary = Rotary.hope(head_dim, args.seqlen) if args.scheme == "hope" else Rotary.rope(head_dim)
        model = LanguageModel(args.width, args.layers, args.heads, args.mlp_width)
        self.model = devices.parallelize(model, DTYPES[args.dtype])
        self.optimizer = make_optimizer(self.model, args.learning_rate)
        self.args, self.devices, self.windows, self.settings = args, devices, windows, settings
        self.attend, self.step, self.folder = devices.attend(args.impl), 0, Path(args.out)

    def train_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (mean loss over this rank's targets, norm of the gradient)"""
        fraction = learning_rate_fraction(self.step, self.args.warmup, self.args.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.learning_rate * fraction
        loss = gradients(
            self.model, self.rotary, self.attend, *self.devices.part(self.windows.next()), self.args.micro_batch
        )
        norm = clip_gradients(self.model, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss, norm

    def checkpoints(self) -> list[Path]:
        """Returns the complete checkpoints, oldest first. A checkpoint with .metadata is complete, because this file is
        written last."""
        return sorted(path.parent for path in self.folder.glob("step-*/.metadata"))

    def save(self) -> None:
        dcp.save(self._state(), checkpoint_id=self.folder / f"step-{self.step:08d}")
        if dist.get_rank() == 0:
            for old in self.checkpoints()[:-MAX_CHECKPOINTS]:
                shutil.rmtree(old)

    def resume(self) -> None:
        """Resumes from the newest checkpoint, if there is one. The layout of the ranks may have changed."""
        found = self.checkpoints()
        if not found:
            return
        state = {"settings": "", "step": 0}
        dcp.load(state, checkpoint_id=found[-1])
        saved, step = json.loads(state["settings"]), state["step"]
        differences = [
            f"{name} {value!r} (now {self.settings[name]!r})"
            for name, value in saved.items()
            if value != self.settings[name]
        ]
        if differences:
            raise BadInput(
                f"--out: {found[-1]} was made with {', '.join(differences)}; choose another folder or the same settings"
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
        """Writes the model as one safetensors file, in the format that `flashrope generate --model` reads."""
        from safetensors.torch import save_file

        weights = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            for i in range(self.args.layers):
                qkv = [weights.pop(f"blocks.{i}.{name}.weight") for name in "qkv"]
                weights[f"blocks.{i}.qkv.weight"] = torch.cat(qkv)
            config = {name: getattr(self.args, name) for name in ("width", "layers", "heads", "mlp_width")}
            metadata = {
                "config": json.dumps(config),
                "rotary": self.rotary.text,
                "train_length": str(self.args.seqlen),
            }
            weights = {name: weight.float().contiguous() for name, weight in weights.items()}
            save_file(weights, path, metadata=metadata)


class Stop:
    """Handles Ctrl-C and SIGTERM. A signal may not reach every rank, so all ranks agree between two steps whether to
    stop. torchrun sends the signal more than once, so a repeated signal does not end the process. torchrun kills a
    process that still runs after 30 s."""

    def __init__(self):
        self._received = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _) -> None:
        self._received = number

    def agreed(self) -> int:
        """Returns the signal that any rank received, or 0."""
        received = torch.tensor(self._received)
        dist.all_reduce(received, dist.ReduceOp.MAX)  # on the CPU, over gloo: does not synchronize the GPU
        return int(received)


class Log:
    """Writes loss and speed to the terminal and, as JSON lines, to log.jsonl. Only rank 0 writes."""

    def __init__(self, run: Run, every: int):
        self._run, self._every, self._path = run, every, run.folder / "log.jsonl"
        self._since, self._at, self._tokens = run.step, time.perf_counter(), run.args.batch * run.args.seqlen
        if dist.get_rank() == 0:
            run.folder.mkdir(parents=True, exist_ok=True)
            lines = self._path.read_text().splitlines() if self._path.exists() else []
            done = [line for line in lines if json.loads(line)["step"] <= run.step]  # later steps are run again
            self._path.write_text("".join(f"{line}\n" for line in done))

    def __call__(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        run, step = self._run, self._run.step
        if step % self._every and step != run.args.steps and step != 1:
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
                f"step {step} of {run.args.steps}, loss {loss:.4f}, gradient norm {norm:.3f}, {speed:,.0f} tokens/s",
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
    name, text = read_text(args.text, args.seqlen)
    names = [*(field.name for field in dataclasses.fields(Preset)), "seed", "scheme", "dtype"]
    settings = {name: getattr(args, name) for name in names} | {"text": hashlib.sha256(text).hexdigest()}
    run = Run(args, devices, Windows(text, args.batch, args.seqlen, args.seed), settings)
    run.resume()
    if dist.get_rank() == 0:
        count = sum(p.numel() for p in run.model.parameters())
        print(
            f"{count / 1e6:.1f}M parameters, {args.scheme}, {name}: {len(text):,} bytes; "
            f"{devices.data_ranks} x {args.cp} x {args.tp} processes (data x context x tensor) on {device.type}, "
            f"{args.dtype}; step {run.step} of {args.steps}",
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
            name = signal.Signals(signalled).name
            print(f"stopped by {name} after step {run.step}; the same command resumes from there", flush=True)
        return 128 + signalled
    run.export(run.folder / "model.safetensors")
    return 0


def read_text(path: str | None, seqlen: int) -> tuple[str, bytes]:
    """Returns (name, bytes) of a file, of all text files of a folder, or of Python's standard library. Raises
    BadInput."""
    root = Path(path or sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise BadInput(f"--text: {root}: no such file or folder")
    pattern = "*" if path else "*.py"
    found = [root] if root.is_file() else sorted(p for p in root.rglob(pattern) if p.is_file())
    if not path:
        found = [p for p in found if "site-packages" not in p.parts]
    texts = [content for content in (p.read_bytes() for p in found) if b"\0" not in content]
    text = b"\0".join(texts)
    if len(text) <= seqlen:
        raise BadInput(f"--text: {root}: expected more than --seqlen = {seqlen} bytes of text, got {len(text)}")
    return path or "Python's standard library", text


def check(args: argparse.Namespace, data_ranks: int) -> None:
    """Raises BadInput for options that do not fit together."""
    if importlib.util.find_spec("safetensors") is None:  # raised here, not after the last step
        raise BadInput("safetensors: needed for the file at the end; pip install safetensors")
    if args.width % args.heads or (args.width // args.heads) % 8:
        raise BadInput(f"--width: expected --heads = {args.heads} times a multiple of 8, got {args.width}")
    if args.batch % data_ranks:
        raise BadInput(f"--batch: expected a multiple of the {data_ranks} ranks that share it, got {args.batch}")
    if args.cp > 1 and args.seqlen % (2 * args.cp):
        raise BadInput(f"--seqlen: expected a multiple of 2 * --cp = {2 * args.cp}, got {args.seqlen}")
    if args.heads % args.tp or args.mlp_width % args.tp:
        raise BadInput(f"--tp: expected to divide heads = {args.heads} and mlp_width = {args.mlp_width}, got {args.tp}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    positive = functools.partial(_at_least, 1)
    parser.add_argument(
        "--text", metavar="PATH", help="a file or folder to train on instead of Python's standard library"
    )
    parser.add_argument(
        "--out", metavar="DIR", default="runs/fsdp", help="checkpoints, log.jsonl and model.safetensors"
    )
    parser.add_argument("--preset", choices=PRESETS, default="125m")
    parser.add_argument("--scheme", choices=("hope", "rope"), default="hope")
    parser.add_argument("--tp", type=positive, default=1, help="tensor parallelism: ranks that share the heads")
    parser.add_argument("--cp", type=positive, default=1, help="context parallelism: ranks that share a sequence")
    parser.add_argument("--micro-batch", type=positive, default=64, help="sequences per forward pass and rank")
    parser.add_argument(
        "--save-every", type=positive, default=1000, help="steps between checkpoints; the newest two are kept"
    )
    parser.add_argument("--log-every", type=positive, default=10)
    parser.add_argument("--seed", type=functools.partial(_at_least, 0), default=0, help="seed for weights and batches")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="computation type; default: bfloat16 on a GPU, float32 on a CPU"
    )
    parser.add_argument("--impl", choices=IMPLS, help="attention backend; default: the one for the device")
    sizes = parser.add_argument_group("sizes (default: those of the preset)")
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


def _at_least(minimum: int, text: str) -> int:
    if int(text) < minimum:
        raise ValueError
    return int(text)


def main() -> int:
    args = parse()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(args.device, local if args.device == "cuda" else None)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    single = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # not torchrun
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo", **single)
    try:
        return train(args, device)
    except BadInput as error:
        if dist.get_rank() == 0:
            print(f"train_fsdp: error: {error}", file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
