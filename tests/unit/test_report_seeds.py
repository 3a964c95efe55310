"""Several seeds: what counts as a repetition, the interval itself, and where it is shown."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist, mean, stdev

import pytest

from sparseloco.report import groups, load_run, seeds_table, units, write_report
from sparseloco.report.seeds import _STUDENT, interval
from tests.unit.report_folders import make_run


def test_runs_that_differ_in_their_seed_alone_are_one_group(tmp_path: Path) -> None:
    made = [make_run(tmp_path, "A", loss=3.0 + seed / 10, seed=seed) for seed in (0, 1, 2)]
    others = [
        make_run(tmp_path, "A", loss=9.0, seed=2),  # a seed again: no independent run
        make_run(tmp_path, "A", loss=9.0, seed=4, lr=1.0),  # other settings
        make_run(tmp_path, "B", loss=9.0, seed=5),  # another label
        make_run(tmp_path, "A", loss=9.0, seed=6, corpus_sha256="0"),  # another text
    ]
    found = groups([load_run(folder) for folder in (*made, *others)])
    assert [(group.label, group.seeds) for group in found] == [("A", [0, 1, 2])]
    losses = [3.02, 3.12, 3.22]
    assert found[0].interval("held_out_loss").mean == pytest.approx(mean(losses))
    assert found[0].interval("held_out_loss").half_width == pytest.approx(4.303 * stdev(losses) / math.sqrt(3))
    (row,) = seeds_table(found)
    assert row["Held-out loss (nats/token)"].text == "3.120 \u00b1 0.248"
    assert row["Seeds"].text == "0, 1, 2"


def test_one_seed_gives_no_interval(tmp_path: Path) -> None:
    assert groups([load_run(make_run(tmp_path, "A")), load_run(make_run(tmp_path, "B", seed=1))]) == []


def test_students_points_fall_towards_the_normal_one() -> None:
    assert list(_STUDENT) == sorted(_STUDENT, reverse=True)
    assert _STUDENT[0] == pytest.approx(math.tan(math.pi * 0.475), abs=1e-3)  # one degree of freedom is Cauchy's
    assert NormalDist().inv_cdf(0.975) < _STUDENT[-1] < 2.05
    many = interval([3.0, 3.2] * 50)
    assert many.half_width == pytest.approx(2.042 * stdev([3.0, 3.2] * 50) / 10)


def test_a_diverged_seed_leaves_no_number(tmp_path: Path) -> None:
    runs = [load_run(make_run(tmp_path, "A", seed=seed)) for seed in (0, 1)]
    object.__setattr__(runs[1].summary, "held_out_loss", math.nan)
    (group,) = groups(runs)
    assert group.interval("held_out_loss").text == f"{units.MISSING} \u00b1 {units.MISSING}"
    assert group.as_json()["held_out_loss"] == {"mean": None, "half_width_95": None}


def test_the_page_has_the_table_only_with_several_seeds(tmp_path: Path) -> None:
    runs = [load_run(make_run(tmp_path, "A", loss=3.0 + seed / 10, seed=seed)) for seed in (0, 1, 2)]
    text = write_report(runs, tmp_path / "many", charts=False).read_text("utf-8")
    assert "<h2>Over seeds</h2>" in text
    assert "3.120 \u00b1 0.248" in text
    assert "95 % interval" in text
    assert "Over seeds" not in write_report(runs[:1], tmp_path / "one", charts=False).read_text("utf-8")
