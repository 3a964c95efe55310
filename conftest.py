"""Optional packages: what must be said, or left out, before the first test is collected."""

from __future__ import annotations

import importlib.util
import os

# Kernels run on the CPU, in Triton's interpreter; it looks once, when anything imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["src/sparseloco/kernels/triton_*.py"]
