"""Three peers, crash points, outcomes of writes: what is promised holds in every order, and each rule is needed.

``SPARSELOCO_LONG_CHECKS=1`` walks thirty times as often, in some minutes.
"""

from __future__ import annotations

import os

import pytest

from sparseloco.peers import manifest, rounds
from tests.peers import mutants
from tests.peers.explore import Budget, Checker, Violation, World
from tests.peers.machine import Rules
from tests.peers.runs import identity
from tests.peers.verdicts import cached_judge, cached_run_at, cached_seal

WRITER = (identity(1).public,)
LONG = os.environ.get("SPARSELOCO_LONG_CHECKS") == "1"
NUM_WALKS = 20_000 if LONG else 700
pytestmark = pytest.mark.timeout(3600 if LONG else 600)


@pytest.fixture(autouse=True)
def keep_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are pure functions."""
    monkeypatch.setattr(manifest, "run_at", cached_run_at)
    monkeypatch.setattr(rounds, "judge", cached_judge)
    monkeypatch.setattr(rounds, "seal", cached_seal)


@pytest.mark.parametrize(
    ("rules", "budget", "num_worlds"),
    [
        (Rules(), Budget(), 19_000),
        (Rules(), Budget(crashes=1), 130_000),
        (Rules(writers=(0,)), Budget(faults=1), 100_000),
        (Rules(min_peers=3, no_quorum="wait", changes=({"policy.min_peers": 2},)), Budget(), 126_000),
        pytest.param(Rules(writers=(0,), changes=({"void": 0},)), Budget(), 620_000, marks=pytest.mark.slow),
        pytest.param(Rules(), Budget(faults=1), 700_000, marks=pytest.mark.slow),
        pytest.param(Rules(writers=(0, 1)), Budget(garbage=1), 290_000, marks=pytest.mark.slow),
    ],
    ids=["calm", "a crash", "a fault, one writer", "an owner that helps", "a void", "a fault", "rubbish"],
)
def test_every_interleaving_of_a_round(rules: Rules, budget: Budget, num_worlds: int) -> None:
    """All of them, and from each of the worlds peers get on (C-40: two writers never make two runs of one)."""
    checker = Checker(rules, budget)
    assert checker.everything(most=4_000_000) >= num_worlds


SCENES = {
    "all at once": (Rules(num_rounds=2), Budget(crashes=2, faults=3, garbage=2), {}),
    "old backups": (Rules(num_rounds=3), Budget(crashes=2, faults=2, restores=1), {}),
    "frames are taken away": (Rules(num_rounds=2, serve=True), Budget(faults=1, deletions=1), {}),
    "manifests of a stranger": (Rules(num_rounds=2), Budget(crashes=1, faults=1, garbage=2), {"stranger": True}),
    "one has drifted": (Rules(num_rounds=2), Budget(crashes=1, faults=2), {"drifted": 2}),
    "one writer": (Rules(num_rounds=2, writers=(1,)), Budget(crashes=2, faults=3), {}),
    "an owner that helps": (
        Rules(num_rounds=2, min_peers=3, no_quorum="wait", changes=({"policy.min_peers": 2},)),
        Budget(crashes=2, faults=2), {},
    ),
    "a stricter owner": (
        Rules(num_rounds=2, changes=({"policy.min_peers": 3}, {"policy.writers": WRITER})),
        Budget(crashes=1, faults=2), {},
    ),
    "a ghost is voided": (
        Rules(num_rounds=2, serve=True, changes=({"void": 0},)), Budget(crashes=1, faults=2, ghosts=1), {}
    ),
    "ghosts are voided later": (
        Rules(num_rounds=3, serve=True, amends=1, changes=({"void": 0}, {"void": 0, "policy.writers": WRITER})),
        Budget(crashes=1, faults=1, ghosts=2), {},
    ),
}  # fmt: skip


def scene(name: str) -> Checker:
    rules, budget, more = SCENES[name]
    return Checker(rules, budget, **more)


@pytest.mark.parametrize("name", SCENES)
def test_random_walks(name: str) -> None:
    """Also C-49: a crash costs nothing that was saved, and an old backup no more than its residual."""
    checker = scene(name)
    for seed in range(NUM_WALKS // 4 if checker.budget.ghosts else NUM_WALKS):  # those worlds are large
        checker.walk(seed, steps=20 + seed % 100)


def test_walks_go_where_it_is_dangerous() -> None:
    """The checker would prove nothing if its worlds were all calm ones."""
    checker = scene("all at once")
    ends = [checker.walk(seed, steps=90) for seed in range(150)]
    assert any("manifest-0001" in path for world in ends for path in world.store.data)
    assert any(() in local.base.durable.applied for world in ends for local in world.peers)
    assert any(credited(world) for world in ends)
    assert set(checker.taken) == {
        "answer", "no answer", "refuse", "lose answer", "drop", "delay", "deliver", "crash", "restart", "deadline",
        "garbage",
    }  # fmt: skip
    restored = scene("old backups")
    assert any(local.base.durable.dropped for seed in range(150) for local in restored.walk(seed, 120).peers)
    drifted = scene("one has drifted")
    assert any(drifted.walk(seed, 90).peers[2].base.stage == "drifted" for seed in range(150))


def walk_often(checker: Checker) -> None:
    for seed in range(8000):
        checker.walk(seed, steps=5 + seed % 120)


def credited(world: World) -> bool:
    """Whether somebody keeps a delta that it once sent."""
    return any(token.endswith("a") for local in world.peers for token in local.base.durable.residual)


MUTANTS = {
    "rule 1: no GET after a put": (
        Rules(round_class=mutants.TrustsItsPut, num_rounds=2), Budget(faults=2), {}, "peers applied different lists",
    ),
    "rule 1: no further attempt": (
        Rules(round_class=mutants.StopsAtRubbish), Budget(garbage=1), {}, "are stuck although a writer lives",
    ),
    "rule 1: a verdict of one's own": (
        Rules(round_class=mutants.JudgesByItself), Budget(), {}, "peers applied different lists",
    ),
    "amendments: not in this round": (
        Rules(mutants.WaitsForTheNextRound, min_peers=3, no_quorum="wait", changes=({"policy.min_peers": 2},)),
        Budget(crashes=1), {}, "are stuck although a writer lives",
    ),
    "amendments: judged by what one knows": (
        Rules(round_class=mutants.JudgesByWhatItKnows, changes=({"policy.min_peers": 3},)), Budget(), {},
        "peers applied different lists",
    ),
    "voids: not while one waits": (
        Rules(notices_voids=False, changes=({"void": 0},)), Budget(ghosts=1), {}, "are stuck although a writer lives",
    ),
    "voids: what was applied stays": (
        Rules(mutants.KeepsWhatItApplied, starts_over=False, num_rounds=2, changes=({"void": 0},)),
        Budget(ghosts=1), {}, "go round and round although a writer lives",
    ),
    "voids: anybody may take the place": (
        Rules(mutants.TakesAnyOther, num_rounds=1, changes=({"void": 0, "policy.writers": WRITER},)),
        Budget(ghosts=2), {}, "are stuck although a writer lives",
    ),
    "rule 2: credit without a manifest": (
        Rules(round_class=mutants.CreditsWithoutManifest, writers=(0,)), Budget(), {}, "peers applied different lists",
    ),
    "rule 2: an empty round loses": (
        Rules(fate=mutants.loses_empty_rounds), Budget(crashes=1), {}, "the ledger does not close",
    ),
    "rule 3: skip what is gone": (
        Rules(fetching_class=mutants.SkipsWhatIsGone, serve=True), Budget(deletions=1), {},
        "peers applied different lists",
    ),
    "rule 3: no relays": (
        Rules(fetching_class=mutants.NeverRelays, serve=True), Budget(deletions=1), {}, "are stuck",
    ),
    "rule 4: any digest": (
        Rules(check_digest=False), Budget(), {"drifted": 2}, "a frame made from another state was applied",
    ),
    "rule 5: no credit": (Rules(fate=mutants.never_credits), Budget(), {}, "the ledger does not close"),
    "rule 5: an old residual is kept": (
        Rules(fate=mutants.keeps_old_residual, num_rounds=2), Budget(crashes=1, restores=1), {},
        "was applied and is kept as well",
    ),
    "rule 6: the clock of another": (
        Rules(round_class=mutants.TrustsOtherClocks), Budget(crashes=1), {}, "are stuck although a writer lives",
    ),
    "write-ahead: put before saving": (
        Rules(write_ahead=False, num_rounds=2), Budget(crashes=1), {}, "was dropped although nothing was restored",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_each_rule_is_needed(name: str) -> None:
    """Without it, the checker finds a way to break a promise."""
    rules, budget, more, promise = MUTANTS[name]
    checker = Checker(rules, budget, **more)
    with pytest.raises(Violation, match=promise):
        walk_often(checker)
