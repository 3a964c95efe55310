"""How the settings of `make demo` were chosen: validation loss of every candidate, on the demo's own run.

    python benchmarks/tune_demo.py [--jobs 2] [--out benchmarks/results/tune_demo.json]

Every candidate is `examples/demo.toml` with some settings replaced; each method gets a grid of its own outer settings
at the same inner learning rates, then more learning rates around the best. Finished candidates are kept in the
output file, so the script can be stopped and started again. Only validation text is looked at; the test split
belongs to the demo.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import tomli_w
import torch

from sparseloco.config import build_algorithm, parse_config
from sparseloco.data import open_dataset
from sparseloco.metrics import write_atomically
from sparseloco.trainer import train

CONFIG = Path(__file__).parents[1] / "examples" / "demo.toml"
COARSE_LRS = [1.5e-3, 3e-3]
FINE_LRS = [1e-3, 2.2e-3]
SPARSELOCO = [{"decay": decay} for decay in (0.8, 0.9)]
DILOCO = [
    {"outer_lr": lr, "outer_momentum": momentum} for lr, momentum in [(0.7, 0.9), (0.7, 0.6), (1.0, 0.5), (1.6, 0.0)]
]
# The published outer setting, and what won on the coarse grid.
REFINED = [("sparseloco", {"decay": 0.9}), ("diloco", DILOCO[0]), ("diloco", DILOCO[1])]


def candidates() -> list[dict[str, Any]]:
    """Preset, its settings and the inner learning rate of every run."""
    methods = [("sparseloco", setting) for setting in SPARSELOCO] + [("diloco", setting) for setting in DILOCO]
    pairs = [*product(COARSE_LRS, methods), *product(FINE_LRS, REFINED)]
    return [{"preset": preset, **setting, "lr": lr} for lr, (preset, setting) in pairs]


def run(candidate: dict[str, Any]) -> dict[str, Any]:
    """Train one candidate; returns it with its validation loss."""
    torch.set_num_threads(1)
    table = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
    table.pop("compare")
    own = {key: value for key, value in candidate.items() if key != "lr"}
    common = {
        key: table["algorithm"][key] for key in ("inner_steps", *(["k"] if own["preset"] == "sparseloco" else []))
    }
    table["algorithm"] = {**common, **own}
    table["optimizer"]["lr"] = candidate["lr"]
    table["train"]["evaluate_every"] = table["train"]["steps"]
    config = parse_config(tomli_w.dumps(table))
    dataset = open_dataset(config.data)
    summary = train(config, build_algorithm(config), dataset, None, label=str(candidate))
    return {**candidate, "validation_loss": round(summary["validation_loss"], 4)}


def main() -> None:
    """Run what is missing, keep all results sorted, print the best of each method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tune_demo.json")
    arguments = parser.parse_args()
    done: list[dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    known = [{key: value for key, value in row.items() if key != "validation_loss"} for row in done]
    missing = [candidate for candidate in candidates() if candidate not in known]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for row in pool.imap_unordered(run, missing):
            done.append(row)
            done.sort(key=lambda r: (r["preset"], r["validation_loss"]))
            write_atomically(arguments.out, json.dumps(done, indent=1) + "\n")
            print(json.dumps(row), flush=True)
    for preset in ("sparseloco", "diloco"):
        print("best:", json.dumps(min((r for r in done if r["preset"] == preset), key=lambda r: r["validation_loss"])))


if __name__ == "__main__":
    main()
