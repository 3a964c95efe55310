"""Transports: the only place where envelopes leave the process."""

from sparseloco.transport.base import Traffic, Transport, advance, collect_early, drain, post_due, settle
from sparseloco.transport.loopback import Loopback
from sparseloco.transport.process_group import ProcessGroup
from sparseloco.transport.speaker import Speaker

__all__ = [
    "Loopback",
    "ProcessGroup",
    "Speaker",
    "Traffic",
    "Transport",
    "advance",
    "collect_early",
    "drain",
    "post_due",
    "settle",
]
