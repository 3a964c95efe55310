"""Everything that a peer must refuse, one after the other in one process, and the most memory that it had.

``python -m tests.peers.refusals FOLDER`` prints, as JSON, peak bytes after an honest run and at the end.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

from sparseloco.peers.store import open_store
from tests.peers import test_catching_up, test_hostile_peers, test_run_file
from tests.peers.crowd import train_all

_REMOTE_CODE = ({"trust_remote_code": True}, "model.trust_remote_code: must not stand in a run, which makes no")


def peak_bytes() -> int:
    """Most memory that this process has had; of Linux, and without that of the process which started it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def train_honestly(folder: Path) -> None:
    peers = test_hostile_peers.honest(folder, open_store("memory://"))
    try:
        train_all(peers, test_hostile_peers.STEPS)
    finally:
        for peer in peers:
            peer.transport.leave()


def refuse_all(folder: Path) -> list[str]:
    """Each is a test that fails if it is not refused; returns their names."""
    for case in test_hostile_peers.RUBBISH:
        test_hostile_peers.test_rubbish_is_left_out_with_its_reason(case, folder / case)
    for test in (
        test_hostile_peers.test_ten_gigabytes_are_refused_before_they_are_read,
        test_hostile_peers.test_a_size_that_is_a_lie_is_no_way_around_the_limit,
        test_hostile_peers.test_manifest_of_a_stranger_counts_for_nobody,
        test_hostile_peers.test_names_that_no_peer_makes_are_looked_over,
        test_catching_up.test_an_anchor_that_does_not_match_is_refused_and_an_older_one_taken,
    ):
        test(folder / test.__name__)
    test_run_file.test_what_could_hurt_a_reader_is_refused("model", *_REMOTE_CODE)
    test_run_file.test_forms_that_are_not_canonical_are_refused()
    return [*test_hostile_peers.RUBBISH, "ten gigabytes", "lie", "stranger", "names", "anchor", "remote code", "nested"]


def main() -> None:
    warnings.simplefilter("error")
    folder = Path(sys.argv[1])
    train_honestly(folder / "honest")
    before = peak_bytes()
    refused = refuse_all(folder)
    print(json.dumps({"honest_bytes": before, "peak_bytes": peak_bytes(), "refused": refused}))


if __name__ == "__main__":
    main()
