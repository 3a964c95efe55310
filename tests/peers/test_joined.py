"""A world of one replica that joins: what it takes over, what it keeps, which text it reads, how it begins."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sparseloco.checkpoint import CheckpointFolder
from sparseloco.cli.owning import void_round
from sparseloco.cli.peer_runs import config_of, create_run
from sparseloco.config import build_algorithm
from sparseloco.data import Sampler, open_dataset, open_tokenizer
from sparseloco.errors import Interrupted
from sparseloco.joined import Joined, tokens_per_round, with_warmup
from sparseloco.local import InnerSteps
from sparseloco.metrics import Status
from sparseloco.model import build_run_model
from sparseloco.peers.identity import Identity
from sparseloco.peers.looking import Viewer
from sparseloco.peers.operations import Tell
from sparseloco.peers.patience import Patient
from sparseloco.peers.run_file import RunFile
from sparseloco.peers.slots import Claim, claim_slot
from sparseloco.peers.store import open_store
from sparseloco.presets import demo
from sparseloco.schedule import value_at
from sparseloco.trainer import train
from sparseloco.transport import object_store
from sparseloco.transport.object_store import ObjectStore
from sparseloco.types import Key
from tests.peers.joins import prepare
from tests.peers.runs import identity

STEPS, SLOTS = 20, 5
ALONE = ("policy.min_peers=1", f"policy.slots={SLOTS}", f"train.steps={STEPS}")

_BUILDING = threading.Lock()


@dataclass
class Scene:
    """A run in a directory, and peers of it that train one after the other."""

    folder: Path
    url: str
    run: RunFile
    told: list[Tell] = field(default_factory=list)

    def train(
        self,
        peer: Identity,
        out: Path,
        *,
        stop: Callable[[], bool] | None = None,
        each: Callable[[Joined, Status], None] | None = None,
    ) -> dict[str, Any]:
        """One peer until the run is done, or it is told to stop; goes on from what is in ``out``."""
        config = config_of(self.run, self.folder / "tokenizer.json", data=str(self.folder / "text.txt"))
        dataset = open_dataset(config.data, self.folder / "cache")
        algorithm = build_algorithm(config)
        out.mkdir(exist_ok=True)
        transport = ObjectStore(
            self.url, peer, out, run=self.run, owner=self.run.owner, poll_s=0.01, tell=self.told.append, stop=stop
        )
        with transport:
            with _BUILDING:  # initial weights come from torch's one generator
                world = Joined(build_run_model(config, dataset.vocab_size), algorithm, transport, config.train)
            return train(
                config,
                algorithm,
                dataset,
                out,
                label="peer",
                world=world,
                resume=CheckpointFolder(out / "checkpoints").newest()[0],
                stop=stop,
                progress=(lambda status: each(world, status)) if each else None,
            )

    def manifest(self, number: int) -> dict[str, Any]:
        return json.loads((Path(self.url) / f"rounds/{number:08}/0000/manifest-0000.json").read_text())


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    """Creates a run with these settings."""
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)

    def make(name: str, *settings: str) -> Scene:
        def read(data: Any) -> Any:
            given = open_tokenizer(data.tokenizer, data.end_token)
            return given.tokenizer, given.end_token

        run = create_run(str(tmp_path / name), tmp_path / "run.toml", [*ALONE, *settings], identity(9), read)
        return Scene(tmp_path, str(tmp_path / name), run)

    return make


def after(steps: int) -> tuple[Callable[[], bool], Callable[[Joined, Status], None]]:
    """Says stop once a peer has made so many steps."""
    made: list[int] = []
    return lambda: len(made) >= steps, lambda world, status: made.append(status.step)


def test_stopped_and_continued_is_never_stopped(scene: Callable[..., Scene], tmp_path: Path) -> None:
    """Residual, inner optimizer and samples are those of the step: the end is the same to the last bit."""
    whole, halves = scene("whole"), scene("halves")
    expected = whole.train(identity(1), tmp_path / "a")
    stop, each = after(STEPS // 2)
    with pytest.raises(Interrupted, match=f"^stopped at step {STEPS // 2} after saving$"):
        halves.train(identity(1), tmp_path / "b", stop=stop, each=each)
    found = halves.train(identity(1), tmp_path / "b")
    assert found["digest"] == expected["digest"]
    assert (found["tokens"], found["dense_bytes_per_replica"]) == (
        expected["tokens"],
        expected["dense_bytes_per_replica"],
    )


def test_it_leaves_at_the_next_round_border_however_short_a_round_is(
    scene: Callable[..., Scene], tmp_path: Path
) -> None:
    """Rounds of two steps: asked after the third, it leaves after the fourth, and nothing is lost."""
    made = scene("run")
    stop, each = after(3)
    with pytest.raises(Interrupted, match=r"^stopped at step 4 after saving$"):
        made.train(identity(1), tmp_path / "a", stop=stop, each=each)
    (peer,) = Viewer(open_store(made.url)).look().peers
    assert (peer.state, peer.rounds) == ("left", 2)


def test_a_peer_that_starts_over_in_its_last_round_goes_on_to_the_end(
    scene: Callable[..., Scene], tmp_path: Path
) -> None:
    """The owner voids a round that it has applied: it ends with the state of all others, not with an older one."""
    made = scene("run")

    def void(world: Joined, status: Status) -> None:
        if status.step == STEPS - 1 and not list(Path(made.url).glob("amend/*")):
            while not list(Path(made.url).glob("anchors/00000006/*/*")):
                time.sleep(0.01)
            void_round(made.url, identity(9), Key(7, 0), [], bar_writer=False)
            world.transport._beat()

    summary = made.train(identity(1), tmp_path / "a", each=void)
    assert "voided" in {tell.kind for tell in made.told}
    assert summary["rounds"] == STEPS // 2
    assert summary["digest"] == made.train(identity(2), tmp_path / "b")["digest"]
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert (lines[-1]["step"], lines[-1]["round"]) == (STEPS, STEPS // 2)


def test_a_late_peer_begins_gently(scene: Callable[..., Scene], tmp_path: Path) -> None:
    """The inner rate follows the shared step and rises over ``rejoin_warmup_steps``; tokens weigh (C-08)."""
    made = scene("run", "policy.rejoin_warmup_steps=3")
    stop, each = after(10)
    with pytest.raises(Interrupted):
        made.train(identity(1), tmp_path / "a", stop=stop, each=each)
    rates: dict[int, float] = {}

    def note(world: Joined, status: Status) -> None:
        optimizer = world.replicas[0].optimizer
        assert optimizer is not None
        rates[status.step] = optimizer.param_groups[0]["lr"]

    late = made.train(identity(2), tmp_path / "b", each=note)
    config = config_of(made.run, tmp_path / "tokenizer.json")
    local = build_algorithm(config).local
    assert isinstance(local, InnerSteps)
    assert local.optimizer is not None
    assert sorted(rates) == [*range(11, STEPS + 1)], "it begins after the ten steps of the other"
    for step, rate in rates.items():
        assert rate == min(1.0, (step - 10) / 4) * value_at(local.optimizer.lr, step)
    assert late["tokens"] == (STEPS - 10) * 2 * 16
    assert {entry["weight"] for n in range(STEPS // 2) for entry in made.manifest(n)["entries"]} == {2 * 2 * 16}
    assert tokens_per_round(build_algorithm(config), config.train) == 2 * 2 * 16


def test_a_method_that_sends_gradients_has_no_warmup() -> None:
    algorithm = demo()
    assert with_warmup(algorithm, lambda step: 0.0) is algorithm


def test_peers_read_their_own_slots(
    scene: Callable[..., Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample index = f(seed, slot, step), with the step that all share, and the same slot after a restart."""
    made = scene("run", "train.steps=40")
    asked: list[tuple[list[int], int, int]] = []
    batch = Sampler.batch

    def noted(self: Sampler, slots: Any, step: int, num_slots: int) -> Any:
        asked.append(([*slots], step, num_slots))
        return batch(self, slots, step, num_slots)

    monkeypatch.setattr(Sampler, "batch", noted)
    slots: list[int] = []
    for peer, name, steps in ((identity(1), "a", 10), (identity(1), "a", 10), (identity(2), "b", 10)):
        stop, each = after(steps)
        before = len(asked)
        with pytest.raises(Interrupted):
            made.train(peer, tmp_path / name, stop=stop, each=each)
        slot, rest = divmod(asked[before][0][0], 2)
        assert rest == 0
        slots.append(slot)
        assert {tuple(places) for places, _, _ in asked[before:]} == {(2 * slot, 2 * slot + 1)}
    assert [step for _, step, _ in asked] == [*range(30)], "steps go on from peer to peer"
    assert {count for _, _, count in asked} == {2 * SLOTS}
    assert slots[0] == slots[1] != slots[2]
    assert len(list((tmp_path / "run" / "slots").iterdir())) == 2


