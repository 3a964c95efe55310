"""Which network interface gloo uses: the one that leads to the rendezvous."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import warnings
from pathlib import Path

from sparseloco.errors import ConfigError

VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"
_ASK_ADDRESS = 0x8915
"""``SIOCGIFADDR`` of Linux."""


def choose_interface(address: str, asked: str = "", *, is_here: bool = True) -> None:
    """Tell gloo which interface to use, by the environment of this process.

    Left alone, gloo takes the interface that the name of this machine resolves to, which may be the loopback or one
    that no other machine reaches.

    Args:
        address: Name or number of the machine where the ranks meet.
        asked: Name of an interface; empty takes what ``GLOO_SOCKET_IFNAME`` says, else the one that leads to
            ``address``, else leaves the choice to gloo.
        is_here: Whether all ranks are on this machine, so that the loopback reaches them.

    Raises:
        ConfigError: if ``asked`` is not an interface of this machine.
    """
    if asked:
        check_interface(asked)
        os.environ[VARIABLE] = asked
    elif VARIABLE not in os.environ and (found := find_interface(address)):
        if not is_here and found == find_interface(_LOOPBACK):
            warnings.warn(
                f"MASTER_ADDR={address!r}: leads to the loopback here, which the other machines do not reach; write "
                "the number of an interface there, or name one by transport.interface",
                stacklevel=2,
            )
            return
        os.environ[VARIABLE] = found


def check_interface(asked: str) -> None:
    """Refuse an interface that this machine does not have; empty is none.

    Raises:
        ConfigError: naming those that it has.
    """
    known = [name for _, name in socket.if_nameindex()]
    if asked and asked not in known:
        raise ConfigError(
            f"transport.interface={asked!r}: must be an interface of this machine, one of {', '.join(known)}; "
            "leave it out to take the one that leads to the rendezvous"
        )


def find_interface(address: str) -> str | None:
    """Name of the interface from which packets to ``address`` would leave; none is sent.

    None if the name cannot be resolved or this system does not say which interface has which address.
    """
    with contextlib.suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # of datagrams: chooses a way, and sends nothing
            own = probe.getsockname()[0]
        names = [name for _, name in socket.if_nameindex()]
        found = _with_ipv6(own) if family == socket.AF_INET6 else next((n for n in names if _ipv4_of(n) == own), None)
        return found if found in names else None
    return None


def _ipv4_of(name: str) -> str | None:
    import fcntl  # not on Windows, where the rest of the package can be imported

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):  # it has none
        answer = fcntl.ioctl(probe.fileno(), _ASK_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _with_ipv6(address: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    rows = (line.split() for line in Path("/proc/net/if_inet6").read_text("ascii").splitlines())
    return next((row[-1] for row in rows if row[0] == wanted), None)
