#!/usr/bin/env bash
# All that wants a GPU, in steps, each with a time limit and a log of its own.
#
#   bench/on_gpu.sh [-o FOLDER] [-r REVISION] [STEP ...]      (FOLDER: default $OUT, else runs/gpu)
#
# Without arguments all steps, what matters most first. Where a machine is lent for ten minutes at a time:
#
#   bench/on_gpu.sh smoke tests
#   bench/on_gpu.sh hope decode rotation
#   bench/on_gpu.sh rerope memcheck tune-forward
#
# A step that fails or runs out of time does not stop the others. Nothing is installed: where flashrope cannot be imported,
# the checkout is used as it is. -r names the revision where the folder is no git checkout. FOLDER/results.tgz holds the folder
# results of bench/; unpack it there.
set -uo pipefail

steps=(smoke tests hope decode rotation rerope memcheck tune-forward host tune-decode tune-backward scaling more racecheck)
declare -A limits=([smoke]=110 [tests]=460 [hope]=350 [decode]=130 [rotation]=90 [rerope]=230 [memcheck]=150 [tune-forward]=190
                   [host]=60 [tune-decode]=190 [tune-backward]=300 [scaling]=300 [more]=590 [racecheck]=590) # seconds
kernel_tests=(launches cuda_graphs accuracy identities varlen decode decode_triton cache torch errors cuda_extension bench)
folder=${OUT:-runs/gpu}
revision=
while getopts o:r: option; do
  case $option in
    o) folder=$OPTARG ;;
    r) revision=$OPTARG ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] && steps=("$@")
for step in "${steps[@]}"; do
  [ -n "${limits[$step]:-}" ] || { echo "unknown step $step; there are: ${!limits[*]}" >&2; exit 2; }
done

cd "$(dirname "$0")/.." || exit 1
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"; [ -n "$revision" ] && rm -f REVISION' EXIT
[ -n "$revision" ] && echo "$revision" > REVISION
python=$(command -v python3)
if ! "$python" -c 'import flashrope.triton_kernels' 2>/dev/null; then
  mkdir "$work/packages"
  cp -r python/flashrope "$work/packages/"
  rm -rf "$work/packages/flashrope/triton_kernels" # a link, where one was made
  cp -r triton_kernels "$work/packages/flashrope/"
  export PYTHONPATH=$work/packages${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONUNBUFFERED=1
results=runs/results # the command that is kept with a result names no folder of this machine
rm -rf "$results"

bench() { "$python" -m bench "$@"; }

sanitize() {
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 9 "$python" -m bench.sanitize
}

run_step() {
  case $1 in
    smoke) "$python" -m flashrope info
      bench hope --seqlens 8192 --contestants "SDPA flash" "SDPA cuDNN" flashrope --out "$work/smoke" ;;
    host) bench host ;;
    tests) "$python" -m pytest -q -n auto --maxfail=40 --durations=10 -p no:cacheprovider $tests ;;
    memcheck | racecheck) sanitize "$1" ;;
    tune-forward) bench tune --direction forward --csv "$folder/tune-forward.csv" ;;
    tune-backward) bench tune --direction grad_kv grad_q --csv "$folder/tune-backward.csv" ;;
    tune-decode) bench tune --direction decode --head-dim 64 128 --csv "$folder/tune-decode.csv" ;;
    hope | rerope | decode | rotation | scaling) bench all --part main --only "$1" --out "$results" ;;
    more) bench all --part more --out "$results" ;;
  esac
}
export -f run_step bench sanitize
export python folder work results
tests=$(printf 'tests/test_%s.py ' "${kernel_tests[@]}")
export tests

summary=()
for step in "${steps[@]}"; do
  started=$SECONDS
  timeout --signal=INT --kill-after=20 "${limits[$step]}" bash -c 'run_step "$1"' _ "$step" 2>&1 | tee "$folder/$step.log"
  status=${PIPESTATUS[0]}
  verdict=passed
  [ "$status" -eq 124 ] && verdict="out of time"
  [ "$status" -ne 0 ] && [ "$status" -ne 124 ] && verdict="FAILED ($status)"
  summary+=("$(printf '%-14s %4d s  %s' "$step" $((SECONDS - started)) "$verdict")")
  [ -d "$results" ] && tar -C runs -czf "$folder/results.tgz" results
done
printf '%s\n' "${summary[@]}" | tee "$folder/summary.txt"
! grep -qv passed "$folder/summary.txt"
