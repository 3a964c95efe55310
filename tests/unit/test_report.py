"""Reports from synthetic run folders: what is read, what is refused, what the page says and shows."""

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sparseloco.errors import ConfigError
from sparseloco.report import chart, labels, load_run, summary_table, svg, units, write_report
from sparseloco.report.runs import distinct
from sparseloco.report.story import contestants, details, headline, selection, warnings
from sparseloco.report.table import settings_table

DENSE = 3_281_408  # one round of 820,352 float32 values
CONFIG = """[algorithm]
preset = "{preset}"
[data]
path = "<stdlib>"
[optimizer]
lr = {lr}
betas = [0.9, 0.95]
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
    (folder / "config.toml").write_text(CONFIG.format(preset=preset, lr=lr))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    root = tmp_path / "runs"
    root.mkdir()
    return [
        make_run(root, "SparseLoCo", preset="sparseloco", loss=3.01, round_bytes=DENSE // 151, tuned=["decay"]),
        make_run(root, "DiLoCo published", loss=3.21),
        make_run(root, "DiLoCo tuned", loss=2.98, lr=4e-3),
    ]


class Page(HTMLParser):
    """Everything that a browser would fetch, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.fetched += [
            value or "" for name, value in attrs if name in {"src", "href", "srcset", "data", "xlink:href"}
        ]

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_load_run_reads_curve_summary_and_settings(folders: list[Path]):
    run = load_run(folders[0])
    assert run.label == "SparseLoCo"
    assert [e.round for e in run.curve] == [0, 5, 10, 15, 20, 25, 30]
    assert run.curve[-1].loss == 3.01
    assert run.evaluations[-1].split == "test"
    assert run.summary.tuned == ("decay",)
    assert run.config["optimizer"]["lr"] == 3e-3
    assert run.sync_fraction == pytest.approx(0.09)


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "config.toml"])
def test_a_missing_file_is_named(folders: list[Path], name: str):
    (folders[0] / name).unlink()
    with pytest.raises(ConfigError) as error:
        load_run(folders[0])
    assert str(error.value) == (f"folder={str(folders[0])!r}: must hold {name}; give the folder of a finished run")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("summary.json", "{", "must hold valid JSON"),
        ("summary.json", "{}", "must hold the fields of Summary (Object missing required field `label`)"),
        ("metrics.jsonl", '{"kind": "round"}\n{"kind": "eval', "must hold valid JSON on line 2"),
        ("metrics.jsonl", "[1]\n", "must hold an object with a 'kind' on line 1"),
        (
            "metrics.jsonl",
            '{"kind": "evaluation", "loss": "low"}',
            "must hold the fields of Evaluation on line 1",
        ),
        ("config.toml", "a = = 1", "must hold valid TOML"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(folders: list[Path], name: str, content: str, expected: str):
    (folders[0] / name).write_text(content)
    with pytest.raises(ConfigError) as error:
        load_run(folders[0])
    assert str(folders[0] / name) in str(error.value)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("; run it again or leave this run out of the report")


def test_bytes_that_are_not_text_are_refused(folders: list[Path]):
    (folders[0] / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="must be a readable text file"):
        load_run(folders[0])


def test_report_needs_nothing_but_itself(folders: list[Path], tmp_path: Path):
    path = write_report(
        [load_run(f) for f in folders], tmp_path / "new" / "out", command="sparseloco compare demo.toml"
    )
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.fetched == []
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "use", "image"}
    assert not re.search(r"https?:|//[a-z]|@import|@font-face|url\((?!#clip-)", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme:dark" in text
    assert "@media print" in text
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "loss_over_bytes.png",
        "loss_over_tokens.png",
        "report.html",
    ]
    for name in ("loss_over_bytes.png", "loss_over_tokens.png"):
        assert (path.parent / name).read_bytes().startswith(b"\x89PNG\r\n")


def test_report_tells_the_whole_story(folders: list[Path], tmp_path: Path):
    runs = [load_run(f) for f in folders]
    path = write_report(runs, tmp_path / "out", title="Demo", command="sparseloco compare a.toml --out b", pngs=False)
    text = Page(path.read_text(encoding="utf-8")).text
    for run in runs:
        assert run.label in text
    for expected in (
        "Demo",
        headline(runs),
        "sparseloco compare a.toml --out b",
        "SHA-256",
        "9f2c" * 16,
        "Python standard library",
        "Hyper-parameters were selected on the validation split, which the curves show; "
        "the table shows the test split. Selected on validation text: SparseLoCo: decay.",
        "Bytes sent per replica (log scale)",
        "Validation loss (nats per token)",
        "inner_steps",
        "optimizer.betas",
    ):
        assert expected in text, expected
    assert not (path.parent / "loss_over_bytes.png").exists()


