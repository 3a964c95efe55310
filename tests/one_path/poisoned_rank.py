"""One rank of torchrun with a poisoned algorithm: ``-m tests.one_path.poisoned_rank TEXT STEP OUT``."""

from __future__ import annotations

import sys
from pathlib import Path

from sparseloco.data import open_dataset
from sparseloco.launch import train_rank
from tests.poison import poisoned
from tests.unit.test_trainer import algorithm, data_config_of, run_config, settings

if __name__ == "__main__":
    text, step, out = sys.argv[1:]
    config = run_config(data_config_of(text), settings())
    train_rank(config, poisoned(algorithm(), int(step)), open_dataset(config.data), Path(out), label="run")
