"""Runs the steps of ``bench/on_gpu.sh first second`` on a GPU. The script gives each step its time limit and its log.

python -m bench device compile [--code 80]            # every kernel of the steps, in parallel, into Triton's cache
python -m bench device prefill|cache|sm80 --out DIR   # timings
python -m bench device packages --packages DIR --out DIR  # other builds of flashrope
python -m bench device ncu --out DIR                  # counters of one launch of each main kernel
python -m bench device launch NAME                    # one launch, for ncu
python -m bench device table DIR                      # one table of everything that the steps left in DIR
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from flashrope.backends.triton.device import compute_capability
from flashrope.console.files import write
from flashrope.console.options import positive

from . import machine
from .progress import steps
from .report import records
from .speed import decode, prefill
from .speed.options import Table
from .speed.settings import FIELDS, run_code_of

OTHERS = "packages.log"  # rows of other packages are lines of JSON in this log
NOT_HERE = 77  # exit code of a step that cannot run here, as in on_gpu.sh
LENGTHS = ("8192", "2048")
LIBRARIES = ("SDPA flash", "SDPA cuDNN", "flash-attn")
FORWARD = "forward=128,128,8,3"  # the sm_90 tile that other fields of a tile are added to
TILES = {
    "hope": ("grad_qkv=64,128,8,2", "grad_qkv=64,128,8,3", "forward=128,128,8,3", "forward=64,64,4,3"),
    "rerope": (
        *("grad_qkv=32,128,8,2", "grad_qkv=64,128,8,2", "grad_qkv=64,128,8,3"),
        *("forward=128,128,8,3", "forward=64,64,4,3"),
    ),
}
SM80_TILES = ("grad_qkv=32,64,4,3", "grad_qkv=32,128,8,3")
SHAPES = ("8x16384", "1x131072", "1x16384", "8x4096", "32x4096")  # the last three are those of TileOPs
PACKAGES = (  # (folder, label, environment, tile)
    ("hop", "Gluon", {"FLASHROPE_PINGPONG": "0"}, "forward tma=128,128,4,2"),
    ("hop", "Gluon with turns", {"FLASHROPE_PINGPONG": "1"}, "forward tma=128,128,4,2"),
    ("lag", "values one tile late, 128 x 128", {"FLASHROPE_LAG": "1"}, "forward=128,128,8,3"),
    ("lag", "values one tile late, 128 x 64", {"FLASHROPE_LAG": "1"}, "forward=128,64,8,3"),
)
LAUNCHES = {  # {name: (command, contestant, whether with the backward, the kernel that ncu counts, tiles)}
    "backward": ("hope", "flashrope RoPE", True, "attention_grad_kv", ()),
    "forward": ("hope", "flashrope RoPE", False, "attention_forward", ()),
    "rerope-backward": ("rerope", "flashrope ReRoPE", True, "attention_grad_kv", ()),
    "rerope-forward": ("rerope", "flashrope ReRoPE", False, "attention_forward", ()),
    "decode": ("decode", "flashrope RoPE", False, "attention_decode", ()),
    "rerope-decode": ("decode", "flashrope ReRoPE", False, "attention_decode", ()),
    "backward-3-stages": ("hope", "RoPE with tile grad_qkv=64,128,8,3", True, "attention_grad_kv", TILES["hope"]),
}
STALLS = ("barrier", "long_scoreboard", "short_scoreboard", "wait", "gmma", "math_pipe_throttle", "mio_throttle")
STALLS += ("lg_throttle", "no_instruction", "selected", "not_selected")
METRICS = (
    "sm__cycles_elapsed.max",
    "smsp__inst_executed.sum",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_xu.sum",
    "l1tex__data_bank_conflicts_pipe_lsu.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "lts__t_sectors_op_red.sum",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    *(f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS),
)
COLUMNS = ("contestant", "pass", "length x batch", "ms", "speed", "share", "time / ours", "revision")


def switches() -> list[str]:
    """Returns the forward's tile with each field of tiles beyond the four numbers, off and on."""
    return [f"{FORWARD},{name}={value}" for name in FIELDS[4:] for value in (0, 1)]


