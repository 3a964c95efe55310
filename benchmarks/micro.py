"""The long version of `sparseloco bench`: every case on large matrices, with a stored result and a picture.

    python benchmarks/micro.py [--out benchmarks/results]

Writes micro.json, the object that `sparseloco bench --json` prints, and micro.png, time over k. Takes about ten
minutes on two idle cores; run it on a quiet machine, and look at `noise` in the result before believing anything else.
Ends with 1 if the plain baseline takes more than 30 times the limit.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sparseloco.bench.chart import time_over_k
from sparseloco.bench.figures import check_baseline
from sparseloco.bench.run import Settings, measure
from sparseloco.errors import ConfigError

LONG = Settings(grid_side=4096, budget_s=1.0, headline_budget_s=3.0)


def main() -> int:
    """Measure, write both files, and say which."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of both files")
    parser.add_argument("--side", type=int, default=None, help="rows and columns of all matrices, a multiple of 64")
    arguments = parser.parse_args()
    side = arguments.side
    settings = LONG if side is None else Settings(side=side, grid_side=side)
    found = measure(settings, lambda what, done, total: print(f"{done:4d} of {total}: {what}", file=sys.stderr))
    arguments.out.mkdir(parents=True, exist_ok=True)
    result, picture = arguments.out / "micro.json", arguments.out / "micro.png"
    result.write_text(in_lines(found) + "\n", encoding="utf-8")
    time_over_k(found["timings"], picture)
    print(f"{result}\n{picture}")
    try:
        check_baseline(found["plain_over_limit"])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def in_lines(found: dict[str, object]) -> str:
    """JSON with one line per row of a table, so that changes can be read."""
    tables = {name: value for name, value in found.items() if isinstance(value, list)}
    plain = {name: value for name, value in found.items() if name not in tables}
    parts = [json.dumps(plain, indent=2)[:-2]]
    for name, rows in tables.items():
        parts.append(f'  "{name}": [\n' + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n  ]")
    return ",\n".join(parts) + "\n}"


if __name__ == "__main__":
    sys.exit(main())