def test_same_runs_give_the_same_bytes(folders: list[Path], tmp_path: Path):
    runs = [load_run(f) for f in folders]
    first, second = (write_report(runs, tmp_path / name).parent for name in ("a", "b"))
    for name in ("report.html", "loss_over_bytes.png", "loss_over_tokens.png"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_every_string_of_a_run_is_escaped(tmp_path: Path):
    bad = '<script>alert("x")</script>&$x_1$'
    folder = make_run(
        tmp_path,
        bad,
        preset=bad.replace('"', ""),
        corpus=bad,
        corpus_sha256=bad,
        settings={bad: bad},
        tuned=[bad],
    )
    path = write_report([load_run(folder)], tmp_path / "out", title=bad, command=bad)
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "script" not in Page(text).tags


def test_headline_and_details_come_from_the_data(folders: list[Path]):
    runs = [load_run(f) for f in folders]
    plain = headline(runs).replace("\u00a0", " ")
    assert plain == (
        "SparseLoCo comes within 1.0 % of the held-out loss of DiLoCo tuned "
        "while sending 151\u00d7 fewer bytes than dense float32."
    )
    assert "loss ratio of 1.010 (3.030 to 3.000)" in details(runs)
    assert "652 kB instead of 98.4 MB per replica" in details(runs).replace("\u00a0", " ")
    assert "Lowest held-out loss: DiLoCo tuned, 3.000 nats per token." in details(runs)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (2.80, "S ends 6.0 % below the held-out loss of D"),
        (2.98, "S matches the held-out loss of D"),
        (3.00, "S comes within 0.7 % of the held-out loss of D"),
        (3.40, "S ends 14.0 % above the held-out loss of D"),
    ],
)
def test_headline_takes_no_side(tmp_path: Path, loss: float, expected: str):
    sparse = make_run(tmp_path, "S", preset="sparseloco", loss=loss, round_bytes=DENSE // 151)
    runs = [load_run(sparse), load_run(make_run(tmp_path, "D", loss=2.98))]
    assert headline(runs).replace("\u00a0", " ").startswith(expected)


def test_settings_are_chosen_on_validation_and_rivals_on_test(tmp_path: Path):
    cases = {"good test": (3.2, 3.0), "good validation": (3.1, 3.3)}
    runs = [
        load_run(make_run(tmp_path, f"{preset} {name}", preset=preset, validation_loss=v, held_out_loss=t))
        for preset in ("sparseloco", "diloco")
        for name, (v, t) in cases.items()
    ]
    found = contestants(runs)
    assert found is not None
    assert [run.label for run in found] == ["sparseloco good validation", "diloco good test"]


def test_losses_on_different_corpora_are_not_compared(tmp_path: Path):
    folders = [make_run(tmp_path, name, corpus_sha256=name) for name in "ab"]
    runs = [load_run(f) for f in folders]
    assert headline(runs) == "No loss to compare: the runs use different corpora."
    assert "The runs use different corpora, so their losses cannot be compared." in warnings(runs)


def test_a_diverged_run_is_shown_as_such(tmp_path: Path):
    folders = [
        make_run(tmp_path, "fine"),
        make_run(tmp_path, "lost", held_out_loss=math.nan, compression=None),
    ]
    runs = [load_run(f) for f in folders]
    assert "No finite held-out loss: lost." in warnings(runs)
    assert summary_table(runs)[1]["Held-out loss (nats/token)"].text == units.MISSING
    assert summary_table(runs)[1]["Compression"].text == units.MISSING
    assert "fine has the lowest held-out loss" in headline(runs)
    write_report(runs, tmp_path / "out", pngs=False)


def test_selection_says_so_where_nothing_was_selected(tmp_path: Path):
    text = selection([load_run(make_run(tmp_path, "a"))])
    assert text.endswith("These runs name no setting that was selected.")


def test_summary_table_has_one_row_per_run_and_marks_the_best(folders: list[Path]):
    rows = summary_table([load_run(f) for f in folders])
    assert [row["Run"].text for row in rows] == ["SparseLoCo", "DiLoCo published", "DiLoCo tuned"]
    assert {name: cell.text for name, cell in rows[0].items()} == {
        "Run": "SparseLoCo",
        "Held-out loss (nats/token)": "3.030",
        "Bits per byte": "1.505",
        "Sent per replica": "652 kB",
        "Received per replica": "1.96 MB",
        "Compression": "151\u00d7",
        "Tokens": "1.84 M",
        "Rounds": "30",
        "Time": "1 min 10 s",
        "In sync": "9.0 %",
    }
    best = [[name for name, cell in row.items() if cell.best] for row in rows]
    assert best[0] == ["Sent per replica", "Received per replica", "Compression"]
    assert best[1] == []
    # Equal times are nobody's best.
    assert best[2] == ["Held-out loss (nats/token)", "Bits per byte"]


def test_settings_table_parts_what_differs_from_what_is_common(folders: list[Path]):
    by_run, shared = settings_table([load_run(f) for f in folders])
    assert by_run["preset"] == ["sparseloco", "diloco", "diloco"]
    assert by_run["inner_steps"] == [15, 15, 15]
    assert by_run["optimizer.lr"] == [3e-3, 3e-3, 4e-3]
    assert shared == {"data.path": "<stdlib>", "optimizer.betas": [0.9, 0.95]}


def test_equal_labels_get_their_folder(tmp_path: Path):
    runs = distinct([load_run(make_run(tmp_path, "same")) for _ in range(2)])
    assert [run.label for run in runs] == ["same (run0)", "same (run1)"]


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
    steps = [b.at - a.at for a, b in zip(drawn.x_ticks, drawn.x_ticks[1:], strict=False)]
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


def test_runs_without_evaluations_or_bytes_still_make_a_report(tmp_path: Path):
    silent = make_run(tmp_path, "silent")
    (silent / "metrics.jsonl").write_text("")
    alone = make_run(tmp_path, "alone", round_bytes=0)
    runs = [load_run(silent), load_run(alone)]
    path = write_report(runs, tmp_path / "out")
    assert "hence no curve: silent." in path.read_text(encoding="utf-8")
    assert chart.over_bytes(runs).lines == ()
    write_report(runs[:1], tmp_path / "out2")


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


def test_matplotlib_is_named_where_it_is_missing(folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    runs = [load_run(folders[0])]
    with pytest.raises(ConfigError, match=r'run pip install "sparseloco\[plot\]"'):
        write_report(runs, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert write_report(runs, tmp_path / "out", pngs=False).exists()


def test_bad_arguments_are_refused_before_anything_is_written(folders: list[Path], tmp_path: Path):
    runs = [load_run(folders[0])]
    with pytest.raises(ConfigError, match=r"runs=\[\]: must hold at least one run; give the folder of a finished run"):
        write_report([], tmp_path / "out")
    with pytest.raises(ConfigError, match="tuned='Sparse': must be the label of a run; use one of SparseLoCo"):
        write_report(runs, tmp_path / "out", tuned={"Sparse": ["decay"]})
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be a folder that can be written"):
        write_report(runs, tmp_path / "file", pngs=False)


def test_tuned_marks_the_settings_that_were_selected(folders: list[Path], tmp_path: Path):
    runs = [load_run(f) for f in folders]
    path = write_report(runs, tmp_path / "out", tuned={"DiLoCo tuned": ["outer_lr"]}, pngs=False)
    text = path.read_text(encoding="utf-8")
    assert "Selected on validation text: SparseLoCo: decay; DiLoCo tuned: outer_lr." in text
    assert text.count("<td>0.7 \u2020</td>") == 1


def test_without_a_command_the_page_names_one_per_run(folders: list[Path], tmp_path: Path):
    path = write_report([load_run(f) for f in folders], tmp_path / "out", pngs=False)
    text = Page(path.read_text(encoding="utf-8")).text
    for folder in folders:
        assert f"sparseloco train {(folder / 'config.toml').as_posix()}" in text


def test_label_placement_is_pure_geometry():
    plot = labels.Box(0, 0, 100, 100)
    one, two = labels.place(["a", "b"], [0, 1], [[(0, 0), (100, 50)], [(0, 0), (100, 52)]], plot)
    assert one.y + one.height / 2 <= two.y - two.height / 2
    assert one.y + two.y == pytest.approx(102)
    assert one.leader is not None
