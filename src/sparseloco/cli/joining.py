"""``sparseloco join``: from the address of a run to a run folder, as a peer among others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseloco.checkpoint import Checkpoint, CheckpointFolder
from sparseloco.cli import trust
from sparseloco.cli.folders import check_inputs, check_run_folder, is_run, start_run
from sparseloco.cli.lock import check_not_held, only_writer
from sparseloco.cli.peer_runs import config_of, read_run_of, read_tokenizer_of
from sparseloco.cli.reach import reach
from sparseloco.cli.runs import Done, checked_algorithm, read_dataset, write_page
from sparseloco.cli.screen import Screen
from sparseloco.cli.shell import say, stop_signals
from sparseloco.config import to_toml
from sparseloco.data import default_cache_dir
from sparseloco.errors import ConfigError, Interrupted, WireError
from sparseloco.identity import check_identity, identity
from sparseloco.joined import Joined
from sparseloco.launch import memory_errors
from sparseloco.metrics import write_atomically
from sparseloco.model import build_run_model
from sparseloco.peers import canonical
from sparseloco.peers.aloud import QUIET
from sparseloco.peers.operations import Tell
from sparseloco.peers.patience import Patient
from sparseloco.peers.replay import Progress
from sparseloco.peers.run_file import RUN_LIMIT, RunFile, read_run
from sparseloco.peers.store import open_store
from sparseloco.report import load_run, units
from sparseloco.settings import RunConfig
from sparseloco.trainer import CHECKPOINTS, train
from sparseloco.transport.object_store import ObjectStore

RUN = "run.json"
"""Copy of the run's file in a run folder."""
JOURNAL, PEER = "peer", "id"
"""Folder inside a run folder for what a peer must not forget."""
_LOG = logging.getLogger("sparseloco.peers")
_SAY_EVERY_S = 2.0


@dataclass(frozen=True)
class Asked:
    """What somebody asked for.

    Attributes:
        url: Address of the run.
        owner: Public key that its owner must have.
        key: Key file of this peer.
        out: Run folder.
        data: Text of this peer instead of the run's.
        overrides: What this peer chooses for itself.
        keep_model: Keep the trained model.
    """

    url: str
    owner: str | None = None
    key: Path | None = None
    out: Path | None = None
    data: str | None = None
    overrides: Sequence[str] = ()
    keep_model: bool = True


def join(asked: Asked, screen: Screen, command_of: Callable[[Path], str]) -> Done:
    """Take part in a run until it is done; what an earlier start has left in the folder is continued.

    Args:
        asked: What to join, and how.
        screen: What people see.
        command_of: The command line for a run folder, which joins again.

    Raises:
        ConfigError: if the run cannot be joined from here.
        StoreError: if the store does not answer.
        WireError: if what the owner wrote was changed, or names what it must not.
        Interrupted: if a signal came; private state is saved then.
    """
    reach(asked.url)
    store = Patient(open_store(asked.url))
    run = trusted_run(store, asked)
    folder = asked.out or default_folder(run)
    check_not_held(folder)
    is_ours(folder, run)
    made, fresh = trust.peer_key(asked.key)
    with trust.only_user(made) as me, only_writer(folder):
        if fresh:
            say(f"peer {me.peer_id}: a key for this user's peers was made in {made}")
        again = is_ours(folder, run)  # once more: another may have ended there meanwhile
        check_peer(folder, me.peer_id)
        config = config_of(run, _tokenizer(store, run), data=asked.data, overrides=asked.overrides)
        check_inputs(folder, [] if asked.data is None else [asked.data])
        with stop_signals() as stop, memory_errors(config):
            transport = ObjectStore(
                asked.url,
                me,
                folder / JOURNAL,
                run=run,
                owner=run.owner,
                tell=_telling(),
                progress=_progressing(screen, run.name, stop),
                stop=stop,
            )
            with transport:
                summary = _train(
                    asked, run, config, folder, screen, transport, stop, again=command_of(folder), resume=again
                )
    done = load_run(folder)
    return Done([done], [summary], write_page([done], folder, command_of(folder)))


def trusted_run(store: Patient, asked: Asked) -> RunFile:
    """``run.json``, of the owner that was named, or known, or is trusted from now on, which is said aloud."""
    run = read_run_of(store, asked.url)
    if trust.check_owner(asked.url, run.owner, asked.owner):
        say(
            f"warning: run {run.run}: owner {run.owner} is trusted on first use, since no --owner was given; compare "
            f"it with a key that you got by another way (remembered in {trust.known_file()})"
        )
    trust.remember(asked.url, run.owner)
    return run


def default_folder(run: RunFile) -> Path:
    """The same for every start of one run, so that a second one continues the first."""
    name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in run.name)[:80]
    return Path("runs") / f"{name}-{run.run[:8]}"