def plan(step: str) -> list[list[str]]:
    """Returns the commands of ``python -m bench`` that a step runs, the most important first."""
    chosen = ["--contestants", *LIBRARIES, "flashrope", "with tile"]
    if step == "prefill":
        short = ["--seqlens", *LENGTHS, "--seconds", "0.4", *chosen]
        return [[command, *short, "--tiles", *tiles, *switches()] for command, tiles in TILES.items()]
    if step == "cache":
        peers = ["--contestants", "SDPA flash", "flash-attn", "flashrope", "group"]
        return [["decode", "--shapes", *SHAPES, "--seconds", "0.5", "--groups", *peers]]
    if step == "sm80":
        peers = ["--contestants", "SDPA flash", "flashrope", "with tile"]
        return [["hope", "--code", "80", "--seqlens", "8192", "--seconds", "0.7", *peers, "--tiles", *SM80_TILES]]
    raise ValueError(f"step: expected prefill, cache or sm80, got {step!r}")


def tables_of(words: Sequence[str]) -> Iterator[Table]:
    """Yields the tables of a command, on the meta device and with only the contestants that run flashrope's kernels."""
    command, *argv = words
    argv = ["--device", "cuda", *argv]
    if command == "decode":
        options = decode.parsed(argv, needs_device=False)
        tables = decode.tables(options, 0)
    else:
        options = prefill.parsed(command, argv, needs_device=False)
        tables = prefill.tables(command, options)
    for table in tables:
        ours = [
            each
            for each in table.contestants
            if each.runs_flashrope
            and not any(x in each.name for x in ("CUDA", ", sdpa"))
            and any(x in each.name for x in options.contestants)
        ]
        yield Table(table.title, ours, table.problem.replace(device=torch.device("meta")), table.backward)


def launches(commands: Sequence[Sequence[str]], arch: int, correct: bool) -> list:
    """Returns the distinct launches of the commands, and with `correct` those of ``bench correct``. Runs nothing."""
    from flashrope.backends.triton import launcher

    from .correct import Maker, cases
    from .machine_code.offline import caught_launches
    from .speed.session import inputs_of, ready

    calls = [
        (contestant, table) for words in commands for table in tables_of(words) for contestant in table.contestants
    ]
    found, failed = {}, []
    runs: list[tuple[str, Callable]] = []
    for case in cases() if correct else []:
        runs.append((case.name, partial(case.run, Maker(torch.device("meta"), torch.bfloat16, "triton"))))
    runs += [(f"{c.name}, {t.title}", lambda c=c, t=t: ready(c, t, *inputs_of(t))()) for c, t in calls]
    for name, run in runs:
        with caught_launches(launcher, arch) as caught:
            try:
                run()
            except Exception as error:  # the case itself says on the device what is wrong
                failed.append(f"{name} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")
        found |= {launch.key: launch for launch in caught}
    if failed:
        print(f"compiled when they run: {'; '.join(failed)}", flush=True)
    return list(found.values())


def compile_kernels(code: int | None, jobs: int) -> int:
    from .machine_code.offline import compile_all

    if code:
        if reason := no_code_here():
            print(reason)
            return 0
        run_code_of(code)
    arch = compute_capability(torch.device("cuda", torch.cuda.current_device()))
    names = ["sm80"] if code else ["prefill", "cache"]
    chosen = launches([words for name in names for words in plan(name)], arch, correct=not code)
    print(f"compiling {len(chosen)} kernels for {arch} in {jobs} processes", flush=True)
    failed = 0
    for done, (index, error, _) in enumerate(compile_all(chosen, jobs, inspect=lambda compiled: None), 1):
        name = chosen[index].kernel.__name__
        print(f"compiled {done} of {len(chosen)}: {name}" + (f": {error}" if error else ""), flush=True)
        failed += bool(error)
    return int(failed > 0)


