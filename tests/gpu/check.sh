#!/usr/bin/env bash
# Is eyas right on this GPU, and how fast? Numerics against the CPU, throughput, MFU, memory, extraction speed.
#
#   bash tests/gpu/check.sh [--out FILE]     one GPU; the random target of Llama-3.1-8B's size takes 16 GB of it
#   bash tests/gpu/check.sh --dry            tiny shapes, on the CPU where there is no GPU
#
# Needs a checkout and a Python (PYTHON, default python3) with torch, transformers, accelerate and safetensors; eyas need
# not be installed. Nothing is downloaded. About 15 GB of temporary files go to TMPDIR. It stops by itself after 8 minutes.
set -euo pipefail

python=${PYTHON:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
limit=480

# tests/typing has the package as links, laid out as it is when installed.
export PYTHONPATH="$root:$root/tests/typing${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

"$python" - <<'EOF' || exit 2
import importlib.util, sys

if sys.version_info < (3, 11):
    sys.exit(f"error: {sys.executable} is Python {sys.version.split()[0]}, and 3.11 or later is needed; name one: PYTHON=...")
wanted = ("torch", "transformers", "accelerate", "safetensors")
missing = [name for name in wanted if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"error: {sys.executable} has no {', '.join(missing)}; install what is missing, or name another Python: PYTHON=...")
EOF

work=$(mktemp -d "${TMPDIR:-/tmp}/eyas-gpu-check.XXXXXX")
trap 'rm -rf "$work"' EXIT

code=0
timeout --foreground --kill-after=10 "$limit" "$python" -m tests.gpu.check --work "$work" "$@" || code=$?
if [ "$code" = 124 ]; then
  echo "error: stopped after $limit s; what is printed above was measured" >&2
fi
exit "$code"
