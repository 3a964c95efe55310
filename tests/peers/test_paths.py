"""Paths of a run: what is made is taken apart again, and nothing else is taken."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseloco.errors import WireError
from sparseloco.peers import paths

PEER, HASH = "0a" * 16, "3f" * 32
EXAMPLES = {
    "run.json": paths.Run(),
    "tokenizer.json": paths.Tokenizer(),
    "amend/00000003.json": paths.Amend(3),
    "slots/00000012.json": paths.Slot(12),
    f"anchors/00000016/{PEER}/index.json": paths.Anchor(16, PEER, "index.json"),
    f"anchors/00000016/{PEER}/shared-0001.safetensors": paths.Anchor(16, PEER, "shared-0001.safetensors"),
    f"rounds/00000041/0002/{PEER}/0000-{HASH}.frame": paths.Frame(41, 2, PEER, 0, HASH),
    f"rounds/00000041/0002/{PEER}/want-{HASH}": paths.Want(41, 2, PEER, HASH),
    f"rounds/00000041/0002/{PEER}/relay-{HASH}.frame": paths.Relay(41, 2, PEER, HASH),
    "rounds/00000041/0002/manifest-0001.json": paths.Manifest(41, 2, 1),
    f"peers/{PEER}/lease.json": paths.Lease(PEER),
    f"peers/{PEER}/key.json": paths.PublicKey(PEER),
}


@pytest.mark.parametrize("path", EXAMPLES)
def test_paths_are_as_the_design_has_them(path: str) -> None:
    assert str(EXAMPLES[path]) == path
    assert paths.parse(path) == EXAMPLES[path]


def test_every_kind_has_an_example() -> None:
    assert {type(named) for named in EXAMPLES.values()} == set(paths.KINDS)


@pytest.mark.parametrize(
    "path",
    [
        "", "/run.json", "run.json/", "run.json\n", "run.json\0", "../run.json", "./run.json", "RUN.JSON",
        "amend/3.json", "amend/000000003.json", "amend/-0000001.json", "amend/0000000\u0663.json",
        f"peers/{PEER.upper()}/key.json", f"peers/{PEER[:-1]}/key.json", f"peers/{PEER}//key.json",
        f"peers/../peers/{PEER}/key.json", f"peers/{PEER}/key.json\x1b[2J",
        f"rounds/00000041/0002/{PEER}/0000-{HASH.upper()}.frame", f"rounds/41/0002/{PEER}/0000-{HASH}.frame",
        f"rounds/00000041/0002/{PEER}/0000-{HASH}.frame.frame", "rounds/00000041/0002/manifest-1.json",
        f"anchors/00000016/{PEER}/../../run.json", f"anchors/00000016/{PEER}/.hidden",
        f"anchors/00000016/{PEER}/a.b.c", f"anchors/00000016/{PEER}/" + "a" * 70, "run.json" * 10_000,
    ],
)  # fmt: skip
def test_other_paths_are_refused(path: str) -> None:
    """C-69: names from a store are attacks until parsed."""
    with pytest.raises(WireError, match=r"must be a path of a run; leave the object alone$") as refused:
        paths.parse(path)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


@given(st.text(alphabet="/.0123456789abcdefjlmnoprstuw-~\n\\", max_size=150))
def test_what_is_taken_can_be_made_again(path: str) -> None:
    try:
        assert str(paths.parse(path)) == path
    except WireError:
        assert path not in EXAMPLES


@given(st.sampled_from(sorted(EXAMPLES)), st.data())
def test_a_changed_character_is_refused_or_names_something_else(path: str, data: st.DataObject) -> None:
    where = data.draw(st.integers(0, len(path) - 1))
    changed = path[:where] + data.draw(st.characters()) + path[where + 1 :]
    try:
        assert str(paths.parse(changed)) == changed
    except WireError:
        assert changed != path


@pytest.mark.parametrize(
    "named",
    [
        paths.Amend(10**8),
        paths.Amend(-1),
        paths.Frame(0, 10**4, PEER, 0, HASH),
        paths.Lease("../x"),
        paths.Lease("A" * 32),
    ],
)
def test_what_would_not_be_taken_is_not_made(named: paths.RunPath) -> None:
    with pytest.raises(WireError, match="must be a path of a run; check its numbers and names"):
        str(named)


def test_listings_sort_by_number() -> None:
    rounds = [str(paths.Manifest(round, 0, attempt)) for round in (0, 9, 10, 99_999_999) for attempt in (0, 2, 11)]
    assert rounds == sorted(rounds)
    assert paths.round_prefix(41, 2) == "rounds/00000041/0002/"
    assert all(
        str(named).startswith(paths.round_prefix(41, 2)) for named in EXAMPLES.values() if hasattr(named, "fragment")
    )
    assert not re.search(r"manifest", paths.round_prefix(0, 0))
