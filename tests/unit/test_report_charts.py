"""The charts of a report: places on the axes, ticks, labels, and how numbers are written."""

import math
from itertools import pairwise
from pathlib import Path

import pytest

from sparseloco.report import chart, labels, load_run, svg, units
from tests.unit.report_folders import DENSE, make_run, three_runs


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return three_runs(tmp_path)


def test_bytes_axis_is_logarithmic_and_starts_after_the_first_bytes(folders: list[Path]):
    runs = [load_run(f) for f in folders]
    drawn = chart.over_bytes(runs)
    places = {line.label: [x for x, _ in line.points] for line in drawn.lines}
    sent = [e.bytes_sent for e in runs[0].curve if e.bytes_sent]
    assert len(places["SparseLoCo"]) == len(sent) == 6
    # The same factor is the same distance, anywhere on the axis.
    dense_decade = (places["DiLoCo tuned"][-1] - places["DiLoCo tuned"][0]) / math.log10(6)
    for x, value in zip(places["SparseLoCo"], sent, strict=True):
        expected = places["SparseLoCo"][0] + dense_decade * math.log10(value / sent[0])
        assert x == pytest.approx(expected, abs=1e-6)
    assert [tick.text for tick in drawn.x_ticks] == ["100 kB", "1 MB", "10 MB", "100 MB"]
    steps = [b.at - a.at for a, b in pairwise(drawn.x_ticks)]
    assert steps == pytest.approx([dense_decade] * 3)
    assert drawn.bracket is not None
    assert drawn.bracket.text == "151\u00d7 fewer bytes"


def test_both_charts_share_the_loss_axis(folders: list[Path]):
    runs = [load_run(f) for f in folders]
    tokens, sent = chart.over_tokens(runs), chart.over_bytes(runs)
    assert tokens.y_ticks == sent.y_ticks
    assert tokens.lines[0].points[-1][1] == sent.lines[0].points[-1][1]
    assert [tick.text for tick in tokens.x_ticks] == ["0", "500 k", "1 M", "1.5 M"]


@pytest.mark.parametrize("number", [1, 3, 5, 8, 20])
def test_labels_name_every_line_and_do_not_overlap(tmp_path: Path, number: int):
    runs = [
        load_run(make_run(tmp_path, f"run {n} of many", loss=3 + n / 1000, round_bytes=DENSE // (n + 1)))
        for n in range(number)
    ]
    for drawn in (chart.over_tokens(runs), chart.over_bytes(runs)):
        assert [" ".join(label.lines) for label in drawn.labels] == [run.label for run in runs]
        boxes = [label.box for label in drawn.labels]
        if number <= 8:
            for n, a in enumerate(boxes):
                for b in boxes[:n]:
                    assert a.left >= b.right or b.left >= a.right or a.top >= b.bottom - 0.1 or b.top >= a.bottom - 0.1
        assert "run 0 of many" in svg.draw(drawn)


def test_long_labels_are_cut_in_the_chart_and_whole_on_hover(tmp_path: Path):
    name = "a very long label of a run that nobody should give but somebody will " + "x" * 60
    drawn = chart.over_tokens([load_run(make_run(tmp_path, name))])
    assert all(len(line) <= 19 for line in drawn.labels[0].lines)
    assert len(drawn.labels[0].lines) <= 2
    assert f"<title>{name}</title>" in svg.draw(drawn)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.1e5, 9.8e7, [3e5, 1e6, 3e6, 1e7, 3e7]),
        (8e4, 7e5, [1e5, 2e5, 5e5]),
        (9e3, 2e6, [1e4, 1e5, 1e6]),
        (1.0, 1e14, [1.0, 1e3, 1e6, 1e9, 1e12]),
    ],
)
def test_log_ticks_are_few_and_round(low: float, high: float, expected: list[float]):
    assert chart.log_ticks(low, high, 6) == pytest.approx(expected)


@pytest.mark.parametrize(("low", "high"), [(0, 1_843_200), (2.98, 4.4), (2.9999, 3.0001), (0, 1)])
def test_linear_ticks_are_few_and_inside(low: float, high: float):
    found = chart.linear_ticks(low, high, 5)
    assert 2 <= len(found) <= 5
    assert low - 1e-9 <= found[0]
    assert found[-1] <= high + 1e-9


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (units.num_bytes, 0, "0 B"),
        (units.num_bytes, 652_042, "652 kB"),
        (units.num_bytes, 999_600, "1.00 MB"),
        (units.num_bytes, 98_445_840, "98.4 MB"),
        (units.count, 9_999, "9999"),
        (units.count, 1_843_200, "1.84 M"),
        (units.ratio, 151.2, "151\u00d7"),
        (units.ratio, 1.0, "1.00\u00d7"),
        (units.ratio, math.inf, units.MISSING),
        (units.duration, 42.06, "42.1 s"),
        (units.duration, 200, "3 min 20 s"),
        (units.duration, 7_500, "2 h 05 min"),
        (units.percent, 0.0312, "3.1 %"),
        (units.setting, True, "true"),
        (units.setting, 1.0, "1.0"),
        (units.setting, 3e-3, "0.003"),
        (units.setting, [0.9, 0.95], "[0.9, 0.95]"),
        (units.setting, None, units.MISSING),
    ],
)
def test_numbers_are_written_one_way(function, value: object, expected: str):
    assert function(value) == expected


def test_label_placement_is_pure_geometry():
    plot = labels.Box(0, 0, 100, 100)
    one, two = labels.place(["a", "b"], [0, 1], [[(0, 0), (100, 50)], [(0, 0), (100, 52)]], plot)
    assert one.y + one.height / 2 <= two.y - two.height / 2
    assert one.y + two.y == pytest.approx(102)
    assert one.leader is not None
