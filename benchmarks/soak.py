"""A long run of the main job on two ranks over gloo: memory, threads, descriptors and tensors must not grow (C-37).

    python benchmarks/soak.py [--rounds 300] [--every 50] [--out benchmarks/results/soak.json]

The tiny model of this file trains with messages in flight (delay 3 of 10 steps); rank 0 evaluates after every second
round and writes its log, and both save twenty times. Each rank looks at itself at a round border, after a garbage
collection. What counts is how the readings differ from the first, when everything has been used once. Ends with 1 if
threads, descriptors or tensors changed, or resident memory grew by more than a tenth.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from sparseloco.config import build_algorithm, load_config
from sparseloco.data import open_dataset
from sparseloco.model import build_run_model
from sparseloco.solo import Solo
from sparseloco.trainer import train
from sparseloco.transport.deadline import Deadline
from sparseloco.transport.meeting import joined_group, meeting_folder

RANKS = 2
INNER_STEPS = 10
ALLOWED_GROWTH = 1.1
COUNTS = ("threads", "descriptors", "tensors")
CONFIG = f"""
[algorithm]
preset = "sparseloco"
inner_steps = {INNER_STEPS}
delay = 3
k = 16
tile = 16

[model]
hidden_size = 32
num_layers = 2
num_heads = 2
intermediate_size = 64

[train]
workers = {RANKS}
batch_size = 2
sequence_length = 32
evaluate_every = {2 * INNER_STEPS}
log_every = {INNER_STEPS}
evaluation_tokens = 512

[optimizer]
warmup_steps = 10
"""


def reading(round_: int) -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "round": round_,
        "resident_bytes": pages * resource.getpagesize(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": sum(not is_of_rendezvous(name) for name in os.listdir("/proc/self/fd")),
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
    }


def is_of_rendezvous(descriptor: str) -> bool:
    """Whether a descriptor is the file in which ranks met, which signs of life open anew each time."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").endswith("/rendezvous")
    except FileNotFoundError:  # that of the listing itself is closed by now, or that of a sign of life
        return True


def reader(every: int, into: list[dict[str, int]]) -> Callable[[], bool]:
    """The question that a run asks at every round border, whether to stop: never, but every n-th is a reading."""
    rounds = 0

    def never() -> bool:
        nonlocal rounds
        rounds += 1
        if rounds % every == 0:
            into.append(reading(rounds))
        return False

    return never


def run_rank(rank: int, rounds: int, every: int, folder: str, answer: Connection) -> None:
    """Body of one process."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # The end of a run is no round border for those who ask, so there is one round more than are counted.
    steps = (rounds + 1) * INNER_STEPS
    config = load_config(
        Path(folder, "soak.toml"), [f"train.steps={steps}", f"checkpoint.every={max(1, rounds // 20) * INNER_STEPS}"]
    )
    algorithm, dataset = build_algorithm(config), open_dataset(config.data)
    readings: list[dict[str, int]] = []
    with joined_group(f"file://{folder}/rendezvous", rank, RANKS, Deadline()):
        world = Solo(partial(build_run_model, config, dataset.vocab_size), algorithm, seed=config.train.seed)
        out = Path(folder, "run")
        out.mkdir(exist_ok=True)
        train(config, algorithm, dataset, out, label="soak", world=world, stop=reader(every, readings))
        answer.send({"readings": readings, "digest": world.replicas[0].digest()})


def soak(rounds: int, every: int) -> list[dict[str, Any]]:
    """What each rank read; raises if one of them dies."""
    context = multiprocessing.get_context("spawn")
    with meeting_folder() as meeting, tempfile.TemporaryDirectory(dir=meeting) as folder:
        Path(folder, "soak.toml").write_text(CONFIG)
        pairs = [context.Pipe(duplex=False) for _ in range(RANKS)]
        ranks = [
            context.Process(target=run_rank, args=(rank, rounds, every, folder, there), daemon=True)
            for rank, (_, there) in enumerate(pairs)
        ]
        try:
            for rank in ranks:
                rank.start()
            for _, there in pairs:
                there.close()  # so that a rank that dies is the end of its pipe
            return [here.recv() for here, _ in pairs]
        finally:
            for rank in ranks:
                rank.join(10)
                rank.kill()
                rank.join()


def growth(readings: list[dict[str, int]]) -> float:
    """Resident memory at the last reading over that at the first."""
    return readings[-1]["resident_bytes"] / readings[0]["resident_bytes"]


def complaints(readings: list[dict[str, int]]) -> list[str]:
    """What is not flat, in words."""
    first = readings[0]
    found = [
        f"{name}: {first[name]} at round {first['round']}, {each[name]} at round {each['round']}"
        for each in readings[1:]
        for name in COUNTS
        if each[name] != first[name]
    ]
    if growth(readings) > ALLOWED_GROWTH:
        found.append(f"resident memory: grew {growth(readings):.3f} times, {ALLOWED_GROWTH} is allowed")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--every", type=int, default=50, help="rounds between two readings")
    parser.add_argument("--out", type=Path, help="write what was found as JSON")
    options = parser.parse_args(arguments)
    ranks = soak(options.rounds, options.every)
    found = {
        "rounds": options.rounds,
        "ranks": RANKS,
        "inner_steps": INNER_STEPS,
        "torch": torch.__version__,
        "same_digest": len({rank["digest"] for rank in ranks}) == 1,
        "growth": [round(growth(rank["readings"]), 4) for rank in ranks],
        "complaints": [f"rank {r}, {text}" for r, rank in enumerate(ranks) for text in complaints(rank["readings"])],
        "readings": [rank["readings"] for rank in ranks],
    }
    text = json.dumps(found, indent=1) + "\n"
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0 if found["same_digest"] and not found["complaints"] else 1


if __name__ == "__main__":
    sys.exit(main())
