"""Tasks of lm-evaluation-harness on a model's folder: local YAML files with local data, without a network.

``lm_eval`` is imported only when tasks are run; it is the extra ``eval``.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

from sparseloco.errors import ConfigError
from sparseloco.model import load_model, load_tokenizer


def check_tasks(tasks: Path) -> None:
    """Refuse tasks that cannot be run, before a model is read.

    Raises:
        ConfigError: if the extra is not installed, or the folder holds no YAML file.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            f'--tasks {str(tasks)!r}: needs lm-eval, which is not installed; run: pip install "sparseloco[eval]"'
        )
    if not tasks.is_dir() or not any(tasks.rglob("*.yaml")):
        raise ConfigError(f"--tasks {str(tasks)!r}: must be a folder with YAML files of tasks; check the path")


def run_tasks(folder: Path, tasks: Path, *, batch_size: int, limit: int | None = None) -> dict[str, dict[str, float]]:
    """Run every task that the YAML files in a folder define.

    Args:
        folder: A model with its tokenizer.
        tasks: Folder of YAML files in the format of lm-evaluation-harness; ``dataset_path: json`` with local
            ``data_files`` needs no network. Paths in them are relative to the current directory.
        batch_size: Sequences at a time.
        limit: Examples of each task at most.

    Returns:
        Figures by task and metric, ``{"task": {"acc": 0.5, "acc_stderr": 0.1}}``.

    Raises:
        ConfigError: if the extra is not installed, there is no task, or a task fails.
    """
    check_tasks(tasks)
    lm_eval: Any = importlib.import_module("lm_eval")
    huggingface: Any = importlib.import_module("lm_eval.models.huggingface")
    manager: Any = importlib.import_module("lm_eval.tasks").TaskManager(include_path=str(tasks), include_defaults=False)
    names = sorted(manager.all_subtasks)
    if not names:
        raise ConfigError(f"--tasks {str(tasks)!r}: must define tasks, each with a key 'task'; add one")
    source: Any = load_model(folder)
    language_model = huggingface.HFLM(
        pretrained=source, tokenizer=load_tokenizer(folder), batch_size=batch_size, device="cpu"
    )
    try:
        with warnings.catch_warnings(action="ignore"):
            report: Any = lm_eval.simple_evaluate(model=language_model, tasks=names, task_manager=manager, limit=limit)
    except Exception as error:
        raise ConfigError(
            f"--tasks {str(tasks)!r}: must run without an error ({type(error).__name__}: {error}); mend the task"
        ) from error
    return {task: _figures(row) for task, row in report["results"].items()}


def _figures(row: dict[str, Any]) -> dict[str, float]:
    """Numbers of one task; ``acc,none`` is the metric ``acc`` without a filter."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in row.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
