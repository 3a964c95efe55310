"""Tensors and plain values as bytes that are the same at every peer, and back.

A safetensors file, so that any tool can look into it, with all that the format leaves open decided: tensors by size of
their items and then by name, keys sorted, one metadata entry. Bytes must be known to be whole before they are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparseloco.errors import CheckpointError
from sparseloco.lane import StateDict

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_METADATA = "sparseloco"
_ALIGNMENT = 8


def pieces(state: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    """The bytes of a state, one tensor at a time.

    Args:
        state: Tensors and plain numbers or strings by path.
        facts: Plain values to go along.

    Raises:
        CheckpointError: for a value that is neither a tensor of a known type nor plain.
    """
    tensors = {path: value.detach() for path, value in state.items() if isinstance(value, Tensor)}
    plain = {path: value for path, value in state.items() if path not in tensors}
    for path, value in [*plain.items(), *tensors.items()]:
        known = value.dtype in _DTYPES if isinstance(value, Tensor) else isinstance(value, (bool, int, float, str))
        if not known:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(f"{path}={kind}: must be a tensor or a plain value to be stored; convert it")
    order = sorted(tensors, key=lambda path: (-tensors[path].itemsize, path))
    header: dict[str, Any] = {"__metadata__": {_METADATA: _json({"facts": dict(facts), "values": plain}).decode()}}
    end = 0
    for path in order:
        start, end = end, end + tensors[path].nbytes
        shape = list(tensors[path].shape)
        header[path] = {"dtype": _DTYPES[tensors[path].dtype], "shape": shape, "data_offsets": [start, end]}
    encoded = _json(header)
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    yield len(encoded).to_bytes(8, "little") + encoded
    for path in order:
        yield tensors[path].cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def pack(state: Mapping[str, Any], facts: Mapping[str, Any]) -> bytes:
    """All of :func:`pieces` together."""
    return b"".join(pieces(state, facts))


def sha256_of(state: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Hash of :func:`pack`, without making it."""
    digest = hashlib.sha256()
    for piece in pieces(state, facts):
        digest.update(piece)
    return digest.hexdigest()


def unpack(data: bytes) -> tuple[StateDict, dict[str, Any]]:
    """State and facts of :func:`pack`.

    Raises:
        CheckpointError: if it is something else.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        state: StateDict = dict(load(data))
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        extra = json.loads(header["__metadata__"][_METADATA])
        return state | extra["values"], extra["facts"]
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"state={len(data)} bytes: must be a safetensors file of this library; get it anew"
        ) from error


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