def no_code_here() -> str:
    """Returns why the code for sm_80 is not run here, or "" if it is."""
    major, minor = torch.cuda.get_device_capability()
    if torch.version.hip or major != 9:
        return f"sm80: the code for sm_80 is assembled for compute capability 9.0, this GPU has {major}.{minor}"
    return ""


def timed(step: str, out: Path) -> int:
    if step == "sm80" and (reason := no_code_here()):
        print(reason)
        return NOT_HERE
    path = os.pathsep.join(filter(None, (str(machine.ROOT), os.environ.get("PYTHONPATH"))))
    chosen = [[sys.executable, "-m", "bench", *words, "--out", str(out)] for words in plan(step)]
    codes = [
        subprocess.run(words, env=os.environ | {"PYTHONPATH": path}).returncode
        for words in steps(step, chosen, lambda words: words[3])
    ]
    return max(map(abs, codes))


def packages(folder: Path) -> int:
    here = [each for each in PACKAGES if (folder / each[0] / "flashrope").exists()]
    if not here:
        print(f"no package in {folder}: expected {' or '.join(sorted({each[0] for each in PACKAGES}))}/flashrope")
        return NOT_HERE
    script, codes = str(Path(__file__).with_name("other_package.py")), []
    for name, label, environment, tile in steps("packages", here, lambda each: each[1]):
        words = [sys.executable, script, "--label", label, "--tile", tile]
        codes.append(
            subprocess.run(words, env=os.environ | environment | {"PYTHONPATH": str(folder / name)}).returncode
        )
    return max(map(abs, codes))


def launch(name: str) -> int:
    """Makes one call, for ncu. The compiled kernels are in the cache."""
    from .speed.session import inputs_of, ready

    command, contestant, backward, _, tiles = LAUNCHES[name]
    sizes = ["--shapes", "8x16384"] if command == "decode" else ["--shapes", "2x8192"]
    if command == "decode":
        tables = decode.tables(decode.parsed(sizes), 0)
    else:
        passes = ["--passes", "both" if backward else "forward", *(["--tiles", *tiles] if tiles else [])]
        tables = prefill.tables(command, prefill.parsed(command, [*sizes, *passes]))
    [table] = tables
    [chosen] = [each for each in table.contestants if each.name == contestant]
    ready(chosen, table, *inputs_of(table))()
    torch.cuda.synchronize()
    return 0


def ncu(out: Path) -> int:
    if not shutil.which("ncu"):
        print("ncu is not on PATH; it is part of Nsight Compute")
        return NOT_HERE
    out.mkdir(parents=True, exist_ok=True)
    codes = []
    for name in steps("ncu", list(LAUNCHES)):
        kernel = LAUNCHES[name][3]
        program = [sys.executable, "-m", "bench", "device", "launch", name]
        common = ["ncu", "--clock-control", "none", "--launch-count", "1", "-k", kernel, "--csv", "--page", "raw"]
        for metrics in (["--metrics", ",".join(METRICS)], ["--set", "full"]):
            done = subprocess.run([*common, *metrics, *program], capture_output=True, text=True)
            write(out / f"{name}.csv", done.stdout + done.stderr)
            if not done.returncode and "Failed to find metric" not in done.stdout + done.stderr:
                break
        print(
            f"ncu {name}: {'counted' if not done.returncode else 'FAILED'}, {metrics[0]} {metrics[1][:24]}", flush=True
        )
        codes.append(done.returncode)
    return max(codes)


