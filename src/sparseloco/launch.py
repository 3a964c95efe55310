"""Replicas as processes: started here on one machine, or by torchrun on many."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from sparseloco.algorithm import Algorithm
from sparseloco.checkpoint import Checkpoint
from sparseloco.data import Dataset, open_dataset
from sparseloco.errors import ConfigError, SparseLocoError
from sparseloco.identity import common_facts
from sparseloco.metrics import Status
from sparseloco.model import build_run_model, tensor_table
from sparseloco.settings import RunConfig
from sparseloco.sharding import Place
from sparseloco.solo import Solo
from sparseloco.support import check_shards
from sparseloco.trainer import ProgressCallback, StopCallback, train
from sparseloco.transport.deadline import Deadline
from sparseloco.transport.interface import check_interface
from sparseloco.transport.meeting import joined_group, meeting_folder

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.5
"""Time between two looks at whether torchrun is still there."""

logger = logging.getLogger("sparseloco")


class _Forward(logging.Handler):
    """The log of a worker process, as events for the process that shows it."""

    def __init__(self, events: Queue[tuple[str, Any]]) -> None:
        super().__init__()
        self.events = events

    def emit(self, record: logging.LogRecord) -> None:
        self.events.put(("log", record.getMessage()))


def train_processes(
    config: RunConfig,
    algorithm: Algorithm,
    dataset: Dataset,
    out: Path | None,
    *,
    label: str,
    progress: ProgressCallback | None = None,
    resume: Checkpoint | None = None,
    stop: StopCallback | None = None,
    keep_model: bool = False,
) -> dict[str, Any]:
    """Like :func:`sparseloco.trainer.train`, with each replica a process of this machine, or each of its shards.

    No process outlives the call, or this process if it is killed. The first error of any of them ends all and is
    raised here.
    """
    context = multiprocessing.get_context("spawn")
    events: Queue[tuple[str, Any]] = context.Queue()
    stopping = context.Event()
    with meeting_folder() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        arguments = (
            *(config, algorithm, out, label, keep_model, rendezvous, events, logger.getEffectiveLevel()),
            *(resume, stopping),
        )
        workers = [
            context.Process(target=_worker, args=(rank, *arguments), daemon=True) for rank in range(num_ranks(config))
        ]
        with _signals_wait():
            for worker in workers:
                worker.start()
        try:
            return _follow(_drained(events, workers, stop, stopping, config), progress)
        finally:
            for worker in workers:
                worker.kill()  # they take no notice of gentler signals, which come to the whole group
            for worker in workers:
                worker.join()


def train_rank(
    config: RunConfig,
    algorithm: Algorithm,
    dataset: Dataset,
    out: Path | None,
    *,
    label: str,
    progress: ProgressCallback | None = None,
    resume: Checkpoint | None = None,
    stop: StopCallback | None = None,
    keep_model: bool = False,
) -> dict[str, Any]:
    """One rank of a group that torchrun started; rank 0 writes and returns the summary.

    Raises:
        ConfigError: if the group has another size than the settings say.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    _check_ranks(config, world_size)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # only then is the parent known to be one that stays
        threading.Thread(target=_die_with_launcher, args=(os.getppid(),), daemon=True).start()
    with joined(config, "env://", int(os.environ["RANK"]), stop):
        world = _world(config, algorithm, dataset, resume)
        return train(
            config,
            algorithm,
            dataset,
            out,
            label=label,
            progress=progress,
            world=world,
            resume=resume,
            stop=stop,
            keep_model=keep_model,
        )


def num_ranks(config: RunConfig) -> int:
    """Processes of a run whose replicas, or whose shards, are processes."""
    return config.train.workers * config.train.shards


def check_ranks_and_shards(config: RunConfig, algorithm: Algorithm, dataset: Dataset) -> None:
    """Refuse what the processes of a run would refuse at their start, before anything is written or replaced.

    Raises:
        ConfigError: naming the setting that does not fit the ranks, the method or the tensors.
    """
    if is_torchrun():
        _check_ranks(config, int(os.environ["WORLD_SIZE"]))
    if num_ranks(config) > 1:
        check_interface(config.transport.interface)
    shards = config.train.shards
    if shards > 1:
        data = config.data if config.data.tokenizer else replace(config.data, vocab_size=dataset.vocab_size)
        table = tensor_table(replace(config, data=data))
        check_shards(algorithm, {s.name: Place(s.shape, 0, 0, num_shards=shards, wrapped=True) for s in table})


def _check_ranks(config: RunConfig, world_size: int) -> None:
    workers, shards = config.train.workers, config.train.shards
    if world_size == num_ranks(config):
        return
    if shards == 1:
        raise ConfigError(
            f"train.workers={workers}: must be the {world_size} ranks that torchrun started; "
            f"pass --workers {world_size}"
        )
    raise ConfigError(
        f"train.workers={workers}: must be the {world_size} ranks that torchrun started over train.shards={shards}; "
        f"start {workers * shards} ranks, or change --workers or --shards"
    )


def joined(
    config: RunConfig, rendezvous: str, rank: int, stop: StopCallback | None = None
) -> AbstractContextManager[None]:
    """The group of a run, with the time limits of its settings."""
    deadline, interface = Deadline(config.transport.deadline_s), config.transport.interface
    return joined_group(rendezvous, rank, num_ranks(config), deadline, interface, stop)


