"""One part of a checkpoint as a file of safetensors: nested state, whose tree is JSON in the header.

Knows tensors and plain values; must not know what they mean, or where the file lies. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseloco.errors import CheckpointError
from sparseloco.reshard_state import StoredTensor


class Packed(NamedTuple):
    """A part as JSON and tensors by name."""

    tree: str
    tensors: dict[str, Tensor]


def packed(name: str, state: Any) -> Packed:
    """State of a part as it is now in all that is not a tensor, to be written later.

    Raises:
        CheckpointError: naming what is neither a tensor nor a plain value.
    """
    tensors: dict[str, Tensor] = {}
    return Packed(json.dumps(_pack(state, name, tensors)), tensors)


def as_bytes(part: Packed, digest: str = "") -> bytes:
    """The file, with a digest beside its tensors if there is one."""
    from safetensors.torch import save

    return save(_separate(part.tensors), metadata={"state": part.tree, **({"digest": digest} if digest else {})})


def unpacked(data: bytes) -> Any:
    """The state that a file holds."""
    from safetensors.torch import load

    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return _unpack(json.loads(header["__metadata__"]["state"]), load(data))


def stored(path: Path) -> Any:
    """The state that a file holds, with every tensor still on the disk."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tensors = {
            key: StoredTensor(tuple(file.get_slice(key).get_shape()), partial(_read_rows, path, key))
            for key in file.keys()  # noqa: SIM118  # it is no dictionary
        }
    return _unpack(json.loads(metadata_of(path)["state"]), tensors)


def metadata_of(path: Path) -> dict[str, str]:
    """What the header of a file of safetensors says beside its tensors."""
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]


def _read_rows(path: Path, key: str, rows: tuple[int, int] | None) -> Tensor:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return file.get_tensor(key) if rows is None else file.get_slice(key)[rows[0] : rows[1]]


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON, with its tensors moved to ``tensors`` and named by their paths."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu()
        return {"tensor": path}
    if isinstance(value, dict):
        # Pairs, since keys may be numbers.
        return {"dict": [[key, _pack(item, f"{path}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(item, f"{path}/{number}", tensors) for number, item in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(f"{path}={type(value).__name__}: must be a tensor or a plain value to be saved; convert it")


def _unpack(tree: Any, tensors: Mapping[str, Tensor | StoredTensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in value}
    items = [_unpack(item, tensors) for item in value]
    return items if kind == "list" else tuple(items)


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, each contiguous in memory of its own, as safetensors wants them."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        found[name] = (
            tensor if whole and tensor.data_ptr() not in seen else tensor.clone(memory_format=torch.contiguous_format)
        )
        seen.add(tensor.data_ptr())
    return found
