#!/bin/sh
# Check one NVIDIA card: bits of the Triton kernels against the torch definition, their bandwidth against a device copy for
# 0.1, 1 and 4 G parameters, then four replicas of a 30 M Llama for up to six minutes (benchmarks/gpu_simulation.py).
# Arguments go to benchmarks/gpu_check.py, for example --out FILE (JSON).
# Needs a Python with a CUDA build of torch and this package's dependencies: PYTHON names it, else .venv, else python3.
# Exit code: 0 all bits and all replicas equal, 1 some differ, 2 nothing could be checked.
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m benchmarks.gpu_check "$@"
