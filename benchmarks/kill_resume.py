"""Kill a real `sparseloco train` with -9 at seeded random moments; what is resumed must end in the same bits.

    python benchmarks/kill_resume.py [--kills 50] [--seed 0] [--out benchmarks/results/kill_resume.json]

A run saves after every step and is killed and resumed until it gets to its end, then it is compared with one that
nobody disturbed: digest, private parts of the last checkpoint, and every line of metrics.jsonl apart from the clock.
Simulated runs and runs with --processes take turns. While they run, checkpoints on the disk are counted, and after
each kill it is checked that no process is left.
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

KEEP = 2
CLOCK = ("seconds", "seconds_in_sync", "tokens_per_s")
CONFIG = """
[algorithm]
preset = "sparseloco"
inner_steps = 4
delay = 2
k = 4
tile = 8

[model]
hidden_size = 16
num_layers = 1
num_heads = 2
intermediate_size = 24

[data]
path = "text.txt"
vocab_size = 300

[train]
workers = 2
steps = 32
batch_size = 2
sequence_length = 16
evaluate_every = 12
log_every = 7
evaluation_tokens = 64

[optimizer]
warmup_steps = 4

[checkpoint]
every = 1
keep = 2
"""
WORDS = ("slow", "links", "carry", "few", "bytes", "and", "many", "steps", "while", "peers", "train", "alone")


class Run:
    """One command in a session of its own."""

    def __init__(self, folder: Path, out: str, *, processes: bool) -> None:
        self.out = folder / out
        settings = self.out / "config.toml"
        before = settings.stat().st_mtime_ns if settings.exists() else 0
        command = [sys.executable, "-m", "sparseloco", "train", "run.toml", "--out", out, "--resume", "--json"]
        self.process = subprocess.Popen(
            [*command, *(["--processes"] if processes else [])],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
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

    def kill(self) -> bool:
        """Kill the command alone, as the kernel would for memory; whether its other processes end too."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.01)
        os.killpg(self.process.pid, signal.SIGKILL)
        return False


def outcome(out: Path) -> dict[str, Any]:
    """All bits that a run leaves, apart from its clock."""
    last = max((out / "checkpoints").glob("step-*"))
    index = json.loads((last / "index.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "digest": json.loads((out / "summary.json").read_text())["digest"],
        "private": {name: file["sha256"] for name, file in index["files"].items() if name.startswith("peer-")},
        "metrics": [{name: value for name, value in line.items() if name not in CLOCK} for line in lines],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    kills: list[dict[str, Any]] = []
    finished = equal = most_on_disk = 0
    no_process_left = True
    with tempfile.TemporaryDirectory(prefix="sparseloco-kill-") as name:
        folder = Path(name)
        (folder / "run.toml").write_text(CONFIG)
        (folder / "text.txt").write_text(" ".join(chance.choices(WORDS, k=20000)))
        expected, seconds = {}, {}
        for processes in (False, True):
            run = Run(folder, f"straight-{processes}", processes=processes)
            run.wait(600)
            expected[processes], seconds[processes] = outcome(run.out), time.monotonic() - run.begun
        while len(kills) < arguments.kills or (kills and kills[-1]["run"] == finished):
            processes = finished % 2 == 1
            run = Run(folder, f"run-{finished}", processes=processes)
            # Once there were enough kills, the last run may end in peace.
            after = chance.uniform(0, 0.7 * seconds[processes]) if len(kills) < arguments.kills else 600
            done = run.wait(after)
            most_on_disk = max(most_on_disk, run.most_on_disk)
            if done:
                equal += outcome(run.out) == expected[processes]
                finished += 1
                continue
            no_process_left &= run.kill()
            kills.append({"run": finished, "processes": processes, "after_s": round(after, 3)})
            print(f"kill {len(kills)}: run {finished}, after {after:.2f} s", file=sys.stderr)
    result = {
        "kills": len(kills),
        "seed": arguments.seed,
        "runs": finished,
        "runs_with_the_same_bits": equal,
        "no_process_left": no_process_left,
        "most_checkpoints_on_disk": most_on_disk,
        "allowed_on_disk": KEEP + 1,
        "moments": kills,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    if equal != finished or not no_process_left or most_on_disk > KEEP + 1:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
