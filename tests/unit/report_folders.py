"""Synthetic run folders, as the trainer writes them."""

import json
import math
from pathlib import Path

DENSE = 3_281_408  # one round of 820,352 float32 values
CONFIG = """[algorithm]
preset = "{preset}"
[data]
path = "<stdlib>"
[optimizer]
lr = {lr}
betas = [0.9, 0.95]
[train]
seed = {seed}
"""


def make_run(
    root: Path,
    label: str,
    *,
    preset: str = "diloco",
    loss: float = 3.0,
    round_bytes: int = DENSE,
    rounds: int = 30,
    lr: float = 3e-3,
    seed: int = 0,
    **changes: object,
) -> Path:
    """A run folder as the trainer writes it; ``changes`` replace fields of the summary."""
    folder = root / f"run{len(list(root.iterdir()))}"
    folder.mkdir()
    lines: list[dict[str, object]] = []
    for n in range(0, rounds + 1, 5):
        at = {"step": 15 * n, "round": n, "tokens": 61_440 * n, "bytes_sent": round_bytes * n}
        value = loss + 4.0 * math.exp(-n / 6) if n < rounds else loss
        evaluation = {
            "kind": "evaluation",
            "loss": value,
            "bits_per_byte": value / 2,
            "evaluated_tokens": 65536,
        }
        lines += [{"kind": "round", "bytes_received": 3, **at}, evaluation | {"split": "validation"} | at]
    lines.append(evaluation | {"split": "test", "loss": loss + 0.02} | at)
    summary = {
        "label": label,
        "preset": preset,
        "held_out_loss": loss + 0.02,
        "validation_loss": loss,
        "bits_per_byte": loss / 2,
        "tokens": 61_440 * rounds,
        "rounds": rounds,
        "steps": 15 * rounds,
        "workers": 4,
        "parameters": 820_352,
        "bytes_sent_per_replica": round_bytes * rounds,
        "bytes_received_per_replica": 3 * round_bytes * rounds,
        "dense_bytes_per_replica": DENSE * rounds,
        "compression": DENSE / round_bytes if round_bytes else None,
        "seconds": 70.0,
        "seconds_in_sync": 6.3,
        "corpus": "Python standard library",
        "corpus_sha256": "9f2c" * 16,
        "settings": {"inner_steps": 15, "outer_lr": 0.7},
    }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    (folder / "config.toml").write_text(CONFIG.format(preset=preset, lr=lr, seed=seed))
    return folder


def three_runs(tmp_path: Path) -> list[Path]:
    """SparseLoCo and DiLoCo with two settings, 151 times apart in bytes."""
    root = tmp_path / "runs"
    root.mkdir()
    return [
        make_run(root, "SparseLoCo", preset="sparseloco", loss=3.01, round_bytes=DENSE // 151, tuned=["decay"]),
        make_run(root, "DiLoCo published", loss=3.21),
        make_run(root, "DiLoCo tuned", loss=2.98, lr=4e-3),
    ]