def rows_of(out: Path) -> Iterator[dict[str, str]]:
    """Yields one row for every record, for every row of another package and for the summary of ``bench correct``."""
    if (checked := out / "correct.json").exists():
        errors = json.loads(checked.read_text())
        wrong = [name for name, error in errors.items() if not (isinstance(error, float) and error <= 2e-2)]
        speed = f"{len(errors) - len(wrong)} of {len(errors)} are correct" + "".join(f"; not {name}" for name in wrong)
        yield {"contestant": "correctness", "speed": speed}
    for path in sorted(out.glob("results/*/*.json")):
        measured = records.read(path)
        for record in measured.records:
            ours = list(record.ratios.items())[-1:]
            decoding = record.sizes["decoding"]
            yield {
                "contestant": record.contestant,
                "pass": "one token" if decoding else "both" if record.backward else "forward",
                "length x batch": f"{record.seqlen} x {record.sizes['batch']}",
                "ms": f"{record.milliseconds:.3f}",
                "speed": f"{record.tflops:.0f} TFLOP/s" if record.tflops else f"{record.gbs:.0f} GB/s",
                "share": f"{record.share:.0%}",
                "time / ours": "".join(f"{ratio:.2f} of {name.removeprefix('flashrope ')}" for name, ratio in ours)
                or "-",
                "revision": measured.shown_revision.removeprefix("revision "),
            }
    if (other := out / OTHERS).exists():
        for row in (json.loads(line) for line in other.read_text().splitlines() if line.startswith('{"contestant"')):
            yield {
                "contestant": row["contestant"],
                "pass": "forward",
                "length x batch": f"{row['seqlen']} x {row['batch']}",
                "ms": f"{row['milliseconds']:.3f}",
                "speed": f"{row['tflops']:.0f} TFLOP/s",
                "revision": "another package" + ("" if row["error"] <= 2e-2 else ", WRONG"),
            }
    if clocks := clocks_of(out / "clock.csv"):
        middle = statistics.median(clocks)
        yield {"contestant": "running clock", "speed": f"{middle:.0f} MHz, {min(clocks):.0f} to {max(clocks):.0f}"}


def clocks_of(path: Path) -> list[float]:
    """Returns the clocks in MHz that nvidia-smi wrote while the GPU worked, or all if it never did."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        cells = [cell.strip().split(" ")[0] for cell in line.split(",")]
        if len(cells) >= 3 and cells[1].replace(".", "").isdigit():
            found.append((float(cells[1]), float(cells[2]) if cells[2].replace(".", "").isdigit() else 0.0))
    busy = [clock for clock, load in found if load > 0]
    return busy or [clock for clock, _ in found]


def table(out: Path) -> int:
    from .machine_code.table import print_table

    rows = list(rows_of(out))
    print_table(COLUMNS, rows or [{"contestant": "nothing was measured"}], left=3)
    return 0


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench device", description=__doc__.split("\n")[0], allow_abbrev=False)
    every = ("compile", "prefill", "cache", "sm80", "packages", "ncu", "launch", "table")
    p.add_argument("step", choices=every)
    p.add_argument("what", nargs="?", help="launch: a name; table: the folder of a run")
    p.add_argument("--code", type=int, metavar="ARCH", help="compile: the code of this architecture instead")
    p.add_argument("--jobs", type=positive, default=os.cpu_count(), help="compiling processes (default: all cores)")
    p.add_argument("--packages", type=Path, metavar="DIR", help="packages: the folder that holds them")
    p.add_argument("--out", type=Path, metavar="DIR", help="where results go")
    options = p.parse_args(argv)
    needed = {"packages": "packages", "launch": "what", "table": "what"}
    needed |= dict.fromkeys(("prefill", "cache", "sm80", "ncu"), "out")
    name = needed.get(options.step)
    if name and getattr(options, name) is None:
        p.error(f"{options.step}: expected {'a value' if name == 'what' else f'--{name} DIR'}, got nothing")
    if options.step == "launch" and options.what not in LAUNCHES:
        p.error(f"launch: expected one of {', '.join(LAUNCHES)}, got {options.what}")
    if options.step == "compile":
        return compile_kernels(options.code, options.jobs)
    if options.step == "packages":
        return packages(options.packages)
    if options.step == "table":
        return table(Path(options.what))
    if options.step == "launch":
        return launch(options.what)
    return ncu(options.out) if options.step == "ncu" else timed(options.step, options.out)
