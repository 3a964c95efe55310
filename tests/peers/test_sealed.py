"""Frames with their signatures: forged, replayed and foreign ones are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseloco.errors import WireError
from sparseloco.peers.canonical import sha256
from sparseloco.peers.sealed import TRAILER_BYTES, open_frame, seal_frame
from tests.peers.runs import identity

RUN, FRAME = "0123456789abcdef", b"bytes of a frame"
PLACE, DATA = seal_frame(FRAME, identity(1), RUN, 41, 2)


def test_a_frame_comes_back_and_names_its_place() -> None:
    assert bytes(open_frame(DATA, PLACE, RUN)) == FRAME
    assert (PLACE.round, PLACE.fragment, PLACE.peer, PLACE.part) == (41, 2, identity(1).peer_id, 0)
    assert PLACE.hash == sha256(DATA)
    assert len(DATA) == len(FRAME) + TRAILER_BYTES
    assert seal_frame(FRAME, identity(1), RUN, 41, 2) == (PLACE, DATA)


def test_a_replayed_frame_is_refused() -> None:
    """C-70: of another round, fragment or run; and under another peer's name."""
    for place in (replace(PLACE, round=42), replace(PLACE, fragment=1), replace(PLACE, part=1)):
        with pytest.raises(
            WireError, match=r"the signature is not for this run, round, fragment and content; refuse it$"
        ):
            open_frame(DATA, place, RUN)
    with pytest.raises(WireError, match="the signature is not for this run"):
        open_frame(DATA, PLACE, "f" * 16)
    with pytest.raises(
        WireError, match=r"^peer [0-9a-f]{32}, round 41: the key in the frame is another peer's; refuse it$"
    ):
        open_frame(DATA, replace(PLACE, peer=identity(2).peer_id), RUN)


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_every_changed_byte_is_refused(where: int, flip: int) -> None:
    with pytest.raises(WireError):
        open_frame(DATA[:where] + bytes([DATA[where] ^ flip]) + DATA[where + 1 :], PLACE, RUN)


@pytest.mark.parametrize("size", [0, 1, TRAILER_BYTES])
def test_too_little_is_refused(size: int) -> None:
    with pytest.raises(WireError, match=rf"frame={size} bytes: must be more than {TRAILER_BYTES}; refuse it$"):
        open_frame(DATA[:size], PLACE, RUN)
