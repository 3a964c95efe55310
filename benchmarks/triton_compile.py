"""Compile the Triton kernels for a card that need not be there, and say what came out.

    python -m benchmarks.triton_compile [--capability 90] [--out FILE]

For every variant: registers, bytes spilled to memory, widths of global accesses and float instructions. Fails if a
product is fused with a sum, or small numbers are flushed to zero: either would change bits. Needs Triton, no card.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # interpreted functions cannot be compiled

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparseloco.kernels import triton_common, triton_encode, triton_settle

FLOAT32 = {"start", "residual", "anchor", "velocity", "update"}
FLOAT64 = {"sums", "squares"}
PARAMETERS = {"live", "snapshot", "tensor"}
OTHERS = {
    "index": "*i16", "code": "*u8", "scale": "*i16", "flags": "*i8", "refused_at": "*i8", "weights": "*i32",
    "table": "*i64", "decay": "fp32", "low": "fp32", "high": "fp32", "cols": "i64",
}  # fmt: skip
ALIGNED = {"row_stride", "snapshot_stride", "col_offset", "cols"}
# Launches turn these into constants where they are 1, as for a vector.
ONES = {"row_stride", "snapshot_stride"}


def type_of(name: str, bf16: bool) -> str:
    """Triton's name of the type of a kernel's argument."""
    if name in PARAMETERS:
        return "*i16" if bf16 else "*fp32"
    if name in FLOAT32:
        return "*fp32"
    return "*fp64" if name in FLOAT64 else OTHERS.get(name, "i32")


def compiled(kernel: Any, constants: dict[str, Any], capability: int, warps: int) -> Any:
    """One variant, launched as :mod:`sparseloco.kernels.triton_blocks` launches it."""
    names = kernel.arg_names
    types = {n: "constexpr" if n in constants else type_of(n, constants["BF16"]) for n in names}
    aligned = [i for i, n in enumerate(names) if types[n].startswith("*") or (n in ALIGNED and n not in constants)]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def variants() -> dict[str, tuple[Any, dict[str, Any], int]]:
    """Kernel, constants and warps by name."""
    tile = {"ROWS": 64, "COLS": 64, "BLOCK": 4096}
    encode = {"FEEDBACK": True, "DECAYS": True}
    settle = {"KEPT_BLOCK": 64, "COUNTED": True, "STEP": True, "SHRINKS": False, "VELOCITY": False, "NESTEROV": False}
    found: dict[str, tuple[Any, dict[str, Any], int]] = {}
    for bf16 in (False, True):
        kind = "bfloat16" if bf16 else "float32"
        found[f"sanity {kind}"] = (triton_common.sanity_kernel, {"BLOCK": 4096, "BF16": bf16}, 4)
        found[f"encode {kind}"] = (triton_encode.encode_kernel, {**tile, **encode, "BF16": bf16}, 8)
        found[f"settle {kind}"] = (triton_settle.settle_kernel, {**tile, **settle, "BF16": bf16, "MERGE": "replace"}, 8)
    full = {**tile, **settle, "BF16": True, "SHRINKS": True, "VELOCITY": True, "NESTEROV": True, "COUNTED": False}
    found["settle nesterov blend"] = (triton_settle.settle_kernel, {**full, "MERGE": "blend"}, 8)
    found["settle nesterov carry"] = (triton_settle.settle_kernel, {**full, "MERGE": "carry"}, 8)
    found["settle merge only"] = (triton_settle.settle_kernel, {**full, "STEP": False, "MERGE": "carry"}, 8)
    single = {"ROWS": 1, "COLS": 1, "BLOCK": 1, "BF16": False}
    for name, kernel, rest in (
        ("encode one value", triton_encode.encode_kernel, encode),
        ("settle one value", triton_settle.settle_kernel, {**settle, "KEPT_BLOCK": 1, "MERGE": "replace"}),
    ):
        ones = {n: 1 for n in kernel.arg_names if n in ONES}
        found[name] = (kernel, {**single, **rest, **ones}, 1)
    ragged = {"ROWS": 50, "COLS": 13, "BLOCK": 1024, "BF16": True, "FEEDBACK": False, "DECAYS": False}
    found["encode ragged"] = (triton_encode.encode_kernel, ragged, 2)
    return found


def described(kernel: Any) -> dict[str, Any]:
    """What the machine code of a variant is made of."""
    ptx = kernel.asm["ptx"]
    usage = resources(kernel.asm["cubin"])
    return {
        **usage,
        "float_instructions": sorted(set(re.findall(r"\b(?:add|sub|mul|div|fma|mad)\.[a-z.]*f(?:32|64)\b", ptx))),
        "fused": len(re.findall(r"\b(?:fma|mad)\.[a-z.]*f(?:32|64)\b", ptx)),
        "flushing": ptx.count(".ftz"),
        "wide_accesses": len(re.findall(r"\b(?:ld|st)\.global\S*\.v[24]", ptx)),
        "barriers": len(re.findall(r"\bbar\.sync", ptx)),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack of machine code, by the tool that Triton's package brings along."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", text))
    return {"registers": int(found["REG"]), "spilled_bytes": int(found["STACK"])}


def main(arguments: list[str] | None = None) -> int:
    """Compile, print, and fail where bits would change."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--capability", type=int, default=90, help="compute capability, 90 for H100 and H200")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    options = parser.parse_args(arguments)
    table = {name: described(compiled(k, c, options.capability, w)) for name, (k, c, w) in variants().items()}
    for name, row in table.items():
        print(f"{name:22} " + "  ".join(f"{key} {value}" for key, value in row.items() if key != "float_instructions"))
    if options.out:
        options.out.write_text(json.dumps(table, indent=1) + "\n")
    broken = [name for name, row in table.items() if row["fused"] or row["flushing"]]
    if broken:
        print(f"kernels={broken}: must not fuse or flush; launch them with enable_fp_fusion=False", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
