#!/usr/bin/env bash
# shellcheck disable=SC2016,SC2317 # the functions of the steps run through "bash -c"
set -uo pipefail

usage() {
  cat <<'TEXT'
Tests and measures flashrope on a GPU, in steps, and leaves one file to attach to an issue
(pyproject.toml will have the address under [project.urls]; the project has no public address yet).

  bench/on_gpu.sh [-t MINUTES] [-o FOLDER] [-p FOLDER] [-r REVISION] [first] [second] [STEP ...]

Without arguments it runs "first" and "second", which take at most 12 minutes. Each half takes at most 6 minutes, and
can be called alone:

  first    compile correct prefill packages
  second   compile cache sm80 tune ncu (compile only if it has not run in the same call)

Every step has a time limit and a log. If a step fails or runs out of time, the next steps still run, the log keeps what
the step has printed, and the summary says what the step did not reach. The last lines are one table of all figures. At
the end, and after every step in case the machine is taken away, logs, results, versions and the summary are packed into

  FOLDER/flashrope-gpu-<device>-<date>.tgz

Its folder "results" has the JSON files that python -m bench report takes. They say which revision was measured and
whether it had uncommitted changes.

Steps:
  compile        every kernel of both halves, in parallel, into a fresh cache
  correct        every kind of kernel at real sizes against float64 on the CPU, a fixed list
  prefill        RoPE, HoPE and ReRoPE against PyTorch's attention and flash-attn 2, 3 and 4; tiles in use and candidates
  packages       other builds of flashrope's forward from the folder of -p (without -p this step is left out)
  cache          one token with a KV cache, with and without groups of keys
  sm80           the code for sm_80, executed on sm_90
  tune           all tiles of the backward with atomics
  ncu            counters of one launch of each main kernel; the clocks stay as they are
  smoke          versions and devices; flashrope and PyTorch at one length, checked against float64
  tests          the tests of the kernels
  ceilings       what the GPU reaches: a large matrix product, a copy, a read
  hope           prefill and training with RoPE and HoPE, against PyTorch's attention and flash-attn; seqlen 8192 first
  decode         one token with a KV cache
  rerope         prefill and training with ReRoPE
  rotation       the cost of rotation
  memcheck       every kernel under compute-sanitizer, which looks for accesses outside the buffers
  tune-forward   tiles of the forward kernel
  host           host time of a call
  tune-decode    tiles of the decode kernel
  tune-backward  tiles of the backward kernels
  scaling        growth of time and memory
  more           hope, rerope and decode with head_dim 64 and with grouped heads
  racecheck      every kernel under compute-sanitizer, which looks for races in shared memory

The step "experiments" runs only if it is named. It trains 18 models, which is expected to take 20 minutes (python -m
experiments perplexity --preset small). It continues where an earlier run of this step stopped.

Options:
  -t MINUTES   time for everything (default: 6 minutes for each half; the limits of the steps if other steps are named)
  -o FOLDER    where the file and the unpacked logs go (default: runs/gpu)
  -p FOLDER    other builds: FOLDER/hop/flashrope (a forward in Gluon), FOLDER/lag/flashrope (values one tile late)
  -r REVISION  the git revision to record if this folder is not a git checkout
  -h           this text

Use a Python environment in which PyTorch finds the GPU. It may be NVIDIA's, or AMD's under ROCm (gfx942, gfx950). On
AMD's GPUs memcheck, racecheck, sm80 and ncu are left out. The tests need pytest (pytest-xdist makes them faster).
Nothing is installed, and no network is needed. If flashrope is not installed from this folder, the files of this folder
are used as they are. Steps that are run one by one on the same day are packed together:

  bench/on_gpu.sh first
  bench/on_gpu.sh -t 10 second hope decode
TEXT
}

first=(compile correct prefill packages)
second=(cache sm80 tune ncu)
order=("${first[@]}" "${second[@]}" smoke tests ceilings hope decode rerope rotation memcheck tune-forward host
  tune-decode tune-backward scaling more racecheck)
# Seconds. Each half, "second" with compile, must fit into half_limit.
declare -A limits=([compile]=70 [correct]=120 [prefill]=115 [packages]=40 [cache]=65 [sm80]=50 [tune]=75 [ncu]=80
  [smoke]=110 [tests]=460 [ceilings]=60 [hope]=400 [decode]=130 [rerope]=230 [rotation]=90 [memcheck]=300
  [tune-forward]=190 [host]=60 [tune-decode]=190 [tune-backward]=300 [scaling]=300 [more]=590 [racecheck]=590)
limits[experiments]=2400 # not in `order`
half_limit=360
kernel_tests=(backends/test_{launches,cuda_graphs,decode_triton,cuda_extension} operators/test_{accuracy,identities,varlen}
  operators/test_{torch,errors} cache/test_{decode,cache} bench/test_bench)
grace=5     # seconds between the signal to stop and the one that kills
skipped=77  # exit code of a step that cannot run here

fail() {
  echo "on_gpu.sh: $*" >&2
  exit 2
}

