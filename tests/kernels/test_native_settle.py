"""Native settling leaves the very bits that ``Channel.settle_`` leaves: anchors, velocity and live parameters."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sparseloco.channel import Channel, ChannelState
from sparseloco.compress import SignTwoLevel, TopK
from sparseloco.errors import DivergenceError
from sparseloco.kernels.native_settle import Settled, SettleJob, SettlePlan, apply_pass, settle_top_k
from sparseloco.layout import Chunks, Layout, Tiles
from sparseloco.merge import Blend, Carry, Replace
from sparseloco.outer import Sgd
from sparseloco.reduce import Mean
from sparseloco.types import Envelope, Key, Merge, Source, TensorSpec
from tests.contracts.cases import heavy_tailed
from tests.kernels.reference import (
    COMPACT,
    FIXED,
    SETS,
    available_sets,
    encode_section,
    geometries,
    needs_native,
    same_bits,
    use,
)

pytestmark = [needs_native, pytest.mark.usefixtures("definition")]

# Layouts with a shape that has whole, ragged, narrow and several groups of chunks; windows that end inside a row.
PLACES: dict[str, tuple[Layout, int, tuple[int, ...]]] = {
    "tiles": (Tiles(), 4096, (128, 192)),
    "groups": (Tiles(), 4096, (300, 330)),
    "edges": (Tiles(), 4096, (130, 70)),
    "panels": (Tiles(panels=3), 4096, (200, 67)),
    "small tiles": (Tiles(8, 16), 128, (70, 37)),
    "odd tiles": (Tiles(5, 3, panels=3, vector_chunk=10), 15, (41, 17)),
    "narrow": (Tiles(), 4096, (9, 3, 1)),
    "vector": (Tiles(), 4096, (9001,)),
    "scalar": (Tiles(), 4096, ()),
    "runs": (Chunks(), 4096, (3, 5000)),
    "wide tiles": (Tiles(3, 3000), 9000, (7, 6010)),
    "long runs": (Chunks(40_000), 40_000, (90_001,)),
}


@dataclass(frozen=True)
class Case:
    """One round; see the lists below for what the fields may be."""

    place: str = "edges"
    k: int = 64
    dtype: torch.dtype = torch.float32
    peers: int = 2
    weights: str = "equal"
    over: str = "contributors"
    outer: Sgd = Sgd(lr=0.7)
    merge: Merge = Replace()
    values: str = "heavy"
    coding: str = "mixed"
    seed: int = 0


OUTERS = [
    Sgd(lr=1.0), Sgd(lr=0.7), Sgd(lr=0.7, weight_decay=0.1), Sgd(lr=0.7, momentum=0.9),
    Sgd(lr=0.3, momentum=0.9, nesterov=True), Sgd(lr=0.8, momentum=0.9, nesterov=True, weight_decay=0.01),
]  # fmt: skip
MERGES = [Replace(), Blend(0.3), Blend(0.0), Blend(1.0), Carry()]
WEIGHTS = ["equal", "powers", "odd", "largest", "uneven"]
VALUES = ["heavy", "same places", "zeros", "subnormal", "any code", "large"]


def draw_case(seed: int) -> Case:
    """Places and k in turn, the rest at random."""
    pick = random.Random(seed)
    place = list(PLACES)[seed % len(PLACES)]
    return Case(
        place=place,
        k=[1, 16, 64, 1024][seed // len(PLACES) % 4],
        dtype=pick.choice([torch.float32, torch.bfloat16]),
        peers=pick.choice([1, 2, 8, 16] if place != "long runs" else [1, 2, 3]),
        weights=pick.choice(WEIGHTS),
        over=pick.choice(["contributors", "peers"]),
        outer=pick.choice(OUTERS),
        merge=pick.choice(MERGES),
        values=pick.choice(VALUES),
        coding=pick.choice(["fixed", "compact", "mixed"]),
        seed=seed,
    )


def weights_of(case: Case) -> list[int]:
    pick = random.Random(case.seed)
    return {
        "equal": [1] * case.peers,
        "powers": [2 ** (p % 29) for p in range(case.peers)],
        "odd": [12_345] * case.peers,
        "largest": [2**29 - 1] * case.peers,
        "uneven": [pick.randrange(1, 2**29) for _ in range(case.peers)],
    }[case.weights]


class Round:
    """A model with two tensors before the round, and what its peers send."""

    def __init__(self, case: Case) -> None:
        self.case = case
        layout, chunk, shape = PLACES[case.place]
        self.layout = layout
        compressor = TopK(k=min(case.k, chunk), chunk_size=chunk, values=SignTwoLevel())
        self.channel = Channel(layout=layout, compressor=compressor, reducer=Mean(over=case.over))
        self.specs = [TensorSpec("a", shape, case.dtype), TensorSpec("b", (7,), case.dtype)]
        start = [heavy_tailed(spec.shape, case.seed + i, torch.float32) for i, spec in enumerate(self.specs)]
        self.start = [self._with_odd_values(t).to(case.dtype) for t in start]
        self.state = self.channel.init(self.specs, self.start)
        if case.outer.momentum:
            for j, block in enumerate(self.state.anchor):
                self.state.outer[j] = {"velocity": heavy_tailed(tuple(block.shape), j, torch.float32) * 0.1}
        self.snapshot = [t + heavy_tailed(tuple(t.shape), 77, torch.float32).to(t.dtype) * 0.1 for t in self.start]
        self.live = [t + heavy_tailed(tuple(t.shape), 78, torch.float32).to(t.dtype) * 0.1 for t in self.snapshot]
        self.inbox = [self._envelope(p, weight) for p, weight in enumerate(weights_of(case))]

    def _with_odd_values(self, tensor: Tensor) -> Tensor:
        flat = tensor.view(-1)
        flat[::3] = -0.0  # stays as it is where nobody sends anything
        flat[1::7] = 1e-41
        return tensor

    def _envelope(self, peer: int, weight: int) -> Envelope:
        case = self.case
        own = case.seed if case.values == "same places" else 1000 * case.seed + peer
        scale = {"zeros": 0.0, "subnormal": 1e-39, "large": 1e30}.get(case.values, 0.1)
        ends = [
            t.float() - scale * heavy_tailed(tuple(t.shape), own + i, torch.float32) for i, t in enumerate(self.start)
        ]
        sources = [
            Source([self.state.anchor[j] for j in span], end.to(case.dtype))
            for span, end in zip(self.state.spans, ends, strict=True)
        ]
        payload = self.channel.outgoing(sources, copy.deepcopy(self.state), key=peer)
        if case.values == "any code":
            generator = torch.Generator().manual_seed(own)
            for j in payload.blocks:
                payload.blocks[j]["code"].random_(0, 4, generator=generator)
                payload.blocks[j]["scale"][::2] = 0.0  # minus zero is a value, too
        return Envelope(key=Key(0, 0), peer=peer, weight=weight, fingerprint="0" * 16, digest="0" * 32, payload=payload)

    def coding_of(self, peer: int) -> int:
        return {"fixed": FIXED, "compact": COMPACT, "mixed": peer % 2}[self.case.coding]

    def define(self) -> tuple[ChannelState, list[Tensor], float]:
        """State, live tensors and norm as the definition leaves them."""
        state, live = copy.deepcopy(self.state), [t.clone() for t in self.live]
        norm = self.channel.settle_(
            self.inbox,
            state,
            live,
            outer=self.case.outer,
            merge=self.case.merge,
            snapshot=self.snapshot if self.case.merge.needs_snapshot else None,
            step=0,
        )
        return state, live, norm

    def sections(self) -> list[list[bytes]]:
        """Bytes by block and peer."""
        return [
            [encode_section(e.payload.blocks[j], block.shape[1], self.coding_of(e.peer)) for e in self.inbox]
            for j, block in enumerate(self.state.anchor)
        ]

    def settle(self, sections: list[list[bytes]], threads: int) -> tuple[ChannelState, list[Tensor], Settled]:
        """The same by the kernels."""
        case, state, live = self.case, copy.deepcopy(self.state), [t.clone() for t in self.live]
        jobs: list[SettleJob] = []
        for i, span in enumerate(state.spans):
            for j, geometry in zip(span, geometries(self.layout, self.specs[i].shape), strict=True):
                jobs.append(
                    SettleJob(
                        state.anchor[j],
                        live[i],
                        geometry,
                        self.inbox[0].payload.blocks[j]["index"].shape[1] if self.inbox else 1,
                        sections[j],
                        state.outer[j].get("velocity") if self.inbox else None,
                        self.snapshot[i] if case.merge.needs_snapshot else None,
                    )
                )
        plan = SettlePlan(
            weights=[e.weight for e in self.inbox],
            codings=[self.coding_of(e.peer) for e in self.inbox],
            levels=(0.96875, 1.09375),
            over=case.over,
            lr=float(case.outer.lr),  # pyright: ignore[reportArgumentType]
            momentum=case.outer.momentum,
            nesterov=case.outer.nesterov,
            weight_decay=case.outer.weight_decay,
            merge=case.merge.name,
            alpha=getattr(case.merge, "alpha", 0.0),
        )
        return state, live, settle_top_k(jobs, plan, threads=threads)


def assert_equal_states(got: tuple[ChannelState, list[Tensor]], want: tuple[ChannelState, list[Tensor]]) -> None:
    for j, block in enumerate(want[0].anchor):
        assert same_bits(got[0].anchor[j], block), f"anchor {j}"
        if "velocity" in want[0].outer[j]:
            assert same_bits(got[0].outer[j]["velocity"], want[0].outer[j]["velocity"]), f"velocity {j}"
    for i, tensor in enumerate(want[1]):
        assert same_bits(got[1][i], tensor), f"live {i}"


def check(case: Case) -> None:
    check_round(Round(case))


def check_round(round_: Round) -> None:
    """Every instruction set and number of threads leaves the bits of the definition."""
    state, live, norm = round_.define()
    sections = round_.sections()
    squares: set[tuple[float, ...]] = set()
    for name in available_sets():
        use(name)
        for threads in (1, 2, 3):
            got_state, got_live, settled = round_.settle(sections, threads)
            assert settled.failed is None
            assert_equal_states((got_state, got_live), (state, live))
            squares.add(tuple(settled.squares))
    assert len(squares) == 1
    if norm < 1e18:  # the definition squares in float32, so large updates have a norm of infinity there
        assert sum(squares.pop()) ** 0.5 == pytest.approx(norm, rel=1e-5, abs=1e-18)


@pytest.mark.parametrize("seed", range(264))
def test_bits_are_those_of_the_definition(seed: int) -> None:
    check(draw_case(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("merge", MERGES, ids=lambda m: m.name)
@pytest.mark.parametrize("place", ["edges", "vector", "wide tiles"])
def test_without_peers_only_the_merge_happens(dtype: torch.dtype, merge: Merge, place: str) -> None:
    check(Case(place=place, peers=0, merge=merge, dtype=dtype, outer=Sgd(lr=0.5, momentum=0.9)))


@pytest.mark.parametrize("over", ["contributors", "peers"])
@pytest.mark.parametrize("outer", OUTERS, ids=str)
def test_rounds_in_a_row(over: str, outer: Sgd) -> None:
    """The velocity starts at zero, as the definition lets it."""
    case = Case(place="panels", peers=2, over=over, outer=outer)
    round_ = Round(case)
    for j, block in enumerate(round_.state.anchor):
        round_.state.outer[j] = {"velocity": torch.zeros_like(block)} if outer.momentum else {}
    for _ in range(3):
        state, live, _ = round_.define()
        got_state, got_live, settled = round_.settle(round_.sections(), 1)
        assert settled.failed is None
        assert_equal_states((got_state, got_live), (state, live))
        round_.state, round_.live = state, live


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tensor", [0, 1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_anchor_that_would_overflow_is_refused(
    instruction_set: str, threads: int, tensor: int, momentum: float
) -> None:
    """The first tensor that fails is named, and no value out of range is written anywhere."""
    use(instruction_set)
    round_ = Round(Case(place="groups", outer=Sgd(lr=1.0, momentum=momentum)))
    block = round_.state.spans[tensor][-1]
    for envelope in round_.inbox:
        envelope.payload.blocks[block]["scale"][-1] = 9e36  # sane by itself; level times scale is sane, too
        envelope.payload.blocks[block]["code"][-1] = 1
        envelope.payload.blocks[block]["index"][-1] = round_.inbox[0].payload.blocks[block]["index"][-1]
    state, _, settled = None, None, None
    round_.state.anchor[block].fill_(9e36)
    with pytest.raises(DivergenceError, match=f"anchor of {'ab'[tensor]}=not finite"):
        round_.define()
    state, live, settled = round_.settle(round_.sections(), threads)
    assert settled.failed == block
    everything = [*state.anchor, *live, *(outer["velocity"] for outer in state.outer if momentum)]
    assert all(bool((t.abs() < 1e37).all()) for t in everything)


@pytest.mark.parametrize("instruction_set", SETS)
def test_bfloat16_is_rounded_to_nearest_even(instruction_set: str) -> None:
    use(instruction_set)
    words = torch.arange(0, 2**31 - 2**24, 999_983, dtype=torch.int64).to(torch.int32)
    halves = torch.arange(0, 2**15 - 2**8, 5, dtype=torch.int64) * 65536 + 32768
    anchor = torch.cat([words, halves.to(torch.int32)]).view(torch.float32)
    anchor = torch.cat([anchor, -anchor]).reshape(1, -1)
    live = torch.zeros(anchor.numel(), dtype=torch.bfloat16)
    geometry = geometries(Chunks(anchor.numel()), (anchor.numel(),))[0]
    settle_top_k([SettleJob(anchor, live, geometry, 1, [])], SettlePlan([], [], (1.0, 2.0)))
    assert same_bits(live, anchor.reshape(-1).to(torch.bfloat16))


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bare_pass_copies_the_anchor(instruction_set: str, dtype: torch.dtype) -> None:
    use(instruction_set)
    round_ = Round(Case(place="groups", dtype=dtype))
    live = [torch.full_like(t, 3.0) for t in round_.live]
    before = [block.clone() for block in round_.state.anchor]
    for i, span in enumerate(round_.state.spans):
        places = geometries(round_.layout, round_.specs[i].shape)
        jobs = [SettleJob(round_.state.anchor[j], live[i], g, 1, []) for j, g in zip(span, places, strict=True)]
        apply_pass(jobs, threads=2)
    assert all(same_bits(one, two) for one, two in zip(round_.state.anchor, before, strict=True))
    for number, (tensor, spec) in enumerate(zip(live, round_.specs, strict=True)):
        assert same_bits(tensor, round_.channel.anchor_tensor(round_.state, number, spec.shape).to(dtype))


def one_job() -> tuple[SettleJob, SettlePlan]:
    round_ = Round(Case(place="scalar", peers=1, coding="fixed"))
    anchor, live = round_.state.anchor[0].clone(), round_.live[0].clone()
    job = SettleJob(anchor, live, geometries(round_.layout, ())[0], 1, round_.sections()[0])
    return job, SettlePlan([1], [FIXED], (0.96875, 1.09375))


def test_what_does_not_fit_is_refused() -> None:
    """These are mistakes of the caller; memory is safe all the same."""
    job, plan = one_job()
    settle_top_k([job], plan)
    outside = job.geometry._replace(col_offset=1)
    for text, bad_job, bad_plan in [
        ("anchor: must be contiguous float32", job._replace(anchor=job.anchor.double()), plan),
        ("live: must be float32 or bfloat16", job._replace(live=job.live.half()), plan),
        ("geometry: must lie inside the live tensor", job._replace(geometry=outside), plan),
        ("velocity: must be given with momentum", job._replace(velocity=job.anchor.clone()), plan),
        ("velocity: must be given with momentum", job, plan._replace(momentum=0.9)),
        ("snapshot: must be given to carry", job, plan._replace(merge="carry")),
        ("snapshot: must have the type, shape and strides", job._replace(snapshot=job.live.bfloat16()), plan),
        ("snapshot: must have the type, shape and strides", job._replace(snapshot=job.live.flatten()), plan),
        ("sections: must be one per peer", job._replace(sections=[]), plan),
        ("section: must be checked before it is settled", job._replace(sections=[job.sections[0][:-1]]), plan),
        ("codings: must be one per peer", job, plan._replace(codings=[])),
        ("coding: must be 0", job, plan._replace(codings=[2])),
        ("weights: must be from 1 to 2.29 - 1", job, plan._replace(weights=[2**29])),
    ]:
        with pytest.raises(ValueError, match=text):
            settle_top_k([bad_job], bad_plan)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("coding", ["fixed", "compact"])
def test_sections_that_nobody_checked_stay_inside_memory(instruction_set: str, coding: str) -> None:
    """Random positions come out somewhere in the chunk; guards around the anchor stay whole."""
    use(instruction_set)
    round_ = Round(replace(Case(place="tiles"), coding=coding))
    anchor = round_.state.anchor[0]
    guarded = torch.full((anchor.shape[0] + 2, anchor.shape[1]), 7.0)
    inner = guarded[1:-1]
    inner.copy_(anchor)
    generator = torch.Generator().manual_seed(1)
    job = SettleJob(inner, round_.live[0], geometries(round_.layout, (128, 192))[0], 64, [])
    plan = SettlePlan([1, 1], [round_.coding_of(0)] * 2, (0.96875, 1.09375))
    for _ in range(50):
        sections = [bytearray(s) for s in round_.sections()[0]]
        for section in sections:
            start = 8 if coding == "compact" else 0
            for at in torch.randint(start, len(section) - 12, (40,), generator=generator).tolist():
                section[at] = int(torch.randint(0, 256, (1,), generator=generator))
        settle_top_k([job._replace(sections=[bytes(s) for s in sections])], plan)
        assert bool((guarded[[0, -1]] == 7).all())