def test_slots_are_claimed_once() -> None:
    store = Patient(open_store("memory://"))
    same = [f"{5 + 8 * number:032x}" for number in range(10)]  # all of them would begin at slot 5 of 8
    claims = [claim_slot(store, peer, 8) for peer in same]
    assert [claim.slot for claim in claims] == [5, 6, 7, 0, 1, 2, 3, 4, 5, 5]
    assert claims[7] == Claim(4)
    assert claims[8] == Claim(5, "the 8 that it may take are others'")
    assert [claim_slot(store, peer, 8) for peer in same] == claims, "each finds its own again"
    for place in store.list("slots"):
        store.put(place.path, b"x" * 10**6)
    assert claim_slot(store, same[0], 8).shared, "rubbish stops nobody"


def test_a_slow_peer_posts_early(scene: Callable[..., Scene], tmp_path: Path) -> None:
    """Rule 8: when the deadline nears it posts the steps that it has made, and the weight says how many."""
    made = scene("run", "policy.min_peers=2", "policy.deadline_s=2", "policy.lease_s=1", "algorithm.inner_steps=4")
    waited: list[int] = []

    def wait(world: Joined, status: Status) -> None:
        if status.step == 2:
            while not world.transport.is_late:
                time.sleep(0.05)
        waited.append(status.step)

    with ThreadPoolExecutor(1) as pool:
        fast = pool.submit(made.train, identity(1), tmp_path / "a")
        slow = made.train(identity(2), tmp_path / "b", each=wait)
        assert fast.result()["digest"] == slow["digest"]
    assert waited[:4] == [1, 2, 3, 4], "steps are counted"
    weights = {entry["peer"]: entry["weight"] for entry in made.manifest(0)["entries"]}
    assert weights == {identity(1).peer_id: 4 * 2 * 16, identity(2).peer_id: 2 * 2 * 16}
    lacking = fast.result()["tokens"] - slow["tokens"]
    assert lacking >= 2 * 2 * 16
    assert lacking % (2 * 16) == 0


