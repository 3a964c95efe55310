#!/bin/sh
# Build the native kernels into the source tree, for work on them: `tools/native.sh`, then run Python with PYTHONPATH=src.
# PYTHON is the interpreter to build for; it needs nanobind, and cmake must be on PATH.
set -eu
cd "$(dirname "$0")/.."
cmake -S . -B build/native/dev -DPython_EXECUTABLE="$(command -v "${PYTHON:-python}")" >/dev/null
cmake --build build/native/dev --parallel 2
cp build/native/dev/_native*.so src/sparseloco/kernels/
