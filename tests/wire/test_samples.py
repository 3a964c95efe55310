"""Stored frames decode for ever, and a second reader, written from the page alone, reads what ours writes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseloco.compress import Compressor
from sparseloco.sections import specs_by_block
from sparseloco.types import Coding, PartSpec
from sparseloco.wire import decode, encode
from tests.contracts.cases import COMPRESSORS
from tests.wire import frames
from tests.wire.second_reader import read_frame
from tools.make_wire_samples import MOST_VALUES, as_row

FOLDER = Path(__file__).parent / "samples"
SAMPLES: list[dict[str, Any]] = json.loads((FOLDER / "samples.json").read_text())
HEADER = ("peer", "round", "fragment", "weight")

any_coding = pytest.mark.parametrize("coding", list(Coding), ids=lambda coding: coding.name)
any_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["name"])


def stored(sample: dict[str, Any], coding: Coding) -> bytes:
    return (FOLDER / f"{sample['name']}.{coding.name.lower()}.frame").read_bytes()


def specs_of(sample: dict[str, Any]) -> tuple[PartSpec, ...]:
    """The part table, from the words of the page."""
    specs: list[PartSpec] = []
    for row in sample["table"]:
        name, shape, size = f"{row['block']}.{row['name']}", tuple(row["shape"]), row.get("chunk_size", 0)
        if row["type"] == "positions":
            specs.append(PartSpec(name, shape, torch.int16 if size <= 2**15 else torch.int32, 0, size))
        elif row["type"] == "integers":
            specs.append(PartSpec(name, shape, torch.uint8 if row["bits"] <= 8 else torch.int32, row["bits"]))
        else:
            dtype = getattr(torch, row["type"])
            specs.append(PartSpec(name, shape, dtype, 8 * dtype.itemsize, signed=row["signed"]))
    return tuple(specs)


def expected(values: list[Any], sample: dict[str, Any], name: str) -> None:
    wanted = sample["values"][name]
    if isinstance(wanted, str):
        assert hashlib.sha256(json.dumps(values).encode()).hexdigest() == wanted
    else:
        assert values == wanted


@any_sample
@any_coding
def test_stored_frames_decode_for_ever(sample: dict[str, Any], coding: Coding) -> None:
    frame, specs = stored(sample, coding), specs_of(sample)
    envelope = decode(frame, specs, sample["fingerprint"], bytes.fromhex(sample["run"]))
    header = (envelope.peer, *envelope.key, envelope.weight)
    assert header == tuple(sample[name] for name in HEADER)
    assert (envelope.digest, envelope.payload.linear) == (sample["digest"], sample["linear"])
    for (block, name), values in frames.plain_values(envelope.payload).items():
        expected(values, sample, f"{block}.{name}")
    assert len(sample["values"]) == (len(specs) if sample["weight"] else 0)
    for other in Coding:
        assert encode(envelope, bytes.fromhex(sample["run"]), other) == stored(sample, other)


@any_sample
@any_coding
def test_the_second_reader_reads_stored_frames(sample: dict[str, Any], coding: Coding) -> None:
    frame = read_frame(stored(sample, coding), sample["table"])
    assert [frame.header[name] for name in HEADER] == [sample[name] for name in HEADER]
    assert frame.header["digest"].hex() == sample["digest"]
    assert frame.header["flags"] == sample["linear"] + 2 * coding
    assert len(frame.parts) == len(sample["values"])
    for (block, name), values in frame.parts.items():
        expected(values, sample, f"{block}.{name}")


def test_samples_hold_every_kind_of_part() -> None:
    rows = [row for sample in SAMPLES for row in sample["table"]]
    assert {row["type"] for row in rows} == {"positions", "integers", "float32", "bfloat16"}
    assert {1, 2, 4, 12} <= {row["bits"] for row in rows if row["type"] == "integers"}
    assert {7, 9, 300, 1000, 66000, 70000} <= {row["chunk_size"] for row in rows if row["type"] == "positions"}
    assert max(len(values) for sample in SAMPLES for values in sample["values"].values()) <= MOST_VALUES


@pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@any_coding
def test_the_second_reader_reads_any_payload(compressor: Compressor, dtype: torch.dtype, coding: Coding) -> None:
    payload = frames.payload_of(compressor, [(20, 30), (), (127,), (0,), (4, 3, 3)], dtype)
    frame = read_frame(encode(frames.envelope_of(payload), frames.RUN, coding), [as_row(s) for s in payload.specs])
    assert frame.parts == frames.plain_values(payload)
    assert {block for block, _ in frame.parts} == set(specs_by_block(payload.specs))
