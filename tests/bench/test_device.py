"""Tests the steps of bench/on_gpu.sh that run on a device: what they plan, compile, check and count."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the commands of bench.machine_code import it")

from flashrope.triton_kernels import configs
from flashrope.triton_kernels.configs import Tile

from bench import correct, device
from bench.speed import check, decode, prefill, settings
from bench.speed.problem import Problem

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
LAUNCHES = """
import torch
torch.cuda.get_device_capability = lambda device=None: ({major}, 0)
from bench import device
for launch in device.launches(device.plan({step!r}), 10 * {major}, False):
    variant = launch.kwargs.get("VARIANT")
    print(launch.kernel.__name__, *(getattr(variant, name, "") for name in ("num_bands", "block_m", "block_n")),
          launch.kwargs.get("num_warps"), launch.kwargs.get("num_stages"), getattr(variant, "key_groups", ""))
"""


def launched(step: str, major: int) -> set[str]:
    """Returns one line for every kernel of a step, from a process without Triton's interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    code = LAUNCHES.format(major=major, step=step)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT)
    assert not done.returncode, done.stderr
    lines = done.stdout.splitlines()
    assert not any(line.startswith("compiled when they run") for line in lines), lines[0]
    return set(lines)


@pytest.mark.slow
def test_every_candidate_of_the_backward_is_compiled_before_it_is_timed():
    found = launched("prefill", 9)
    kernels = {"forward": "attention_forward", "grad_qkv": "attention_grad_kv"}
    for bands, tiles in ((1, device.TILES["hope"]), (2, device.TILES["rerope"])):
        for direction, tile in map(settings.tile_of, tiles):
            line = f"{kernels[direction]} {bands} {' '.join(map(str, tile[:4]))} "
            assert any(each.startswith(line) for each in found), line


@pytest.mark.slow
def test_the_code_for_sm_80_has_both_tiles():
    found = launched("sm80", 8)
    for tile in ("32 64 4 3", "32 128 8 3"):
        assert any(line.startswith(f"attention_grad_kv 1 {tile} ") for line in found), tile


@pytest.mark.slow
def test_decoding_is_compiled_with_groups_and_without():
    groups = {line.split()[-1] for line in launched("cache", 9) if line.startswith("attention_decode")}
    assert groups == {"1", "4"}


# ---- settings
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("grad_qkv=64,128,8,3", ("grad_qkv", Tile(64, 128, 8, 3))),
        ("forward=64,64,4,3,num_stages=2", ("forward", Tile(64, 64, 4, 2))),
        ("forward=64,64,4", None),
        ("forward=64,64,4,three", None),
        ("forward=64,64,4,3,lost=1", None),
        ("forward", None),
    ],
)
def test_a_tile_is_read_or_refused(text, expected):
    if expected:
        assert settings.tile_of(text) == expected
    else:
        with pytest.raises(ValueError, match=f"tile: expected DIRECTION=.*, such as .*, got '{text}'"):
            settings.tile_of(text)


def test_groups_are_forced_and_given_back():
    before = configs.key_groups
    tile = Tile(16, 64, 4, 3)
    with settings.grouped(settings.every_group):
        assert configs.key_groups(tile, 90, 128, 2, 1, False) == 4 != configs.key_groups(tile, 90, 128, 4, 1, False)
        assert configs.key_groups(Tile(64, 64, 4, 3), 90, 128, 2, 1, False) == 1
    with settings.grouped(settings.one_group):
        assert configs.key_groups(tile, 80, 64, 2, 2, True) == 1
    assert configs.key_groups is before


def test_decoding_over_pages_is_checked():
    p = Problem(1, 4096, 4, 2, 64, torch.float32, CPU, decoding=True)
    [paged] = [each for each in decode.contestants(CPU) if each.name == "flashrope ReRoPE, paged"]
    assert check.error(paged, p, False) < 1e-5


# ---- correctness
def test_every_case_is_correct(capsys, tmp_path):
    assert correct.main(["--device", "cpu", "--scale", "0.03", "--json", str(tmp_path / "a.json")]) == 0
    printed = capsys.readouterr().out.splitlines()
    count = len(correct.cases())
    assert (
        printed[-1] == f"{count} of {count} cases are correct"
        and sum(line.endswith(" ok") for line in printed) == count
    )
    assert list(json.loads((tmp_path / "a.json").read_text())) == [case.name for case in correct.cases()]


# ---- ncu


@pytest.mark.parametrize("name", device.LAUNCHES)
def test_every_launch_names_a_contestant(name):
    command, contestant, backward, _, tiles = device.LAUNCHES[name]
    if command == "decode":
        tables = decode.tables(decode.parsed(["--device", "cpu"]), 0)
    else:
        tables = prefill.tables(
            command, prefill.parsed(command, ["--device", "cpu", *(["--tiles", *tiles] if tiles else [])])
        )
    assert contestant in {each.name for each in tables[0].contestants}


def test_another_package_is_checked_and_timed():
    words = [
        "--label",
        "other",
        "--device",
        "cpu",
        "--seqlens",
        "64",
        "--tokens",
        "64",
        "--heads",
        "1",
        "--seconds",
        "0",
    ]
    script = ROOT / "bench" / "other_package.py"
    done = subprocess.run(
        [sys.executable, script, *words, "--tile", "forward=64,64,4,3"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = list(map(json.loads, done.stdout.splitlines()))
    assert [row["contestant"] for row in rows] == ["other, RoPE", "other, ReRoPE"]
    assert all(row["error"] < 2e-2 and row["tflops"] > 0 for row in rows)
