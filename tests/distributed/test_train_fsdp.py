"""Tests examples/train_fsdp.py: every layout gives the results of one device, and an interrupted run resumes with the
same result."""

import ast
import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from flashrope import Rotary
from flashrope.lab.small_models.model import LanguageModel, ModelConfig, load_checkpoint
from ranks import on_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_fsdp.py"
TINY = ["--preset", "tiny", "--device", "cpu", "--dtype", "float64", "--log-every", "1"]
TINY += ["--width", "32", "--mlp-width", "48"]
# The relative bound in float64. Only the order of sums over ranks differs. The largest error seen was 2e-14, in a
# gradient.
ROUNDING = 1e-12


@functools.cache
def example():
    spec = importlib.util.spec_from_file_location("train_fsdp", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_fsdp"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    generator = torch.Generator().manual_seed(0)
    path.write_text("".join(chr(97 + i) for i in torch.randint(26, (20_000,), generator=generator)))
    return str(path)


def close(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    error = (got - want).abs().max() / want.abs().max()
    assert error <= ROUNDING, f"{name}: off by {error:.3g} of its largest element"


def make_run(arguments, out):
    fsdp = example()
    args = fsdp.parse([*TINY, *arguments, "--out", str(out)])
    devices = fsdp.Devices.of(torch.device("cpu"), args.cp, args.tp)
    fsdp.check(args, devices.data_ranks)
    _, content = fsdp.read_text(args.text, args.seqlen)
    windows = fsdp.Windows(content, args.batch, args.seqlen, args.seed)
    return fsdp.Run(args, devices, windows, {"seed": args.seed, "batch": args.batch})


def whole(run, of_gradients: bool = False) -> dict[str, torch.Tensor]:
    """Gathers all parameters, or their gradients. Returns them with the projections of q, k and v joined, as in the
    model of flashrope.small_models."""
    tensors = {name: (p.grad if of_gradients else p.detach()).full_tensor() for name, p in run.model.named_parameters()}
    return joined(tensors, run.args.layers)


def joined(tensors: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    for i in range(layers):
        tensors[f"blocks.{i}.qkv.weight"] = torch.cat([tensors.pop(f"blocks.{i}.{name}.weight") for name in "qkv"])
    return tensors


def on_one_device(text: str, steps: int):
    """Returns losses, gradients of the first step and weights after the last step, all from one device. The model comes
    from flashrope.small_models, and no parallel code of the example runs."""
    fsdp = example()
    args = fsdp.parse([*TINY, "--text", text, "--steps", str(steps)])
    torch.manual_seed(args.seed)
    sizes = args.width, args.layers, args.heads, args.mlp_width
    weights = fsdp.LanguageModel(*sizes).state_dict()
    model = LanguageModel(ModelConfig(*sizes))
    model.load_state_dict(joined(dict(weights), args.layers))
    model.double()
    rotary = Rotary.hope(model.config.head_dim, args.seqlen)
    windows = fsdp.Windows(Path(text).read_bytes(), args.batch, args.seqlen, args.seed)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    losses, first = [], None
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * fsdp.learning_rate_fraction(step, args.warmup, args.steps)
        batch = windows.next()
        loss = F.cross_entropy(model(batch[:, :-1], rotary).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), first, {name: p.detach() for name, p in model.named_parameters()}


def mean_loss(loss: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


@pytest.mark.parametrize(
    "all_of",
    [
        pytest.param([(2, 2, 2), (4, 1, 3), (1, 4, 64)], id="four"),
        pytest.param([(1, 1, 64), (2, 1, 64), (1, 2, 1)], id="fewer", marks=pytest.mark.slow),
    ],
)
@on_ranks
def test_four_ranks_compute_what_one_device_does(text, tmp_path, all_of):
    steps = 4
    losses, first, last = on_one_device(text, steps)
    for cp, tp, micro_batch in all_of:
        layout = f"cp {cp}, tp {tp}, micro-batch {micro_batch}"
        options = {"--text": text, "--steps": steps, "--cp": cp, "--tp": tp, "--micro-batch": micro_batch}
        run = make_run([str(word) for option in options.items() for word in option], tmp_path)
        fsdp = example()
        state = run.windows.state
        fsdp.gradients(run.model, run.rotary, run.attend, *run.devices.part(run.windows.next()), micro_batch)
        for name, grad in whole(run, of_gradients=True).items():
            close(grad, first[name], f"{layout}: gradient of {name}")
        run.optimizer.zero_grad()
        run.windows.state = state
        close(torch.stack([mean_loss(run.train_step()[0]) for _ in range(steps)]), losses, f"{layout}: losses")
        for name, weight in whole(run).items():
            close(weight, last[name], f"{layout}: {name}")


@on_ranks
def test_an_interrupted_run_resumes(text, tmp_path):
    """A run that is saved in one layout resumes in other layouts."""
    arguments, total = ("--text", text, "--steps", "6"), 6
    losses, _, last = on_one_device(text, total)
    run = make_run((*arguments, "--cp", "2", "--tp", "2"), tmp_path)
    for _ in range(3):
        run.train_step()
    run.save()
    run.train_step()  # not saved, so the resumed run repeats it
    for layout in (("--tp", "2"), ("--cp", "4"), ()):
        run = make_run((*arguments, *layout), tmp_path)
        run.resume()
        assert run.step == 3
        rest = torch.stack([mean_loss(run.train_step()[0]) for _ in range(3)])
        close(rest, losses[3:], f"{layout}: losses after resuming")
        for name, weight in whole(run).items():
            close(weight, last[name], f"{layout}: {name}")
    with pytest.raises(example().BadInput, match=r"step-00000003 was made with batch 8 \(now 16\)"):
        make_run((*arguments, "--batch", "16"), tmp_path).resume()


def stopped_by_a_signal(text: str, out: str) -> list[float]:
    """SIGTERM reaches one rank during a step. All ranks stop after that step with a checkpoint, from which they
    resume."""
    fsdp = example()
    args = fsdp.parse([*TINY, "--text", text, "--steps", "6", "--save-every", "2", "--out", out])
    train_step, done = fsdp.Run.train_step, []

    def interrupted(run):
        if run.step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        done.append(run.step)
        return train_step(run)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    fsdp.Run.train_step = interrupted
    try:
        assert fsdp.train(args, torch.device("cpu")) == 128 + signal.SIGTERM
        assert done == [0, 1, 2, 3]
        fsdp.Run.train_step = train_step
        assert not Path(out, "model.safetensors").exists()
        assert fsdp.train(args, torch.device("cpu")) == 0
    finally:
        fsdp.Run.train_step = train_step
        for number, handler in before.items():
            signal.signal(number, handler)
    dist.barrier()
    newest = ["step-00000004", "step-00000006"]
    assert sorted(path.name for path in Path(out).glob("step-*")) == newest


def test_a_signal_stops_all_ranks(ranks, text, tmp_path):
    ranks(stopped_by_a_signal, text, str(tmp_path))
    losses, _, last = on_one_device(text, 6)
    close(torch.tensor(logged(tmp_path), dtype=torch.float64), losses, "losses")
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    model, rotary = load_checkpoint(tmp_path / "model.safetensors")
    assert rotary == Rotary.hope(8, 64)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, last[name].float(), rtol=2**-22, atol=0)  # the last two bits may differ


def logged(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def test_can_be_copied_out_of_the_repository():
    """The example imports only public names of flashrope. The slow tests run a copy of it."""
    imports = [node for node in ast.walk(ast.parse(EXAMPLE.read_text())) if isinstance(node, ast.ImportFrom)]
    ours = {node.module: {name.name for name in node.names} for node in imports if node.module.startswith("flashrope")}
    assert ours == {
        "flashrope": {"Rotary", "attention"},
        "flashrope.integrations.distributed": {"context_parallel_attention", "shard_sequence"},
    }


def test_read_text(tmp_path):
    fsdp = example()
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.md").write_bytes(b"a" * 30)
    (tmp_path / "b").write_bytes(b"b" * 30)
    (tmp_path / "picture").write_bytes(b"\x89PNG\0" * 30)
    assert fsdp.read_text(str(tmp_path), 60) == (str(tmp_path), b"b" * 30 + b"\0" + b"a" * 30)
    assert fsdp.read_text(str(tmp_path / "b"), 29)[1] == b"b" * 30
    for path, message in (
        (tmp_path / "b", "expected more than --seqlen = 30 bytes of text, got 30"),
        ("nowhere", "no such"),
    ):
        with pytest.raises(fsdp.BadInput, match=message):
            fsdp.read_text(str(path), 30)


@on_ranks
def test_bad_input(text, tmp_path):
    fsdp = example()
    cases = (
        (("--cp", "3"), "3 * 1 to divide the number of processes, 4"),
        (("--batch", "6"), "--batch: expected a multiple of the 4"),
        (("--width", "36"), "--width: expected --heads = 4 times a multiple of 8, got 36"),
        (("--cp", "4", "--seqlen", "60"), "--seqlen: expected a multiple of 2 * --cp = 8, got 60"),
        (("--tp", "4", "--heads", "2"), "--tp: expected to divide heads = 2"),
    )
    for arguments, words in cases:
        with pytest.raises(fsdp.BadInput) as error:
            make_run((*arguments, "--text", text), tmp_path)
        assert words in str(error.value)


def launch(processes: int, out: Path, text: str, *arguments: str, wait: bool = True):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
    copy = shutil.copy(EXAMPLE, out.parent / "copied.py")
    command = [sys.executable, *torchrun, str(copy), *TINY, "--text", text, "--out", str(out), *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    if not wait:
        return process
    output, _ = process.communicate(timeout=400)
    return process.returncode, output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_torchrun_killed_and_resumed(text, tmp_path, number):
    arguments = ("--steps", "150", "--save-every", "20", "--cp", "2")
    process = launch(2, tmp_path / "broken", text, *arguments, wait=False)
    log, end = tmp_path / "broken" / "log.jsonl", time.monotonic() + 300
    while not (log.exists() and len(log.read_text().splitlines()) > 30):
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.1)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[-1]) if number == signal.SIGKILL else process.pid, number)  # kill one rank, or stop torchrun
    output, _ = process.communicate(timeout=120)
    reached = len(log.read_text().splitlines())
    assert process.returncode and reached < 150, output
    if number != signal.SIGKILL:
        assert f"after step {reached}; the same command resumes" in output
    status, output = launch(0, tmp_path / "broken", text, *arguments[:-2])  # one process now
    assert status == 0, output
    resumed_at = reached // 20 * 20 if number == signal.SIGKILL else reached
    assert f"step {resumed_at} of 150" in output.splitlines()[0], output
    status, output = launch(0, tmp_path / "unbroken", text, *arguments[:-2])
    assert status == 0, output
    close(*(torch.tensor(logged(tmp_path / name), dtype=torch.float64) for name in ("broken", "unbroken")), "losses")