def is_ours(folder: Path, run: RunFile) -> bool:
    """Whether a folder holds an earlier start of this run.

    Raises:
        ConfigError: if it holds anything else.
    """
    place = folder / RUN
    if not place.is_file():
        check_run_folder(folder)
        return False
    try:
        found = read_run(place.read_bytes()[: RUN_LIMIT + 1]).run
    except (OSError, WireError) as error:
        raise ConfigError(f"--out {str(folder)!r}: its {RUN} cannot be read ({error}); choose another") from None
    if found != run.run:
        raise ConfigError(f"--out {str(folder)!r}: holds run {found}, but this is run {run.run}; choose another folder")
    return is_run(folder)


def check_peer(folder: Path, peer: str) -> None:
    """Refuse what another peer of this run has left: its residual would count twice if it came back elsewhere.

    Raises:
        ConfigError: naming both.
    """
    place = folder / JOURNAL / PEER
    if place.is_file() and (found := place.read_text(encoding="utf-8").strip()) != peer:
        raise ConfigError(
            f"--out {str(folder)!r}: holds what peer {found[:8]} has left, but this key is peer {peer[:8]}'s; pass the "
            "key of that peer, or choose another folder"
        )


def _train(
    asked: Asked,
    run: RunFile,
    config: RunConfig,
    folder: Path,
    screen: Screen,
    transport: ObjectStore,
    stop: Callable[[], bool],
    *,
    again: str,
    resume: bool,
) -> dict[str, Any]:
    algorithm = checked_algorithm(config)
    dataset = read_dataset(config, screen)
    world = Joined(build_run_model(config, dataset.vocab_size), algorithm, transport, config.train)
    found = _newest(folder, run, screen) if resume else None
    if found is None:
        write_atomically(folder / RUN, canonical.encode(run))  # first: from here on the folder is this run's
        (folder / JOURNAL).mkdir(exist_ok=True)
        write_atomically(folder / JOURNAL / PEER, f"{transport.peer_id}\n")
        start_run(folder, to_toml(config))
    else:
        check_identity(found, identity(config, dataset))
    screen.say(f"{run.name}: joining run {run.run} as peer {transport.peer_id}")
    with screen.training(run.name, config.train.steps) as progress:
        try:
            return train(
                config,
                algorithm,
                dataset,
                folder,
                label=run.name,
                progress=progress,
                world=world,
                resume=found,
                stop=stop,
                keep_model=asked.keep_model,
            )
        except Interrupted as error:
            raise Interrupted(f"{run.name} {error}; join again with: {again}") from error
        except KeyboardInterrupt as error:
            told = f"{run.name} stopped at once; what was sent is written down, so join again with: {again}"
            raise Interrupted(told) from error


def _tokenizer(store: Patient, run: RunFile) -> Path:
    """The run's tokenizer on this disk, in the cache, where it has one place whichever folder the run is in."""
    place = default_cache_dir() / "tokenizers" / f"{run.tokenizer}.json"
    if not place.is_file() or canonical.sha256(place.read_bytes()) != run.tokenizer:
        data = read_tokenizer_of(store, run)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, data)
        except OSError as error:
            raise ConfigError(
                f"cache={str(place.parent)!r}: must be a folder that can be written ({error.strerror}); name another "
                "one in $SPARSELOCO_CACHE"
            ) from None
    return place


def _newest(folder: Path, run: RunFile, screen: Screen) -> Checkpoint | None:
    """The newest whole checkpoint of an earlier start; without one, the shared state comes from the store."""
    found, refused = CheckpointFolder(folder / CHECKPOINTS).newest()
    for reason in refused:
        say(f"warning: a checkpoint is passed over: {reason}")
    place = f"at step {found.step}, from {found.path}" if found else "from the store, with what was written down here"
    screen.say(f"{run.name}: going on {place}")
    return found


def _telling() -> Callable[[Tell], None]:
    """What the protocol says; what is quiet is for --verbose."""

    def tell(told: Tell) -> None:
        text = "".join(letter if letter.isprintable() else "?" for letter in told.text)
        if told.kind not in QUIET:
            say(f"warning: {text}")
        else:
            _LOG.info("%s", text)

    return tell


def _progressing(screen: Screen, name: str, stop: Callable[[], bool]) -> Callable[[Progress], None]:
    """How far catching up is: now and then a line, and one at the end; the place where it can be stopped."""
    said_at: list[float] = []

    def show(progress: Progress) -> None:
        if stop():
            raise Interrupted("stopped while it was catching up; nothing is lost")
        is_last = progress.rounds >= progress.total
        if not is_last and said_at and time.monotonic() - said_at[-1] < _SAY_EVERY_S:
            return
        said_at[:] = [time.monotonic()]
        left = "" if progress.left_s is None or is_last else f", {units.duration(progress.left_s)} left"
        screen.say(
            f"{name}: caught up {progress.rounds} of {progress.total} rounds, "
            f"{units.num_bytes(progress.received_bytes)} received, {units.num_bytes(progress.bytes_per_s)}/s{left}"
        )

    return show
