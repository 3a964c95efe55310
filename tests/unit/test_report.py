"""Reports from synthetic run folders: what is read, what is refused, what the page says and shows."""

import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sparseloco.errors import ConfigError
from sparseloco.report import load_run, summary_table, units, write_report
from sparseloco.report.runs import distinct
from sparseloco.report.story import contestants, details, headline, selection, warnings
from sparseloco.report.table import settings_table
from tests.unit.report_folders import DENSE, make_run, three_runs


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return three_runs(tmp_path)


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
            value or ""
            for name, value in attrs
            if name in {"src", "href", "srcset", "data", "xlink:href"} and not (value or "").startswith("#")
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
        ("metrics.jsonl", "[1]\n", "must hold the fields of Record on line 1 (Expected `object`, got `array`)"),
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
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "image"}
    assert not re.search(r"https?:|//[a-z]|@import|@font-face|url\((?!#loss_over_)", text)
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
    path = write_report(runs, tmp_path / "out", title="Demo", command="sparseloco compare a.toml --out b")
    text = Page(path.read_text(encoding="utf-8")).text
    for run in runs:
        assert run.label in text
    for expected in (
        "Demo",
        headline(runs).replace("held-out", "held\u2011out"),
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
    write_report(runs, tmp_path / "out", charts=False)


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
    assert shared == {"data.path": "<stdlib>", "optimizer.betas": [0.9, 0.95], "train.seed": 0}


def test_equal_labels_get_their_folder(tmp_path: Path):
    runs = distinct([load_run(make_run(tmp_path, "same")) for _ in range(2)])
    assert [run.label for run in runs] == ["same (run0)", "same (run1)"]


def test_runs_without_evaluations_or_bytes_still_make_a_report(tmp_path: Path):
    silent = make_run(tmp_path, "silent")
    (silent / "metrics.jsonl").write_text("")
    alone = make_run(tmp_path, "alone", round_bytes=0)
    runs = [load_run(silent), load_run(alone)]
    path = write_report(runs, tmp_path / "out")
    assert "hence no curve: silent." in path.read_text(encoding="utf-8")
    write_report(runs[:1], tmp_path / "out2")


def test_matplotlib_is_named_where_it_is_missing(folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    runs = [load_run(folders[0])]
    with pytest.raises(ConfigError, match=r'run pip install "sparseloco\[plot\]"'):
        write_report(runs, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    path = write_report(runs, tmp_path / "out", charts=False)
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    assert "No charts: matplotlib was not installed" in path.read_text(encoding="utf-8")


def test_bad_arguments_are_refused_before_anything_is_written(folders: list[Path], tmp_path: Path):
    runs = [load_run(folders[0])]
    with pytest.raises(ConfigError, match=r"runs=\[\]: must hold at least one run; give the folder of a finished run"):
        write_report([], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be a folder that can be written"):
        write_report(runs, tmp_path / "file", charts=False)


def test_tuned_marks_the_settings_that_were_selected(folders: list[Path], tmp_path: Path):
    tuned = make_run(tmp_path / "runs", "DiLoCo chosen", tuned=["outer_lr"])
    path = write_report([load_run(f) for f in (*folders, tuned)], tmp_path / "out", charts=False)
    text = path.read_text(encoding="utf-8")
    assert "Selected on validation text: SparseLoCo: decay; DiLoCo chosen: outer_lr." in text
    assert text.count("<td>0.7 \u2020</td>") == 1


def test_without_a_command_the_page_names_one_per_run(folders: list[Path], tmp_path: Path):
    path = write_report([load_run(f) for f in folders], tmp_path / "out", charts=False)
    text = Page(path.read_text(encoding="utf-8")).text
    for folder in folders:
        assert f"sparseloco train {(folder / 'config.toml').as_posix()}" in text
