"""Throw damaged frames at the reader for a long time, under a memory cap.

Every case is a good frame with one to three damages (bits, bytes, table entries, lengths, floats, flags, cuts, noise),
mostly with length and checksum made right again, so that the checks behind the checksum are met; one in a hundred is
plain noise. A case passes if the reader refuses it with `WireError`, or accepts it and encodes what it read to the same
bytes. For a part of the cases an independent reader, `tests/wire/second_reader.py`, must come to the same verdict and
values. The address space is capped a little above what the imports took: a length that lies must not cost memory.

    python benchmarks/fuzz_frames.py --cases 200000 --out benchmarks/results/fuzz_frames.json
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the mutations and the second reader live with the tests

from tests.wire import frames
from tests.wire.mutations import Target, check, mutate, targets

MEGABYTE = 2**20


def cap_memory(megabytes: int) -> None:
    """Let this process take so much address space beyond what it has."""
    status = Path("/proc/self/status").read_text()
    (size,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmSize:"))
    limit = int(size) * 1024 + megabytes * MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def hostile(target: Target, chance: random.Random) -> bytes:
    """A damaged frame, or noise with the beginning of a frame."""
    if chance.random() < 0.01:
        head = target.frame[: chance.choice([0, 8, frames.CHECKSUM])]
        return head + chance.randbytes(chance.randrange(200))
    return mutate(target, chance)


def run(cases: int, seed: int, second_every: int) -> dict[str, Any]:
    """Counts; raises what a reader raised other than its one error."""
    chance, found = random.Random(seed), targets()
    accepted = compared = 0
    begun = time.monotonic()
    for case in range(cases):
        target = chance.choice(found)
        frame = hostile(target, chance)
        second = case % second_every == 0
        try:
            accepted += check(frame, target, second=second)
        except BaseException:
            print(f"seed {seed}, case {case}: frame {frame.hex()}", file=sys.stderr)
            raise
        compared += second
    return {
        "cases": cases,
        "seed": seed,
        "good_frames": len(found),
        "refused": cases - accepted,
        "accepted": accepted,
        "compared_with_second_reader": compared,
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--second-every", type=int, default=10, help="compare with the second reader every so often")
    parser.add_argument("--cap", type=int, default=64, help="megabytes of address space beyond the imports")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cap_memory(arguments.cap)
    result = run(arguments.cases, arguments.seed, arguments.second_every)
    result["cap_megabytes"] = arguments.cap
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
