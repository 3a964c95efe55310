"""Kill ranks of a sharded run under torchrun with -9 at seeded random moments; what is resumed ends in the same bits.

    python benchmarks/kill_ranks.py [--kills 20] [--seed 0] [--out benchmarks/results/kill_ranks.json]

Two peers of two shards each save after every step, by chance on the training thread or on a thread of its own. One
rank, drawn like the moment, is killed; torchrun must then end the others, and the run is continued with --resume until
it gets to its end. It is compared with a run that nobody disturbed: digest, private parts of the last checkpoint, and
every line of metrics.jsonl apart from the clock. After each kill it is checked that no process is left and that every
checkpoint on the disk is whole; while ranks run, checkpoints are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kill_resume import CLOCK, KEEP, WORDS
from kill_resume import CONFIG as WHOLE

from sparseloco.checkpoint import Checkpoint, CheckpointFolder

CONFIG = WHOLE.replace("tile = 8\n", "tile = 8\npanels = 2\n").replace("workers = 2\n", "workers = 2\nshards = 2\n")
RANKS, PATIENCE_S = 4, 60
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "-m", "sparseloco", "train"]


class Run:
    """One start of torchrun in a session of its own, and the ranks below it."""

    def __init__(self, folder: Path, out: str, *, asynchronous: bool) -> None:
        self.folder, self.out = folder, folder / out
        settings = self.out / "config.toml"
        before = settings.stat().st_mtime_ns if settings.exists() else 0
        thread = f"checkpoint.asynchronous={str(asynchronous).lower()}"
        self.process = subprocess.Popen(
            [*LAUNCH, "run.toml", "--set", thread, "--out", out, "--resume", "--no-model", "--json"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "SPARSELOCO_CACHE": str(folder / "cache")},
        )
        while self.process.poll() is None and not (settings.exists() and settings.stat().st_mtime_ns > before):
            time.sleep(0.005)
        self.begun = time.monotonic()
        self.most_on_disk = 0

    def wait(self, seconds: float) -> bool:
        """Whether it ended by itself within that time after it began to train; counts checkpoints meanwhile."""
        while self.process.poll() is None and time.monotonic() - self.begun < seconds:
            with contextlib.suppress(FileNotFoundError):
                self.most_on_disk = max(self.most_on_disk, len(os.listdir(self.out / "checkpoints")))
            time.sleep(0.002)
        if self.process.poll() is None:
            return False
        error = self.process.stderr.read() if self.process.stderr else ""
        if self.process.returncode:
            raise SystemExit(f"train ended with {self.process.returncode}: {error}")
        return True

    def ranks(self) -> list[int]:
        """Processes that work in the folder, apart from torchrun, from the kernel's list."""
        found: list[int] = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                here, words = (place / "cwd").readlink() == self.folder, (place / "cmdline").read_bytes()
            except OSError:  # it has ended, or is another user's
                continue
            if here and b"sparseloco" in words and b"torch.distributed.run" not in words:
                found.append(int(place.name))
        return sorted(found)

    def kill_a_rank(self, number: int) -> bool | None:
        """Kill one rank alone; whether torchrun and all others end too. None if it had ended by then."""
        ranks = self.ranks()
        if self.process.poll() is not None or number >= len(ranks):
            return None
        try:
            os.kill(ranks[number], signal.SIGKILL)
        except ProcessLookupError:
            return None
        deadline = time.monotonic() + PATIENCE_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=PATIENCE_S)
        while self.ranks() and time.monotonic() < deadline:
            time.sleep(0.01)
        left = [*self.ranks(), *([self.process.pid] if self.process.poll() is None else [])]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        return not left

    def all_whole(self) -> bool:
        """Whether each checkpoint under a name of its own is complete and matches its hashes."""
        for path in (self.out / "checkpoints").glob("step-*"):
            Checkpoint.open(path)
        return CheckpointFolder(self.out / "checkpoints").newest()[1] == []


def outcome(out: Path) -> dict[str, Any]:
    """All bits that a run leaves, apart from its clock."""
    found, _ = CheckpointFolder(out / "checkpoints").newest()
    assert found is not None
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "digest": json.loads((out / "summary.json").read_text())["digest"],
        "shared": found.facts["digest"],
        "private": {name: file.sha256 for name, file in found.index.files.items() if name.startswith("peer-")},
        "metrics": [{name: value for name, value in line.items() if name not in CLOCK} for line in lines],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    kills: list[dict[str, Any]] = []
    finished = equal = most_on_disk = 0
    no_process_left = all_whole = True
    with tempfile.TemporaryDirectory(prefix="sparseloco-kill-") as name:
        folder = Path(name).resolve()
        (folder / "run.toml").write_text(CONFIG)
        (folder / "text.txt").write_text(" ".join(chance.choices(WORDS, k=20000)))
        run = Run(folder, "straight", asynchronous=False)
        run.wait(600)
        expected, seconds = outcome(run.out), time.monotonic() - run.begun
        while len(kills) < arguments.kills or (kills and kills[-1]["run"] == finished):
            asynchronous = chance.random() < 0.5
            run = Run(folder, f"run-{finished}", asynchronous=asynchronous)
            # Once there were enough kills, the last run may end in peace.
            after, rank = chance.uniform(0, 0.7 * seconds), chance.randrange(RANKS)
            done = run.wait(after if len(kills) < arguments.kills else 600)
            ended = None if done else run.kill_a_rank(rank)
            most_on_disk = max(most_on_disk, run.most_on_disk)
            if ended is None:
                run.wait(600)
                equal += outcome(run.out) == expected
                finished += 1
                continue
            no_process_left &= ended
            all_whole &= run.all_whole()
            kills.append({"run": finished, "asynchronous": asynchronous, "rank": rank, "after_s": round(after, 3)})
            print(f"kill {len(kills)}: rank {rank} of run {finished}, after {after:.2f} s", file=sys.stderr)
    result = {
        "kills": len(kills),
        "seed": arguments.seed,
        "runs": finished,
        "runs_with_the_same_bits": equal,
        "no_process_left": no_process_left,
        "all_checkpoints_whole": all_whole,
        "most_checkpoints_on_disk": most_on_disk,
        "allowed_on_disk": KEEP + 1,
        "moments": kills,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    if equal != finished or not no_process_left or not all_whole or most_on_disk > KEEP + 1:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
