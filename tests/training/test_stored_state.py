import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from align.core.errors import UserError
from align.training.checkpoint.state import FlatTensorSlice, StoredState, shard_file
from tests.training.toy_modules import write_shards

SHAPES = {"matrix": (5, 3), "vector": (7,), "cube": (2, 3, 2), "number": ()}


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.arange(1.0, math.prod(shape) + 1).reshape(shape) for name, shape in SHAPES.items()}


def write(folder: Path, cuts: list[int]) -> None:
    """One file for each run between cuts, the same for every tensor; the empty runs of small tensors are left out."""
    for process, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        runs = {name: FlatTensorSlice(value.flatten()[begin:end], begin, SHAPES[name]) for name, value in tensors().items()}
        kept = {name: part for name, part in runs.items() if part.values.numel()}
        write_shards(folder / shard_file(process, len(cuts) - 1), kept)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same tensors whole, in one part, in two, and in four of other sizes."""
    whole = tmp_path_factory.mktemp("whole")
    save_file(tensors(), whole / "state.safetensors")
    made = [whole]
    for cuts in ([0, 15], [0, 8, 15], [0, 1, 4, 12, 15]):
        made.append(tmp_path_factory.mktemp("parts"))
        write(made[-1], cuts)
    return made


def test_parts_of_any_number_of_processes_are_the_whole_tensors(folders):
    for folder in folders:
        stored = StoredState(folder)
        assert stored.shapes == SHAPES
        for name, value in tensors().items():
            assert torch.equal(stored[name], value), (folder, name)


@given(start=st.integers(0, 14), count=st.integers(0, 15), name=st.sampled_from(sorted(SHAPES)))
def test_every_run_is_read_from_every_layout(folders, start, count, name):
    flat = tensors()[name].flatten()
    for folder in folders:
        assert torch.equal(StoredState(folder).part(name, start, count), flat[start : start + count])


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        # Lengths alone add up to the whole in the first two: twice the numbers 0 to 3 of 8, and a gap after 3.
        ([(4, 0), (4, 0)], "two parts of 'a' overlap"),
        ([(3, 0), (5, 4)], "a part of 'a' is missing"),
        ([(5, 0)], "a part of 'a' is missing"),
    ],
)
def test_parts_that_are_not_the_whole_are_an_error(parts, why, tmp_path):
    for process, (count, start) in enumerate(parts):
        write_shards(tmp_path / shard_file(process, 2), {"a": FlatTensorSlice(torch.arange(1.0 * count), start, (8,))})
    with pytest.raises(UserError, match=why):
        StoredState(tmp_path)
