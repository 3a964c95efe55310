"""Two inner steps and one round of a recipe on this machine, with two ranks over gloo and a batch of one sequence.

    python benchmarks/recipe_round.py [RECIPE.toml] [--set A.B=C] [--out benchmarks/results/recipe_round.json]

The model is the recipe's own, every other size is shrunk until two replicas fit; nothing is saved. It prints what
`sparseloco describe` says beside what was measured, and fails if the bytes of the round are not those described.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from pathlib import Path
from typing import Any

from sparseloco.cli.figures import describe
from sparseloco.config import Entry, build_algorithm, load_config
from sparseloco.data import open_dataset
from sparseloco.launch import train_processes

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "llama-178m.toml"
SHRUNK = [
    "train.workers=2",
    "train.processes=true",
    "train.batch_size=1",
    "train.accumulation=1",
    "train.sequence_length=64",
    "train.evaluation_tokens=64",
    "train.autocast=off",
    "algorithm.inner_steps=2",
    "train.steps=2",
    "optimizer.warmup_steps=1",
]


def measure(recipe: Path, overrides: list[str]) -> dict[str, Any]:
    """Figures of one round beside those described."""
    config = load_config(recipe, [*SHRUNK, *overrides])
    described = describe(Entry(label="round", config=config))
    dataset = open_dataset(config.data)
    summary = train_processes(config, build_algorithm(config), dataset, None, label="round")
    memory = described["memory_bytes_per_rank"]
    return {
        "recipe": recipe.name,
        "overrides": [*SHRUNK, *overrides],
        "text": dataset.corpus_name,
        "ranks": config.train.workers,
        "steps": summary["steps"],
        "rounds": summary["rounds"],
        "parameters": summary["parameters"],
        "bytes_sent_per_round": {
            "described": described["bytes_sent_per_round"],
            "measured": summary["bytes_sent_per_replica"] // summary["rounds"],
        },
        "memory_bytes_per_rank": {
            "described": sum(memory.values()),
            "peak_of_a_process": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        },
        "compression": summary["compression"],
        "held_out_loss": summary["held_out_loss"],
        "seconds": round(summary["seconds"], 1),
        "seconds_in_sync": round(summary["seconds_in_sync"], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, default=RECIPE)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=C")
    parser.add_argument("--out", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    figures = measure(options.recipe, options.overrides)
    text = json.dumps(figures, indent=2) + "\n"
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    sent = figures["bytes_sent_per_round"]
    return int(sent["described"] != sent["measured"])


if __name__ == "__main__":
    sys.exit(main())
