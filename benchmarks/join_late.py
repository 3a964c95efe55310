"""Join a run at round 100 on a fresh machine: what the replay costs, and whether the joiner is like the others.

    python -m benchmarks.join_late --rounds 100 --json [--out benchmarks/results/join_late.json]

Four peers train a model of a million parameters over a store, so that frames are of a real size; no anchor but the
common start is there, so the fifth replays every round. Counted is all that it receives: frames, manifests, leases.
Then all go on, and the next round must list it. Ends with 1 if a peer's round costs 0.6 % of dense float32 or more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.chaos.peer import identity
from sparseloco import presets, sgd
from sparseloco.algorithm import Algorithm
from sparseloco.peers import canonical
from sparseloco.peers.member import tensor_table
from sparseloco.peers.policy import Policy
from sparseloco.peers.replay import Progress
from sparseloco.peers.run_file import RunFile, run_id
from sparseloco.peers.store import Store, open_store
from sparseloco.replica import Replica
from sparseloco.transport.base import advance, settle
from sparseloco.transport.object_store import ObjectStore

PEERS = 4
WIDTH = 1024
LEASE_S = 4.0
MOST_FRACTION = 0.006


def algorithm() -> Algorithm:
    """The defaults of the paper, with few inner steps: this is about bytes."""
    return presets.sparseloco(inner_steps=2, k=64, tile=64, inner=sgd(0.1))


def net() -> nn.Module:
    """A million parameters, equal for everybody."""
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def make_run() -> RunFile:
    """``run.json`` without anchors after the first round."""
    owner, replica = identity("owner"), Replica(net(), algorithm())
    return RunFile(
        run=run_id("late", "0" * 32, owner.public),
        name="late",
        nonce="0" * 32,
        owner=owner.public,
        algorithm={"preset": "sparseloco"},
        model={},
        data={},
        train={},
        tensors=tensor_table(replica.specs),
        fingerprint=replica.fingerprint,
        tokenizer="0" * 64,
        policy=Policy(min_peers=PEERS, lease_s=LEASE_S, anchor_every=10**6),
    ).signed(owner)


class Peer:
    """A peer, and what it is told of its replay."""

    def __init__(self, store: Store, run: RunFile, number: int, folder: Path) -> None:
        self.number = number
        self.model = net()
        self.replica = Replica(self.model, algorithm(), peer=number)
        self.progress: list[Progress] = []
        self.transport = ObjectStore(
            store,
            identity(f"late {number}"),
            folder / str(number),
            run=run,
            poll_s=0.02,
            tell=lambda _: None,
            progress=self.progress.append,
        )

    def train(self, rounds: int) -> None:
        """Until so many rounds are over."""
        while self.replica.step < rounds * self.replica.algorithm.schedule.every:
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * self.replica.step + self.number))
            (self.model(x) - x.roll(1, 1)).square().mean().backward()
            advance(self.replica, self.transport)
            settle(self.replica, self.transport)


def train_all(peers: list[Peer], rounds: int) -> None:
    """All at the same time."""
    threads = [threading.Thread(target=peer.train, args=(rounds,)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(rounds: int, folder: Path) -> dict[str, Any]:
    """Train, join late, and go on."""
    store, run = open_store("memory://"), make_run()
    store.create("run.json", canonical.encode(run))
    peers = [Peer(store, run, number, folder) for number in range(PEERS)]
    for peer in peers:
        peer.transport.connect(peer.replica)
    train_all(peers, rounds)
    joiner = Peer(store, run, PEERS, folder)
    before, started = joiner.transport.meter.total().received_bytes, time.monotonic()
    joiner.transport.connect(joiner.replica)
    spent, received = time.monotonic() - started, joiner.transport.meter.total().received_bytes - before
    replayed = joiner.progress[-1].rounds
    same = joiner.replica.digest() == peers[0].replica.digest()
    time.sleep(LEASE_S)  # the others look at leases every quarter of that
    everybody = [*peers, joiner]
    train_all(everybody, rounds + 1)
    digests = {peer.replica.digest() for peer in everybody}
    manifest = json.loads(store.get(f"rounds/{rounds:08}/0000/manifest-0000.json", limit=2**20))
    for peer in everybody:
        peer.transport.leave()
    numel = sum(param.numel() for param in joiner.model.parameters())
    return {
        "rounds": rounds,
        "peers": PEERS,
        "parameters": numel,
        "replayed_rounds": replayed,
        "received_bytes": received,
        "fraction_of_dense_per_peer_and_round": received / (4 * numel * PEERS * replayed),
        "replay_s": round(spent, 2),
        "bit_identical": same,
        "contributes_in_the_next_round": joiner.transport.peer_id in [entry["peer"] for entry in manifest["entries"]],
        "bit_identical_after_it": len(digests) == 1,
        "torch": torch.__version__,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="after which the fifth peer comes")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--out", type=Path, help="write it as JSON, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sparseloco-join-") as folder:
        found = measure(options.rounds, Path(folder))
    text = json.dumps(found, indent=1) + "\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text if options.json else "".join(f"{name}: {value}\n" for name, value in found.items()))
    good = found["replayed_rounds"] == options.rounds
    good &= found["bit_identical"] and found["bit_identical_after_it"] and found["contributes_in_the_next_round"]
    return 0 if good and found["fraction_of_dense_per_peer_and_round"] < MOST_FRACTION else 1


if __name__ == "__main__":
    sys.exit(main())
