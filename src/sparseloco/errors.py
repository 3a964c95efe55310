"""Every error a user can meet, under one base class.

Messages follow one template: ``<name>=<value>: <what must hold>; <what to do>``.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class SparseLocoError(Exception):
    """Base of all errors raised by this library."""


class ConfigError(SparseLocoError, ValueError):
    """A setting, an argument or an input file breaks a rule that the caller can mend."""


class WireError(SparseLocoError, ValueError):
    """Bytes from outside are not a valid frame of this run."""


class QuorumError(SparseLocoError, TimeoutError):
    """Too few peers arrived before the deadline."""


class PeerLostError(SparseLocoError, RuntimeError):
    """A process of the run has died, or does not answer."""


class DivergenceError(SparseLocoError, RuntimeError):
    """Numbers are not finite, or peers that must agree do not."""


class DeltaError(DivergenceError):
    """A delta is not finite.

    Args:
        message: The sentence.
        tensor: Name of the tensor.
    """

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(message, tensor)
        self.tensor = tensor

    def __str__(self) -> str:
        return self.args[0]


class AllAbstainedError(DivergenceError):
    """No peer had anything to contribute to a round."""


class CheckpointError(SparseLocoError, RuntimeError):
    """Saved state is unreadable, incomplete or belongs to something else."""


class StoreError(SparseLocoError, RuntimeError):
    """A store of objects did not do what it was asked to. The text names verb and path, never a credential."""


class AlreadyExists(StoreError):
    """An object that was to be created is there; what it holds may be anyone's."""


class NotFound(StoreError):
    """There is no such object, or no such bucket."""


class Denied(StoreError):
    """The store refused the request: credentials or permissions."""


class TooLarge(StoreError):
    """An object, or a listing, is larger than the caller accepts."""


class Unavailable(StoreError):
    """The store did not answer, answered in part, or asked to be tried again; the request may have been done."""


class Interrupted(SparseLocoError, RuntimeError):
    """A run was asked to stop and has stopped, as far as possible after saving."""


def check_whole(name: str, value: object) -> None:
    """Refuse a setting that is not a whole number.

    Raises:
        ConfigError: naming the setting.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: must be a whole number; leave out the fraction")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a name that is not one of several.

    Raises:
        ConfigError: naming all of them, and the one that was probably meant.
    """
    known = list(choices)
    if value not in known:
        near = get_close_matches(str(value).lower(), known, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else "choose one of them"
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(known)}; {remedy}")
