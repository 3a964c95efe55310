"""Every tensor is in exactly one fragment, and no fragment is empty."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseloco.errors import ConfigError
from sparseloco.fragments import Even, Layers, Whole
from sparseloco.types import TensorSpec

Assignment = tuple[tuple[int, ...], ...]


def specs_of(sizes: list[int]) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", (size,), torch.float32) for i, size in enumerate(sizes)]


def transformer(num_layers: int, tensors_per_layer: int = 2) -> list[TensorSpec]:
    names = ["model.embed_tokens.weight"]
    names += [f"model.layers.{i}.part{j}.weight" for i in range(num_layers) for j in range(tensors_per_layer)]
    names += ["model.norm.weight", "lm_head.weight"]
    return [TensorSpec(name, (4, 4), torch.float32) for name in names]


def named(specs: list[TensorSpec], rows: tuple[int, ...]) -> list[str]:
    return [specs[row].name for row in rows]


def check_partition(assignment: Assignment, num_tensors: int, num_fragments: int) -> None:
    assert len(assignment) == num_fragments
    assert all(assignment), "no fragment is empty"
    assert sorted(row for rows in assignment for row in rows) == list(range(num_tensors))
    assert all(list(rows) == sorted(rows) for rows in assignment)


def test_whole_is_one_fragment() -> None:
    assert Whole().assign(specs_of([3, 1, 2])) == ((0, 1, 2),)


@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=30), data=st.data())
def test_even_is_a_partition_into_runs(sizes: list[int], data: st.DataObject) -> None:
    num_fragments = data.draw(st.integers(1, len(sizes)))
    assignment = Even(num_fragments).assign(specs_of(sizes))
    check_partition(assignment, len(sizes), num_fragments)
    assert [row for rows in assignment for row in rows] == list(range(len(sizes))), "runs of neighbours"


@given(num_tensors=st.integers(1, 60), data=st.data())
def test_even_is_even_on_equal_tensors(num_tensors: int, data: st.DataObject) -> None:
    num_fragments = data.draw(st.integers(1, num_tensors))
    lengths = [len(rows) for rows in Even(num_fragments).assign(specs_of([7] * num_tensors))]
    assert max(lengths) - min(lengths) <= 1


def test_even_counts_values_not_tensors() -> None:
    assert Even(2).assign(specs_of([100, 1, 1, 1])) == ((0,), (1, 2, 3))
    assert Even(3).assign(specs_of([1, 1, 100])) == ((0,), (1,), (2,))


@given(
    num_layers=st.integers(1, 24),
    per_layer=st.integers(1, 3),
    strided=st.booleans(),
    data=st.data(),
)
def test_layers_is_a_partition(num_layers: int, per_layer: int, strided: bool, data: st.DataObject) -> None:
    num_fragments = data.draw(st.integers(1, num_layers))
    specs = transformer(num_layers, per_layer)
    assignment = Layers(num_fragments, strided=strided).assign(specs)
    check_partition(assignment, len(specs), num_fragments)
    assert assignment[0][0] == 0, "embeddings join the first"
    assert assignment[-1][-2:] == (len(specs) - 2, len(specs) - 1), "final norm and head join the last"
    for layer in range(num_layers):
        homes = {i for i, rows in enumerate(assignment) if any(f".{layer}." in n for n in named(specs, rows))}
        assert len(homes) == 1, "a layer stays together"
        if strided:
            assert homes == {layer % num_fragments}


def test_strided_and_sequential() -> None:
    specs = transformer(4, 1)
    first, second = Layers(2).assign(specs)
    assert named(specs, first) == [
        "model.embed_tokens.weight", "model.layers.0.part0.weight", "model.layers.2.part0.weight",
    ]  # fmt: skip
    assert named(specs, second) == [
        "model.layers.1.part0.weight", "model.layers.3.part0.weight", "model.norm.weight", "lm_head.weight",
    ]  # fmt: skip
    first, second = Layers(2, strided=False).assign(specs)
    assert named(specs, first)[1:] == ["model.layers.0.part0.weight", "model.layers.1.part0.weight"]
    assert named(specs, second)[:2] == ["model.layers.2.part0.weight", "model.layers.3.part0.weight"]


def test_numbers_of_layers_need_not_begin_at_zero() -> None:
    specs = [TensorSpec(f"h.blocks.{i}.w", (2,), torch.float32) for i in (7, 10, 3)]
    assert Layers(3).assign(specs) == ((2,), (0,), (1,))


def test_too_many_fragments_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Even(4).assign(specs_of([1, 2, 3]))
    assert str(caught.value) == (
        "num_fragments=4: must be at most the 3 trainable tensors of the model; use 3 or fewer"
    )
    with pytest.raises(ConfigError) as caught:
        Layers(3).assign(transformer(2))
    assert str(caught.value) == (
        "num_fragments=3: must be at most the 2 numbered layers of the model; "
        "use fewer, or fragment_by='size' (Even) for a model without numbered layers"
    )
