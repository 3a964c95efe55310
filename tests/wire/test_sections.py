"""Packed payloads: parts are made when asked for, never kept, and no more of them than needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparseloco import DivergenceError, presets, sections, sgd
from sparseloco.compress import Dense, TopK
from sparseloco.kernels import codec
from sparseloco.sections import (
    PackedSection,
    pack_section,
    recode_section,
    section_bytes,
    section_lengths,
    specs_by_block,
    split_body,
    unpack_section,
)
from sparseloco.simulate import Cohort
from sparseloco.types import Coding, Payload
from sparseloco.wire import HEADER_BYTES, decode, encode
from tests import toy
from tests.contracts.cases import COMPRESSORS
from tests.driver import ROWS
from tests.wire.frames import FINGERPRINT, RUN, envelope_of, payload_of, same_payload

SHAPES: list[tuple[int, ...]] = [(20, 30), (), (127,), (0,)]
any_coding = pytest.mark.parametrize("coding", list(Coding), ids=lambda coding: coding.name)


def received(payload: Payload, coding: Coding) -> Payload:
    frame = encode(envelope_of(payload), RUN, coding)
    return decode(frame, payload.specs, FINGERPRINT, RUN).payload


@pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
@any_coding
def test_a_received_payload_is_packed_and_says_the_same(compressor: Any, coding: Coding) -> None:
    sent = payload_of(compressor, SHAPES)
    packed = received(sent, coding)
    assert all(isinstance(section, PackedSection) for section in packed.sections.values())
    assert list(packed.blocks) == list(sent.blocks)
    assert len(packed.blocks) == len(sent.sections)
    same_payload(packed, sent)
    assert not list(packed.floats())


def test_parts_are_not_kept() -> None:
    packed = received(payload_of(TopK(k=5, chunk_size=64), SHAPES), Coding.COMPACT)
    first, second = packed.blocks[0]["index"], packed.blocks[0]["index"]
    assert first is not second
    first.zero_()
    assert torch.equal(packed.blocks[0]["index"], second)
    assert packed.blocks is not packed.blocks
    assert all(set(vars(section)) == {"specs", "data", "coding"} for section in packed.sections.values())


def test_a_payload_may_hold_parts_and_packed_bytes_of_both_codings() -> None:
    sent = payload_of(TopK(k=5, chunk_size=64), SHAPES)
    one, two = received(sent, Coding.FIXED), received(sent, Coding.COMPACT)
    mixed = Payload(sent.specs, {0: sent.sections[0], 1: one.sections[1], **dict(list(two.sections.items())[2:])})
    same_payload(mixed, sent)
    for coding in Coding:
        assert encode(envelope_of(mixed), RUN, coding) == encode(envelope_of(sent), RUN, coding)


@any_coding
def test_sections_are_found_from_the_tables_alone(coding: Coding, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = payload_of(TopK(k=5, chunk_size=64), SHAPES)
    blocks = specs_by_block(sent.specs)
    pieces = {j: pack_section(rows, sent.blocks[j], coding) for j, rows in blocks.items()}
    body = encode(envelope_of(sent), RUN, coding)[HEADER_BYTES:]
    assert body == b"".join(pieces.values())
    monkeypatch.setattr(codec, "decode", forbidden)
    for name in ("unpack", "_as_floats"):
        monkeypatch.setattr(sections, name, forbidden)
    assert section_lengths(blocks, body, coding) == [len(piece) for piece in pieces.values()]
    if coding == Coding.FIXED:
        assert [section_bytes(rows) for rows in blocks.values()] == [len(piece) for piece in pieces.values()]


@any_coding
def test_one_block_decodes_alone(coding: Coding) -> None:
    sent = payload_of(TopK(k=5, chunk_size=64), SHAPES)
    body = encode(envelope_of(sent), RUN, coding)[HEADER_BYTES:]
    packed = split_body(specs_by_block(sent.specs), body, coding)
    rows = specs_by_block(sent.specs)[2]
    parts = unpack_section(rows, bytes(packed[2].data), coding)
    assert all(torch.equal(parts[spec.name], sent.blocks[2][spec.name]) for spec in rows)


def test_recoding_makes_no_position(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = payload_of(TopK(k=5, chunk_size=64), SHAPES)
    for j, rows in specs_by_block(sent.specs).items():
        fixed, compact = (pack_section(rows, sent.blocks[j], coding) for coding in Coding)
        with monkeypatch.context() as patch:
            patch.setattr(codec, "decode", forbidden)
            patch.setattr(codec, "encode", forbidden)
            assert recode_section(rows, fixed, Coding.FIXED, Coding.COMPACT) == compact
            assert recode_section(rows, compact, Coding.COMPACT, Coding.FIXED) == fixed
            assert recode_section(rows, memoryview(fixed), Coding.FIXED, Coding.FIXED) == fixed


def forbidden(*_: object, **__: object) -> Any:
    raise AssertionError("unpacked")


@pytest.mark.parametrize("compressor", [TopK(k=5, chunk_size=64), Dense()], ids=["top-k", "dense"])
def test_the_check_of_an_inbox_unpacks_nothing(compressor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-06 again: frames were checked when they came; what was never a frame is looked at."""
    cohort = Cohort(toy.net(), presets.sparseloco(inner_steps=1, k=5, tile=8, inner=sgd(0.1)), 2)
    channel, state = cohort.replicas[0].lanes[0].channel, cohort.replicas[0].lanes[0].state
    packed = received(payload_of(compressor, SHAPES), Coding.COMPACT)
    broken: dict[int, Any] = dict(packed.sections)
    scale = next(name for name, part in packed.blocks[1].items() if part.is_floating_point())
    broken[1] = {**packed.blocks[1], scale: torch.full_like(packed.blocks[1][scale], torch.nan)}
    monkeypatch.setattr(codec, "decode", forbidden)
    monkeypatch.setattr(sections, "unpack", forbidden)
    channel.check_finite([envelope_of(packed)], state)
    with pytest.raises(DivergenceError, match=r"payload of peer 5, round 41, .*=not finite"):
        channel.check_finite([envelope_of(Payload(packed.specs, broken))], state)


@pytest.mark.parametrize("row", ["sparseloco_delayed", "diloco", "streaming_diloco", "demo"])
def test_replicas_hold_what_arrives_as_bytes(row: str) -> None:
    """A message in flight is saved as its parts, packed or not, and the same either way."""
    cohort = Cohort(toy.net(), ROWS[row](), 2)
    for step in range(1, 5):
        for peer in range(2):
            with cohort.turn(peer):
                toy.loss_of(cohort.model, toy.batch(step, peer)).backward()
                cohort.advance(peer)
        if cohort.replicas[0].in_flight():
            break
        cohort.settle()
    key = cohort.replicas[0].in_flight()[0]
    lane = cohort.replicas[0].lanes[key.fragment]
    inbox = cohort.transport.collect(key)
    assert all(isinstance(s, PackedSection) for envelope in inbox for s in envelope.payload.sections.values())
    sent = lane.in_flight[key.round]
    before = in_flight(lane.private_state(key.fragment))
    assert before
    lane.in_flight[key.round] = sent._replace(payload=inbox[0].payload)
    after = in_flight(lane.private_state(key.fragment))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def in_flight(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if "/payload/" in name}
