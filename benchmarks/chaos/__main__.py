"""Everything goes wrong at once, and nothing is lost: six peers over a directory, one of them hostile.

    python -m benchmarks.chaos --seed 1 --rounds 200 --json

Twice as many rounds as asked for, in two runs. In the first, peers are threads, and every request may be delayed,
dropped, done and its answer lost, done twice, cut short, damaged, refused with 503, or answered with an old listing. In
the second they are processes that are killed with -9 as well: at seeded moments, and before, during and after each kind
of store operation; they come back with what is on their disk. The hostile peer puts rubbish, forged, replayed and
overweight frames, manifests of its own, and takes frames away once they are listed. Afterwards the ledger of every
honest peer is closed against the manifests: sum of deltas = accepted + residual + shed by decay, in float64.

Ends with 1 if a digest differed, a ledger did not close, a round was lost, memory grew or the loss is another.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.chaos import task
from benchmarks.chaos.crowd import Chain, Killed, Watch, in_threads, prepare, seats_in
from benchmarks.chaos.ledger import Balance, close
from benchmarks.chaos.peer import HONEST, PEERS, Seat, make_run

LIMITS = {
    "digest_mismatches": 0.0,
    "rounds_lost": 0.0,
    "strangers": 0.0,
    "residuals_dropped": 0.0,
    "ledger_error": 1e-10,
    "ledger_error_with_kills": 1e-6,
    "loss_excess": 0.02,
    "peak_rss_growth": 0.1,
}
"""What may be at most; of the loss, above or below that of the run without faults."""


def audit(seats: list[Seat], chain: Chain, befell: Counter[str]) -> dict[str, Any]:
    """What a run came to, from its store and the ledgers of its honest peers."""
    rounds = seats[0].rounds
    manifests = chain.manifests[:rounds]
    balances: list[Balance] = []
    for seat in seats[:HONEST]:
        entries = {manifest.round: manifest.entry_of(seat.me.peer_id) for manifest in manifests}
        balances.append(close(seat.ledger.folder, {n: entry.hash for n, entry in entries.items() if entry}))
    agreed = {manifest.round: manifest.digest for manifest in manifests}
    told = sum((Counter(balance.told) for balance in balances), Counter[str]())
    return {
        "rounds": len(manifests),
        "rounds_lost": sum(not manifest.entries for manifest in manifests) + rounds - len(manifests),
        "digest_mismatches": sum(
            digest != agreed.get(number, digest)
            for balance in balances
            for number, found in balance.digests.items()
            for digest in found
        )
        + len({balance.digest for balance in balances})
        - 1,
        "digests_compared": sum(len(balance.digests) for balance in balances),
        "ledger_error": max(balance.error for balance in balances),
        "posts": sum(balance.posts for balance in balances),
        "accepted": sum(balance.accepted for balance in balances),
        "strangers": sum(balance.strangers for balance in balances),
        "residuals_dropped": told["residual-dropped"],
        "further_attempts": sum(manifest.attempt > 0 for manifest in manifests),
        "hostile_frames_listed": sum(bool(manifest.entry_of(seats[-1].me.peer_id)) for manifest in manifests),
        "loss": balances[0].loss,
        "peers_said": dict(sorted(told.items())),
        "befell": dict(sorted(befell.items())),
    }


def run(seed: int, rounds: int, kills: int, folder: Path) -> dict[str, Any]:
    """Both runs and the one without faults."""
    found: dict[str, Any] = {}
    growths: list[float] = []
    prepare()
    for name in ("faults", "kills"):
        there = folder / name
        there.mkdir()
        agreement = make_run(seed)
        seats = seats_in(there, seed, rounds, agreement)
        watch = Watch(name, rounds, Chain.of(seats[0].url, agreement))
        if name == "faults":
            befell = in_threads(seats, watch, os.getpid())
        else:
            befell = Killed(seats, watch, kills, there / "over").run()
        found[name] = audit(seats, watch.chain, befell)
        found[name]["peak_resident_bytes_by_half"] = [watch.peaks[half] for half in (False, True)]
        growths.append(watch.growth())
        shutil.rmtree(there)
    straight = task.held_out(task.without_faults(rounds, PEERS).replicas[0].anchor())
    losses = [found[name]["loss"] / straight for name in found]
    both = ("rounds_lost", "digest_mismatches", "strangers", "residuals_dropped")
    return {
        "seed": seed,
        "peers": PEERS,
        "rounds": min(found["faults"]["rounds"], found["kills"]["rounds"]),
        **{name: found["faults"][name] + found["kills"][name] for name in both},
        "ledger_error": found["faults"]["ledger_error"],
        "ledger_error_with_kills": found["kills"]["ledger_error"],
        "loss_ratio": max(losses, key=lambda ratio: abs(ratio - 1)),
        "peak_rss_growth": max(growths),
        "loss_at_the_start": task.held_out(task.net().state_dict()),
        "loss_without_faults": straight,
        "torch": torch.__version__,
        "runs": found,
    }


def complaints(found: dict[str, Any]) -> list[str]:
    """What is not as it must be, in words."""
    seen = {**found, "loss_excess": abs(found["loss_ratio"] - 1)}
    return [
        f"{name}: {seen[name]}, at most {most} is allowed" for name, most in LIMITS.items() if not seen[name] <= most
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=200, help="of each of the two runs")
    parser.add_argument("--kills", type=int, help="at moments of the second run; a tenth of the rounds if left out")
    parser.add_argument("--json", action="store_true", help="print all that was found")
    parser.add_argument("--out", type=Path, help="write it, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    kills = options.rounds // 10 if options.kills is None else options.kills
    with tempfile.TemporaryDirectory(prefix="sparseloco-chaos-") as name:
        found = run(options.seed, options.rounds, kills, Path(name))
    wrong = complaints(found)
    text = json.dumps({**found, "complaints": wrong}, indent=1) + "\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    shown = {name: value for name, value in found.items() if name != "runs"}
    sys.stdout.write(text if options.json else "".join(f"{name}: {value}\n" for name, value in shown.items()))
    sys.stderr.write("".join(f"wrong: {line}\n" for line in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
