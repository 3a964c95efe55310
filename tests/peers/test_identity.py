"""Keys, key files and signatures."""

from __future__ import annotations

import copy
import os
import stat
import sys
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseloco.errors import ConfigError
from sparseloco.peers.identity import Domain, Identity, peer_id_of, verify
from tests.peers.runs import identity

# RFC 8032, section 7.1, test 1: secret and public key.
RFC_SEED = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"
RFC_PUBLIC = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"


def test_keys_are_those_of_the_standard() -> None:
    me = Identity(bytes.fromhex(RFC_SEED))
    assert me.public == RFC_PUBLIC
    assert me.peer_id == peer_id_of(RFC_PUBLIC) == "21fe31dfa154a261626bf854046fd227"


def test_a_public_key_has_one_form() -> None:
    for other in (RFC_PUBLIC.upper(), RFC_PUBLIC[:-1], RFC_PUBLIC + "\n", "x"):
        with pytest.raises(ConfigError, match=r"must be 64 lower-case hex digits; copy it whole$"):
            peer_id_of(other)


def test_a_key_comes_back_from_its_file(tmp_path: Path) -> None:
    me = Identity.generate()
    me.save(tmp_path / "key")
    assert stat.S_IMODE(os.stat(tmp_path / "key").st_mode) == 0o600
    assert Identity.load(tmp_path / "key").public == me.public


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    Identity.generate().save(tmp_path / "key")
    before = (tmp_path / "key").read_bytes()
    with pytest.raises(ConfigError, match="must not exist yet, since a lost key cannot be made again; choose another"):
        Identity.generate().save(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    Identity.generate().save(tmp_path / "key")
    for mode in (0o640, 0o604, 0o660):
        os.chmod(tmp_path / "key", mode)
        with pytest.raises(ConfigError, match=rf"but has mode {mode:03o}; run chmod 600 on it"):
            Identity.load(tmp_path / "key")


@pytest.mark.parametrize("content", [b"", b"rubbish\n", b"sparseloco secret key 1\n12\n", b"\xff" * 90])
def test_other_files_are_refused_without_showing_them(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="must be a key file of this library; name the right file") as refused:
        Identity.load(path)
    assert refused.value.__cause__ is None
    with pytest.raises(ConfigError, match="sparseloco run keygen"):
        Identity.load(tmp_path / "none")


def test_the_secret_is_nowhere_to_be_seen(tmp_path: Path) -> None:
    me = Identity(bytes.fromhex(RFC_SEED))
    for text in (repr(me), str(me), f"{me}", str(vars(type(me))["__slots__"])):
        assert RFC_SEED not in text
    assert not hasattr(me, "__dict__")
    for copying in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="must not be pickled or copied"):
            copying(me)
    with pytest.raises(ConfigError, match=r"^seed=31 bytes: must be 32 bytes; take Identity.generate\(\)$"):
        Identity(b"s" * 31)


def test_each_domain_and_field_is_covered() -> None:
    me = identity(1)
    signature = me.sign(Domain.FRAME, "run", 1, 2, body=b"x")
    assert len(signature) == 64
    assert verify(me.public, signature, Domain.FRAME, "run", 1, 2, body=b"x")
    assert not any(
        verify(me.public, signature, domain, "run", 1, 2, body=b"x") for domain in Domain if domain != Domain.FRAME
    )
    for fields in [("rum", 1, 2), ("run", 2, 1), ("run", 1), ("run", 1, 2, 0), ("run", "1", 2), ("ru", "n", 1, 2)]:
        assert not verify(me.public, signature, Domain.FRAME, *fields, body=b"x")
    assert not verify(me.public, signature, Domain.FRAME, "run", 1, 2, body=b"y")
    assert not verify(identity(2).public, signature, Domain.FRAME, "run", 1, 2, body=b"x")
    assert len({domain.value for domain in Domain}) == len(Domain)
    assert not any(one.value.startswith(two.value) for one, two in combinations(Domain, 2))


@given(st.binary(max_size=100), st.text(max_size=70))
def test_rubbish_is_no_signature_and_no_key(signature: bytes, public: str) -> None:
    assert not verify(identity(1).public, signature, Domain.FRAME, body=b"")
    assert not verify(public, identity(1).sign(Domain.FRAME, body=b""), Domain.FRAME, body=b"")
    assert not verify("0" * 64, signature.ljust(64, b"\0")[:64], Domain.FRAME, body=b"")


def test_without_pynacl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nacl.signing", None)
    with pytest.raises(ConfigError, match=r"need the package pynacl, .* run pip install 'sparseloco\[peers\]'"):
        Identity.generate()
