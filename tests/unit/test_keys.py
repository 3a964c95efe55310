"""All randomness: published SplitMix64 numbers, and nothing that the caller's generators could change."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseloco.keys import derive_key, mix64, uniform

WORD = st.integers(-(2**63), 2**63 - 1)

# The first numbers of the SplitMix64 generator seeded with 0 and with 1234567, as published with it.
SPLIT_MIX = {
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F],
    1234567: [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ],
}


def test_uniform_is_split_mix_64() -> None:
    for key, numbers in SPLIT_MIX.items():
        wanted = torch.tensor([(n >> 40) * 2.0**-24 for n in numbers], dtype=torch.float32)
        assert torch.equal(uniform(key, (len(numbers),)), wanted)


@given(st.lists(WORD, max_size=20))
def test_mix_is_the_finaliser_on_unsigned_words(words: list[int]) -> None:
    def mix(x: int) -> int:
        x %= 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    assert [y % 2**64 for y in mix64(torch.tensor(words, dtype=torch.int64)).tolist()] == [mix(x) for x in words]


@given(key=WORD, count=st.integers(0, 300), cut=st.integers(0, 300))
def test_a_number_depends_on_key_and_place_only(key: int, count: int, cut: int) -> None:
    torch.manual_seed(cut)
    numbers = uniform(key, (count,))
    assert torch.equal(uniform(key, (max(count, cut),))[:count], numbers)
    assert torch.equal(uniform(key, (1, count, 1)).view(-1), numbers)
    assert bool(((numbers >= 0) & (numbers < 1)).all())


def test_numbers_are_uniform() -> None:
    numbers = uniform(derive_key(1, 2, 3), (100_000,))
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    # Chi squared with 99 degrees of freedom: mean 99, deviation 14.
    assert 50 < float(((counts - 1000).square() / 1000).sum()) < 160
    pairs = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
    assert abs(float(pairs)) < 0.015


def test_neighbouring_keys_are_unrelated() -> None:
    streams = torch.stack([uniform(derive_key(0, peer, 0, 0), (10_000,)) for peer in range(4)])
    correlation = torch.corrcoef(streams) - torch.eye(4)
    assert float(correlation.abs().max()) < 0.05


@given(st.lists(WORD, max_size=5), st.lists(WORD, max_size=5))
def test_keys_tell_words_apart(one: list[int], other: list[int]) -> None:
    assert (derive_key(*one) == derive_key(*other)) == (one == other)
    assert -(2**63) <= derive_key(*one) < 2**63


def test_words_are_not_run_together() -> None:
    keys = {derive_key(1, 23), derive_key(12, 3), derive_key(123), derive_key(1, 2, 3), derive_key(-123), derive_key()}
    assert len(keys) == 6


def test_a_key_is_the_same_in_every_version() -> None:
    """Payloads of Stochastic and the bases of LowRank hang on it."""
    assert derive_key(0, 1, 2, 3) == 8039201830801555756
