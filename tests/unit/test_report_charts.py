"""The charts of a report, read off their SVG: axes, ticks, labels, colours; and how numbers are written."""

import math
import re
from html import unescape
from itertools import combinations
from pathlib import Path

import pytest

from sparseloco.report import load_run, units
from sparseloco.report.charts import DARK, LIGHT, draw, loss_limits
from tests.unit.report_folders import make_run, three_runs


def texts(svg: str) -> list[str]:
    return [unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def lines(svg: str) -> list[list[tuple[float, float]]]:
    """Points of all paths in the colour of a run, thick enough to be a curve."""
    found = re.findall(r'<path d="([^"]*)"[^>]*style="fill: none; stroke: var\(--c\d\); stroke-width: (?:3|1.9)', svg)
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)] for path in found]


def test_bytes_axis_is_logarithmic_and_starts_after_the_first_bytes(tmp_path: Path):
    runs = [load_run(f) for f in three_runs(tmp_path)]
    svg = draw(runs)[1].svg
    sparse = max(lines(svg), key=lambda line: line[-1][1] - line[-1][0])
    assert len(sparse) == sum(e.bytes_sent > 0 for e in runs[0].curve) == 6
    # The same factor is the same distance.
    assert sparse[1][0] - sparse[0][0] == pytest.approx(sparse[3][0] - sparse[1][0], abs=0.01)
    assert [text for text in texts(svg) if text.endswith("B")] == ["100 kB", "1 MB", "10 MB", "100 MB"]
    assert "151\u00d7 fewer bytes" in texts(svg)
    assert "Bytes sent per replica (log scale)" in texts(svg)


def test_both_charts_share_the_loss_axis_which_leaves_out_the_untrained_start(tmp_path: Path):
    runs = [load_run(f) for f in three_runs(tmp_path)]
    tokens, sent = ([text for text in texts(chart.svg) if re.fullmatch(r"\d\.\d", text)] for chart in draw(runs))
    assert tokens == sent == ["3.0", "3.5", "4.0", "4.5", "5.0"]
    low, high = loss_limits(runs)
    assert low < 2.98 < high < runs[0].curve[0].loss
    assert texts(draw(runs)[0].svg)[:4] == ["0", "500 k", "1 M", "1.5 M"]


def test_a_curve_of_one_point_and_a_flat_one_have_room(tmp_path: Path):
    alone = load_run(make_run(tmp_path, "alone", rounds=0))
    low, high = loss_limits([alone])
    assert low < alone.curve[0].loss < high
    assert "alone" in texts(draw([alone])[0].svg)


@pytest.mark.parametrize("number", [1, 3, 4, 5, 20])
def test_every_line_is_named_and_names_do_not_overlap(tmp_path: Path, number: int):
    runs = [load_run(make_run(tmp_path, f"run {n}", loss=3 + n / 1000)) for n in range(number)]
    for chart in draw(runs):
        names = [run.label for run in runs]
        found = re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>(run \d+)</text>', chart.svg)
        assert sorted(name for _, name in found) == sorted(names)
        apart = [abs(float(a) - float(b)) for (a, _), (b, _) in combinations(found, 2)]
        assert min(apart, default=99) > 12


def test_long_labels_are_cut_in_the_chart_and_whole_in_its_description(tmp_path: Path):
    name = "a very long label of a run that nobody should give but somebody will " + "x" * 60
    svg = draw([load_run(make_run(tmp_path, name))])[0].svg
    assert all(len(text) <= 40 for text in texts(svg))
    assert name in re.findall('aria-label="([^"]*)"', svg)[0]


def test_charts_take_their_colours_from_the_page_and_share_no_id(tmp_path: Path):
    drawn = draw([load_run(f) for f in three_runs(tmp_path)])
    for chart in drawn:
        assert not re.search("#[0-9a-f]{6}", chart.svg)
        assert set(re.findall(r"var\(--(\w+)\)", chart.svg)) <= set(LIGHT) == set(DARK)
        references = set(re.findall(r'(?:href="|url\()#([\w-]+)', chart.svg))
        assert references <= set(re.findall(r'\bid="([^"]*)"', chart.svg))
    ids = [name for chart in drawn for name in re.findall(r'\bid="([^"]*)"', chart.svg)]
    assert len(ids) == len(set(ids))


def test_users_settings_of_matplotlib_change_nothing(tmp_path: Path):
    import matplotlib

    runs = [load_run(f) for f in three_runs(tmp_path)]
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "text.usetex": True}):
        drawn = draw(runs)
        assert matplotlib.rcParams["font.size"] == 30
    assert drawn == draw(runs)


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