def _world(config: RunConfig, algorithm: Algorithm, dataset: Dataset, resume: Checkpoint | None) -> Solo:
    return Solo(
        partial(build_run_model, config, dataset.vocab_size),
        algorithm,
        seed=config.train.seed,
        shards=config.train.shards,
        nonfinite=config.train.nonfinite,
        facts=common_facts(config, dataset, resume),
    )


def _named(rank: int, config: RunConfig) -> str:
    peer, shard = divmod(rank, config.train.shards)
    return f"peer {peer}, shard {shard}" if config.train.shards > 1 else f"peer {peer}"


@contextlib.contextmanager
def memory_errors(config: RunConfig) -> Iterator[None]:
    """Running out of memory inside this block becomes one sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = ("can't allocate memory", "not enough memory", "out of memory")
        if isinstance(error, RuntimeError) and not any(word in str(error).lower() for word in words):
            raise
        raise ConfigError(
            f"train.batch_size={config.train.batch_size}: must fit into the memory of this machine, and it ran out; "
            "lower it or raise train.accumulation, or take fewer workers, shorter sequences or a smaller model"
        ) from error


def as_rank(config: RunConfig) -> RunConfig:
    """Settings of a rank that torchrun has started: its transport, and after a restart as many workers as came back."""
    transport = replace(config.transport, kind="process_group")
    train = config.train
    if restarts():
        train = replace(train, workers=max(1, int(os.environ["WORLD_SIZE"]) // train.shards))
    return replace(config, transport=transport, train=train)


def restarts() -> int:
    """How often torchrun has started these ranks again (``--max-restarts``), be there one left or several."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if "RANK" in os.environ else 0


def job() -> str:
    """Name of the job of torchrun that started this process, which a restart keeps; empty without one."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "") if "RANK" in os.environ else ""


def is_torchrun() -> bool:
    """Whether torchrun (or a launcher like it) started this process as one rank of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def launch_command() -> str:
    """What starts as many ranks as torchrun has started here, up to the name of the command."""
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    ranks = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    return f"torchrun {f'--nnodes {nodes} ' if nodes != '1' else ''}--nproc-per-node {ranks} -m"


def stopping_limit() -> str:
    """What torchrun does to ranks that take long to stop, to be said after a signal."""
    seconds = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    return f" (torchrun kills what has not ended in {seconds} s; TORCH_ELASTIC_SHUTDOWN_TIMEOUT changes that)"


def _worker(
    rank: int,
    config: RunConfig,
    algorithm: Algorithm,
    out: Path | None,
    label: str,
    keep_model: bool,
    rendezvous: str,
    events: Queue[tuple[str, Any]],
    log_level: int,
    resume: Checkpoint | None,
    stopping: Event,
) -> None:
    """Body of one process; everything it has to say goes through ``events``."""
    for each in _SIGNALS:  # the parent decides what they mean
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if rank == 0:
        warnings.showwarning = lambda message, *_, **__: events.put(("warning", str(message)))
    logger.setLevel(log_level)
    logger.addHandler(_Forward(events))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks(config)))
    try:
        dataset = open_dataset(config.data)
        with memory_errors(config), joined(config, rendezvous, rank, stopping.is_set):
            world = _world(config, algorithm, dataset, resume)

            def progress(status: Status) -> None:
                events.put(("status", tuple(status)))

            summary = train(
                config,
                algorithm,
                dataset,
                out,
                label=label,
                progress=progress,
                world=world,
                resume=resume,
                stop=stopping.is_set,
                keep_model=keep_model,
            )
        if rank == 0:
            events.put(("summary", summary))
    except SparseLocoError as error:
        events.put(("error", error))
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent must hear of it and end the others
        events.put(("error", SparseLocoError(f"{_named(rank, config)}: {type(error).__name__}: {error}")))


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Inside this block no signal arrives that means to stop, nor at processes started in it until they allow it.

    Ctrl-C comes to the whole group, also to a process that is still importing and cannot ignore it yet.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _die_with_parent() -> None:
    """End this process once its parent has, however that came, so that none trains on beside a resumed run."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _die_with_launcher(launcher: int) -> None:
    """The same for a rank of torchrun, which starts its ranks in sessions of their own, so that they outlive it."""
    while os.getppid() == launcher:
        time.sleep(_LOOK_S)
    os._exit(1)


def _follow(events: Iterator[tuple[str, Any]], progress: ProgressCallback | None) -> dict[str, Any]:
    """Relay progress until the summary or the first error arrives."""
    for kind, value in events:
        if kind == "summary":
            return value
        if kind == "error":
            raise value
        if kind == "warning":
            warnings.warn(value, stacklevel=3)
        elif kind == "log":
            logger.info("%s", value)
        elif progress is not None:
            progress(Status(*value))
    raise SparseLocoError("workers=all ended: must leave a summary; look above for what they printed")


def _drained(
    events: Queue[tuple[str, Any]],
    workers: list[SpawnProcess],
    stop: StopCallback | None,
    stopping: Event,
    config: RunConfig,
) -> Iterator[tuple[str, Any]]:
    """Events as they come; a process that died without a word is an event of its own."""
    while True:
        if stop is not None and stop():
            stopping.set()
        with contextlib.suppress(queue.Empty):
            yield events.get(timeout=0.5)
            continue
        dead = [rank for rank, worker in enumerate(workers) if worker.exitcode not in (None, 0)]
        if dead:
            code, name = workers[dead[0]].exitcode, _named(dead[0], config)
            yield ("error", SparseLocoError(f"{name}: process ended with code {code}; start the run again"))
        if all(worker.exitcode is not None for worker in workers):
            return