def test_a_peer_that_is_overtaken_follows(scene: Callable[..., Scene], tmp_path: Path) -> None:
    """C-35: the others close rounds at the deadline and go on; it takes the step from them and ends where they do."""
    made = scene("run", "policy.deadline_s=1", "policy.lease_s=1", "train.steps=4")
    begun, over = threading.Event(), threading.Event()
    steps: list[int] = []

    def wait(world: Joined, status: Status) -> None:
        steps.append(status.step)
        begun.set()
        over.wait()
        while status.step == 1 and not world.transport.is_late:
            time.sleep(0.05)

    def go() -> dict[str, Any]:
        begun.wait()
        try:
            return made.train(identity(1), tmp_path / "a")
        finally:
            over.set()

    with ThreadPoolExecutor(1) as pool:
        fast = pool.submit(go)
        slow = made.train(identity(2), tmp_path / "b", each=wait)
        assert fast.result()["digest"] == slow["digest"]
    assert [[entry["peer"] for entry in made.manifest(n)["entries"]] for n in (0, 1)] == [[identity(1).peer_id]] * 2
    assert steps == [1, 2, 4], "step 3 was the others'"
    assert slow["tokens"] == 2 * 16, "of the first round only a step was made"
    assert slow["dense_bytes_per_replica"] == 4 * slow["parameters"], "it has posted once"


def test_it_can_be_stopped_while_it_waits(
    scene: Callable[..., Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that waits for a quorum leaves when asked; the frame stays, and is put again by the next start."""
    monkeypatch.setattr(object_store, "_LAST_WAIT_S", 0.5)
    made = scene("run", "policy.min_peers=2")
    with pytest.raises(Interrupted, match=r"^left while round 0 was open; what was sent in it stays in the store$"):
        made.train(identity(1), tmp_path / "a", stop=lambda: True)
    frames = [*(tmp_path / "run").rglob("*.frame")]
    assert len(frames) == 1
    with pytest.raises(Interrupted, match=r"^left while round 0 was open"):
        made.train(identity(1), tmp_path / "a", stop=lambda: True)
    assert [*(tmp_path / "run").rglob("*.frame")] == frames
    assert "residual-dropped" not in {tell.kind for tell in made.told}


def test_the_loss_of_the_last_step_is_in_the_lease(scene: Callable[..., Scene], tmp_path: Path) -> None:
    made = scene("run")
    losses: list[float] = []
    made.train(identity(1), tmp_path / "a", each=lambda world, status: losses.append(status.train_loss))
    (peer,) = Viewer(open_store(made.url)).look().peers
    assert (peer.state, peer.loss) == ("left", losses[-1])
