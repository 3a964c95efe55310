"""Write the stored frames of tests/wire/samples: `python tools/make_wire_samples.py FOLDER`.

Frames of a version decode for ever, so a folder that has samples is never written again: a new version of the format
gets a folder of its own. Expected values are those that went in, not what our own reader makes of the frames.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from sparseloco.channel import Channel
from sparseloco.compress import (
    Compressor,
    Dense,
    Float32,
    LowRank,
    Quantize,
    ScaledSign,
    SignOneLevel,
    Statistical,
    Stochastic,
    TopK,
)
from sparseloco.errors import ConfigError
from sparseloco.layout import Chunks, Layout, Tiles
from sparseloco.reduce import Mean
from sparseloco.types import Coding, Envelope, Key, PartSpec, Payload, Source, TensorSpec
from sparseloco.wire import encode

RUN = b"run-0001"
MOST_VALUES = 2000
RAGGED = [(20, 30), (), (7,), (0,), (4, 3, 3)]

# name: compressor, layout, shapes of the tensors. Small; every kind of part, and every number of bits there is.
CASES: dict[str, tuple[Compressor, Layout, list[tuple[int, ...]]]] = {
    "two-bit": (TopK(k=5, chunk_size=64), Tiles(8, 8), RAGGED),
    "one-bit": (TopK(k=5, chunk_size=64, values=SignOneLevel()), Tiles(8, 8), RAGGED),
    "float32-values": (TopK(k=5, chunk_size=64, values=Float32()), Tiles(8, 8), RAGGED),
    "statistical": (TopK(k=5, chunk_size=64, values=Statistical()), Tiles(8, 8), [(9, 10)]),
    "stochastic": (TopK(k=5, chunk_size=64, values=Stochastic()), Tiles(8, 8), [(9, 10)]),
    "two-groups": (TopK(k=130, chunk_size=300), Chunks(300), [(2850,)]),
    "all-kept": (TopK(k=9, chunk_size=9), Tiles(3, 3), [(7, 7)]),
    "one-kept": (TopK(k=1, chunk_size=1000), Chunks(1000), [(4100,)]),
    "wide-chunks": (TopK(k=4, chunk_size=70000), Chunks(70000), [(70000,)]),
    "long-table": (TopK(k=23000, chunk_size=66000, values=SignOneLevel()), Chunks(66000), [(66000,)]),
    "quantize": (Quantize(), Tiles(8, 8), RAGGED),
    "quantize-linear-12": (Quantize(12, "linear"), Tiles(8, 8), [(9, 10)]),
    "scaled-sign": (ScaledSign(), Tiles(8, 8), RAGGED),
    "dense": (Dense(), Tiles(8, 8), [(9, 10), (3,)]),
    "low-rank": (LowRank(2), Tiles(1000, 1000), [(9, 10), (3,)]),
    "empty": (TopK(k=5, chunk_size=64), Tiles(8, 8), [(0,)]),
    "abstained": (TopK(k=5, chunk_size=64), Tiles(8, 8), RAGGED),
}
ABSTAINED = "abstained"
"""The case of a peer that contributes nothing: weight 0."""


def payload_of(compressor: Compressor, layout: Layout, shapes: list[tuple[int, ...]], seed: int) -> Payload:
    channel = Channel(layout=layout, compressor=compressor, reducer=Mean())
    specs = [TensorSpec(f"t{i}", shape, torch.float32) for i, shape in enumerate(shapes)]
    state = channel.init(specs, [torch.zeros(shape) for shape in shapes])
    generator = torch.Generator().manual_seed(seed)
    sources = [Source(None, torch.randn(shape, generator=generator) ** 3) for shape in shapes]
    return channel.outgoing(sources, state, key=seed)


def as_row(spec: PartSpec) -> dict[str, Any]:
    """A row of the part table in the words of docs/wire-format.md."""
    block, _, name = spec.name.partition(".")
    row: dict[str, Any] = {"block": int(block), "name": name, "shape": list(spec.shape)}
    if spec.chunk_size:
        return {**row, "type": "positions", "chunk_size": spec.chunk_size}
    if spec.dtype.is_floating_point:
        return {**row, "type": str(spec.dtype).removeprefix("torch."), "signed": spec.signed}
    return {**row, "type": "integers", "bits": spec.bits}


def sample(name: str, payload: Payload, seed: int) -> dict[str, Any]:
    rows = [] if name == ABSTAINED else payload.specs
    values = {spec.name: _values(payload.tensors[spec.name], spec) for spec in rows}
    return {
        "name": name,
        "peer": 5 + seed,
        "round": 41,
        "fragment": 2,
        "weight": 0 if name == ABSTAINED else 17,
        "fingerprint": "0123456789abcdef",
        "digest": "00112233445566778899aabbccddeeff",
        "run": RUN.hex(),
        "linear": payload.linear,
        "table": [as_row(spec) for spec in payload.specs],
        "values": values,
    }


def _values(part: torch.Tensor, spec: PartSpec) -> list[Any] | str:
    """Positions by chunk, all else flat; of many the SHA-256 of their JSON."""
    values: list[Any] = part.tolist() if spec.chunk_size else part.reshape(-1).tolist()
    if part.numel() <= MOST_VALUES:
        return values
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def envelope_of(row: dict[str, Any], payload: Payload) -> Envelope:
    plain = {name: row[name] for name in ("peer", "weight", "fingerprint", "digest")}
    return Envelope(key=Key(row["round"], row["fragment"]), payload=payload, **plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if folder.exists():
        raise ConfigError(f"folder={folder}: must be new, since stored frames never change; name another")
    folder.mkdir(parents=True)
    rows: list[str] = []
    for seed, (name, case) in enumerate(CASES.items()):
        payload = payload_of(*case, seed)
        row = sample(name, payload, seed)
        for coding in Coding:
            frame = encode(envelope_of(row, payload), RUN, coding)
            (folder / f"{name}.{coding.name.lower()}.frame").write_bytes(frame)
        rows.append(json.dumps(row))
    (folder / "samples.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    main()