folder=runs/gpu
revision=
budget=
others=
while getopts ho:p:r:t: option; do
  case $option in
    h) usage; exit 0 ;;
    o) folder=$OPTARG ;;
    p) others=$(cd "$OPTARG" 2>/dev/null && pwd) || fail "-p: expected a folder, got $OPTARG" ;;
    r) revision=$OPTARG ;;
    t) budget=$(awk -v minutes="$OPTARG" 'BEGIN { printf "%d", minutes * 60 }')
       [ "$budget" -gt 0 ] || fail "-t: expected a number of minutes, got $OPTARG" ;;
    *) fail "see bench/on_gpu.sh -h" ;;
  esac
done
shift $((OPTIND - 1))
asked=("$@")
[ $# -eq 0 ] && asked=(first second)
steps=()
add() {
  local step
  for step in "$@"; do
    [ -n "${limits[$step]:-}" ] || fail "unknown step $step; see bench/on_gpu.sh -h"
    [[ $step = packages && -z $others ]] && continue
    [[ " ${steps[*]} " = *" $step "* ]] || steps+=("$step")
  done
}
halves=0
for step in "${asked[@]}"; do
  case $step in
    first) add "${first[@]}"; halves=$((halves + 1)) ;;
    second) add compile "${second[@]}"; halves=$((halves + 1)) ;;
    *) add "$step"; halves=-9 ;;
  esac
done
[[ -z $budget && $halves -gt 0 ]] && budget=$((halves * half_limit))
deadline=${budget:+$((SECONDS + budget))}

python=$(command -v python3) || fail "python3 is not on PATH"
device=$("$python" -c '
import sys
try:
    import torch
except ImportError:
    sys.exit(f"PyTorch cannot be imported by {sys.executable}")
if not torch.cuda.is_available():
    sys.exit(f"no GPU: torch.cuda.is_available() is False (torch {torch.__version__})")
print(torch.cuda.get_device_name())' 2>&1) || fail "$(tail -n 1 <<<"$device")"

mkdir -p "$folder" || exit 1
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.." || exit 1
name=flashrope-gpu-$(tr '[:upper:]' '[:lower:]' <<<"$device" | sed 's/[^a-z0-9]\{1,\}/-/g; s/^-//; s/-$//')-$(date +%F)
run=$folder/$name
[ $# -eq 0 ] && rm -rf "$run"
mkdir -p "$run"
work=$(mktemp -d)
clock=
leave() {
  [ -n "$clock" ] && kill "$clock" 2>/dev/null
  [ -n "$revision" ] && rm -f runs/REVISION
  rm -rf "$work"
}
trap leave EXIT
[ -n "$revision" ] && mkdir -p runs && echo "$revision" >runs/REVISION

# Uses the files of this folder unless flashrope is installed from this folder.
if ! "$python" -c '
import sys
from pathlib import Path
import flashrope, flashrope.triton_kernels
sys.exit(Path.cwd() not in Path(flashrope.__file__).resolve().parents)' 2>/dev/null; then
  mkdir "$work/packages"
  cp -r python/flashrope "$work/packages/"
  rm -rf "$work/packages/flashrope/triton_kernels" # in some installations a link
  cp -r triton_kernels "$work/packages/flashrope/"
  export PYTHONPATH=$work/packages${PYTHONPATH:+:$PYTHONPATH}
fi

bench() { "$python" -m bench "$@"; }

# The code for sm_80 on sm_90: Triton compiles for sm_80, and ptxas makes machine code of sm_90 from its PTX.
for_sm80() {
  local found
  found=$("$python" -c 'import pathlib, triton
print(pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/ptxas")') || return "$skipped"
  REAL_PTXAS=$found TRITON_PTXAS_PATH=$PWD/bench/ptxas90 TRITON_OVERRIDE_ARCH=sm80 TRITON_CACHE_DIR=$cache/sm80 "$@"
}

# Both compile at once, so that no core waits. A fresh cache: a kernel from an older one may add dQ in another way.
compile() {
  rm -rf "$cache"
  mkdir -p "$cache"
  local failed=0
  for_sm80 bench device compile --code 80 --jobs 4 &
  bench device compile || failed=1
  wait $! || failed=1
  return "$failed"
}

# Compiles in parallel first, because compilation under compute-sanitizer takes many times as long.
sanitize() {
  if ! command -v compute-sanitizer; then
    echo "compute-sanitizer is not on PATH; it is part of the CUDA toolkit and supports only NVIDIA's GPUs"
    return "$skipped"
  fi
  bench sanitize --compile || return
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 9 "$python" -m bench sanitize
}

tests() {
  if ! "$python" -c 'import pytest'; then
    echo "pytest is not installed"
    return "$skipped"
  fi
  local parallel=()
  "$python" -c 'import xdist' 2>/dev/null && parallel=(-n auto)
  # shellcheck disable=SC2086
  "$python" -m pytest -q "${parallel[@]}" -o console_output_style=count --maxfail=40 --durations=10 \
    -p no:cacheprovider $test_files
}

hope() {
  local failed=0
  bench hope --seqlens 8192 --passes forward --contestants "SDPA flash" "SDPA cuDNN" "flash-attn 2" flashrope \
    --out "$run/results-8192" || failed=1
  bench all --part main --only hope --out "$run/results" || failed=1
  return "$failed"
}

# Results and curves are packed, models are not.
experiments() {
  local out=$folder/experiments-small status
  "$python" -m experiments perplexity --preset small --device cuda --out "$out"
  status=$?
  if [ -e "$out/perplexity" ]; then
    mkdir -p "$run/experiments-small"
    cp -r "$out/settings.json" "$out/perplexity" "$run/experiments-small/"
  fi
  return "$status"
}

run_step() {
  case $1 in
    compile) compile ;;
    correct) bench correct --seconds 110 --json "$run/correct.json" ;;
    prefill | cache) bench device "$1" --out "$run/results" ;;
    sm80) for_sm80 bench device sm80 --out "$run/results" ;;
    packages) bench device packages --packages "$others" ;;
    tune) bench tune --direction grad_qkv --bands 1 2 --seconds 30 --csv "$run/tune-grad_qkv.csv" ;;
    ncu) bench device ncu --out "$run/ncu" ;;
    smoke) "$python" -m flashrope info && bench hope --seqlens 2048 --contestants "SDPA flash" flashrope ;;
    tests) tests ;;
    hope) hope ;;
    ceilings | host) bench "$1" ;;
    memcheck | racecheck) sanitize "$1" ;;
    tune-forward) bench tune --direction forward --seconds 85 --csv "$run/tune-forward.csv" ;;
    tune-backward) bench tune --direction grad_kv grad_q --seconds 68 --csv "$run/tune-backward.csv" ;;
    tune-decode) bench tune --direction decode --head-dim 64 128 --seconds 42 --csv "$run/tune-decode.csv" ;;
    rerope | decode | rotation | scaling) bench all --part main --only "$1" --out "$run/results" ;;
    more) bench all --part more --out "$run/results" ;;
    experiments) experiments ;;
  esac
}
test_files=$(printf 'tests/%s.py ' "${kernel_tests[@]}")
cache=$folder/triton-cache # not packed, and kept: "second" finds there what "first" has compiled
export -f run_step bench for_sm80 compile sanitize tests hope experiments
export cache folder others python run skipped test_files PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=$cache

