"""What peers compare at the start, and how a difference is said."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sparseloco.data.settings import DataConfig
from sparseloco.errors import DivergenceError
from sparseloco.identity import common_facts
from sparseloco.settings import LoggingConfig, TransportConfig
from sparseloco.transport import starts
from sparseloco.transport.starts import compare_facts, name_divergence
from tests import runs


def differences(first: dict[str, str], other: dict[str, str]) -> list[str]:
    return [name for name in {**first, **other} if first.get(name) != other.get(name)]


def test_a_fact_that_one_peer_lacks_and_more_than_four_are_said() -> None:
    mine = {f"train.{letter}": "1" for letter in "abcdef"}
    compare_facts((0, mine), (1, dict(mine)))
    with pytest.raises(DivergenceError) as caught:
        compare_facts((0, mine), (3, {"train.a": "2"}))
    assert str(caught.value) == (
        "peer 3: must start like peer 0, but train.a is 1 at peer 0 and 2 at peer 3, "
        "train.b is 1 at peer 0 and missing at peer 3, train.c is 1 at peer 0 and missing at peer 3, "
        "train.d is 1 at peer 0 and missing at peer 3, and 2 more; "
        "give all of them the same settings, text, model and version"
    )


def test_state_that_is_in_no_tensor_is_said() -> None:
    assert name_divergence(4, [{"a": "1"}, {"a": "1"}]) == (
        "shared state=peers 0 and 1 differ in round 4, though in no tensor: must be equal at all peers, with the state "
        "of outer optimizer and compressor; restart all of them from a checkpoint"
    )


def test_several_odd_peers_are_named_beside_the_majority() -> None:
    text = name_divergence(4, [{"a": "1", "b": each} for each in "xyxxz"])
    assert text.startswith(
        "b=peers 1 and 4 and peers 0, 2 and 3 differ in round 4: must be equal at all peers, and 3 of 5"
    )
    assert text.endswith("restart peers 1 and 4 from a checkpoint of the others")


def test_the_hash_of_the_source_changes_with_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transport").mkdir()
    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr(starts, "__file__", str(tmp_path / "transport" / "starts.py"))

    def now() -> str:
        starts.source_hash.cache_clear()
        return starts.source_hash()

    try:
        before = now()
        assert now() == before
        (tmp_path / "a.py").write_text("2")
        changed = now()
        (tmp_path / "a.py").rename(tmp_path / "b.py")
        assert len({before, changed, now()}) == 3
    finally:
        starts.source_hash.cache_clear()


def test_a_run_compares_its_settings_and_its_text_by_name() -> None:
    base = runs.config()
    facts = common_facts(base, runs.dataset(), None)
    assert facts["resume.step"] == "none"
    other = common_facts(runs.config(batch_size=4, lr=0.5), runs.dataset(seed=1), None)
    assert differences(facts, other) == ["train.batch_size", "optimizer.lr", "corpus.sha256"]
    deadline = msgspec.structs.replace(base, transport=TransportConfig(deadline_s=60))
    assert differences(facts, common_facts(deadline, runs.dataset(), None)) == ["transport.deadline_s"]


def test_where_things_lie_on_a_machine_is_its_own_business() -> None:
    base = runs.config()
    facts = common_facts(base, runs.dataset(), None)
    elsewhere = msgspec.structs.replace(
        base,
        data=DataConfig(path="/mnt/text"),
        transport=TransportConfig(interface="ib0"),
        logging=LoggingConfig(to=("trackio",)),
    )
    assert differences(facts, common_facts(elsewhere, runs.dataset(), None)) == []


def test_a_checkpoint_of_another_step_is_a_difference(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="buffers="):
        runs.simulated(tmp_path, runs.config(every=5, keep=9), runs.METHODS["sparseloco"]())
    first, second = (
        common_facts(runs.config(), runs.dataset(), runs.checkpoint_at(tmp_path, step)) for step in (5, 10)
    )
    assert differences(first, second) == ["resume.step"]
    assert (first["resume.step"], second["resume.step"]) == ("5", "10")
