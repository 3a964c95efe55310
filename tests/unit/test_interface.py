"""C-44: the interface of gloo is the one that leads to the rendezvous; a setting overrides, nothing is hard-coded."""

from __future__ import annotations

import os
import socket

import pytest

from sparseloco.errors import ConfigError
from sparseloco.transport import interface
from sparseloco.transport.interface import VARIABLE, choose_interface, find_interface

NAMES = [name for _, name in socket.if_nameindex()]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(VARIABLE)


def test_the_loopback_is_found_by_its_address_c44() -> None:
    found = find_interface("127.0.0.1")
    assert found in NAMES
    assert interface._ipv4_of(found or "") == "127.0.0.1"


def test_this_machine_is_reached_over_the_interface_that_has_its_address_c44() -> None:
    own = {name: address for name in NAMES if (address := interface._ipv4_of(name)) is not None}
    for name, address in own.items():
        assert find_interface(address) == name


def test_a_name_that_nobody_knows_leaves_the_choice_to_gloo() -> None:
    choose_interface("nobody.invalid")
    assert VARIABLE not in os.environ


def test_the_loopback_of_ipv6_is_found_where_there_is_one() -> None:
    if not socket.has_ipv6 or not interface.Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    rows = interface.Path("/proc/net/if_inet6").read_text().split()
    if "0" * 31 + "1" not in rows:
        pytest.skip("the loopback has no IPv6 address here")
    assert find_interface("::1") == find_interface("127.0.0.1")


def test_what_is_found_is_told_to_gloo_unless_somebody_has_said_it_c44(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_interface("127.0.0.1")
    assert os.environ[VARIABLE] == find_interface("127.0.0.1")
    monkeypatch.setenv(VARIABLE, "ib0")
    choose_interface("127.0.0.1")
    assert os.environ[VARIABLE] == "ib0"


def test_the_loopback_is_not_taken_for_ranks_on_other_machines_c44() -> None:
    """As where /etc/hosts gives the machine's own name a number of the loopback."""
    with pytest.warns(UserWarning, match=r"^MASTER_ADDR='localhost': leads to the loopback here, which the other mach"):
        choose_interface("localhost", is_here=False)
    assert VARIABLE not in os.environ


def test_the_setting_overrides_both_and_must_exist_c44(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "ib0")
    choose_interface("127.0.0.1", NAMES[0])
    assert os.environ[VARIABLE] == NAMES[0]
    with pytest.raises(ConfigError) as caught:
        choose_interface("127.0.0.1", "eth99")
    assert str(caught.value) == (
        f"transport.interface='eth99': must be an interface of this machine, one of {', '.join(NAMES)}; "
        "leave it out to take the one that leads to the rendezvous"
    )