versions() {
  echo "$device, $(date -u +%FT%TZ)"
  "$python" -c 'from bench.machine import versions; [print(name, version) for name, version in versions().items()]'
  uname -srm
  if command -v rocm-smi; then
    rocm-smi --showproductname --showdriverversion --showmaxpower
  else
    nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm --format=csv
    nvcc --version | tail -n 1
  fi
}
versions >"$run/versions.txt" 2>&1
if command -v nvidia-smi >"$work/nvidia-smi"; then # the running clock, once a second
  nvidia-smi --query-gpu=timestamp,clocks.sm,utilization.gpu,power.draw,temperature.gpu \
    --format=csv,noheader,nounits -l 1 >>"$run/clock.csv" 2>/dev/null &
  clock=$!
fi

pack() {
  local step
  for step in "${order[@]}" experiments; do
    if [ -e "$run/$step.verdict" ]; then cat "$run/$step.verdict"; fi
  done >"$run/summary.txt"
  tar -C "$folder" --exclude='*.verdict' -czf "$work/packed.tgz" "$name" && mv "$work/packed.tgz" "$folder/$name.tgz"
}

failed=0
for step in "${steps[@]}"; do
  limit=${limits[$step]}
  verdict_file=$run/$step.verdict
  if [ -n "$deadline" ] && [ $((deadline - SECONDS)) -lt "$limit" ]; then
    limit=$((deadline - SECONDS))
  fi
  if [ "$limit" -le 0 ]; then
    printf '%-14s %6s  not run: the time of -t is over\n' "$step" - >"$verdict_file"
    failed=1
    continue
  fi
  echo "== $step, at most $limit s"
  started=$SECONDS
  timeout --signal=INT --kill-after="$grace" "$limit" bash -c 'run_step "$1"' _ "$step" 2>&1 | tee "$run/$step.log"
  status=${PIPESTATUS[0]}
  case $status in
    0) verdict=passed ;;
    124 | 137) verdict="out of time" ;;
    "$skipped") verdict="not run: $(tail -n 1 "$run/$step.log")" ;;
    *) verdict="FAILED (exit code $status)" ;;
  esac
  [ "$status" -eq 0 ] || failed=1
  {
    printf '%-14s %4d s  %s\n' "$step" $((SECONDS - started)) "$verdict"
    "$python" -m bench.progress "$run/$step.log" | sed 's/^/    /'
  } >"$verdict_file"
  pack
done
bench device table "$run" >"$run/table.txt" 2>&1
pack
echo
cat "$run/summary.txt"
echo
echo "Attach this file to an issue: $folder/$name.tgz"
echo
cat "$run/table.txt"
exit "$failed"
