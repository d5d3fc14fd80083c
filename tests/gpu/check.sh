#!/usr/bin/env bash
# Is eyas right on this GPU, and how fast? Numerics against the CPU, throughput, MFU, memory, extraction speed.
#
#   bash tests/gpu/check.sh [--out FILE]     one GPU; the random target of Llama-3.1-8B's size takes 16 GB of it
#   bash tests/gpu/check.sh --dry            tiny shapes, on the CPU where there is no GPU
#
# Needs a checkout and a Python (PYTHON, default python3) with torch, transformers, accelerate and safetensors, and on a GPU
# a C compiler; eyas need not be installed. Nothing is downloaded. By count 15 GB of temporary files go to TMPDIR. It stops by
# itself after 8 minutes.
set -euo pipefail

python=${PYTHON:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
limit=480

# tests/typing has the package as links, laid out as it is when installed. The folder that this is called from may have a
# package `tests` of its own.
export PYTHONPATH="$root:$root/tests/typing${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

"$python" "$root/tests/gpu/packages.py" || exit 2

work=$(mktemp -d "${TMPDIR:-/tmp}/eyas-gpu-check.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/files" "$work/compiled"
export TORCHINDUCTOR_CACHE_DIR="$work/compiled/inductor" TRITON_CACHE_DIR="$work/compiled/triton"

# timeout gives the check a process group of its own and signals all of it, so that no process of a step outlives the check.
stopped=0
check=
stop() {
  stopped=1
  [ -z "$check" ] || kill -TERM "$check" 2> /dev/null
}
trap stop INT TERM
timeout --kill-after=10 "$limit" "$python" -m tests.gpu.check --work "$work/files" "$@" &
check=$!
[ "$stopped" = 0 ] || stop
while :; do
  code=0
  wait "$check" || code=$?
  kill -0 "$check" 2> /dev/null || break # a trapped signal ended the wait, not the check
done
if [ "$code" = 124 ] || [ "$code" = 137 ]; then
  echo "error: stopped after $limit s; what is printed above was measured" >&2
fi
exit "$code"
