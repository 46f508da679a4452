"""How the runs of one and of several processes are compared, by numbers typed in."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.launch.compared import Apart, compare


def write(folder: Path, rows: list[dict[str, float]], weights: dict[str, list[float]]) -> Path:
    (folder / "model").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file({name: torch.tensor(value) for name, value in weights.items()}, folder / "model" / "model.safetensors")
    return folder


@pytest.fixture
def one(tmp_path: Path) -> Path:
    rows = [{"update": 1, "loss": 200.0, "tokens/read": 9, "seconds": 4.0}, {"update": 2, "loss": 0.5, "tokens/read": 8}]
    return write(tmp_path / "one", rows, {"a": [1.0, 2.0], "b": [0.0]})


def test_the_largest_differences_are_named(one: Path, tmp_path: Path) -> None:
    rows = [{"update": 1, "loss": 202.0, "tokens/read": 9, "seconds": 9.0}, {"update": 2, "loss": 0.25, "tokens/read": 8}]
    several = write(tmp_path / "several", rows, {"a": [1.0, 2.5], "b": [0.125]})
    assert compare(one, several) == Apart(0.25, "update 2: loss", 0.5, "a", 2)
    assert compare(one, several).largest == 0.5
    assert compare(one, one).largest == 0


ROWS = [{"update": 1, "loss": 200.0, "tokens/read": 9}, {"update": 2, "loss": 0.5, "tokens/read": 8}]
WEIGHTS = {"a": [1.0, 2.0], "b": [0.0]}


@pytest.mark.parametrize(
    ("rows", "weights", "why"),
    [
        (ROWS[:1], WEIGHTS, "other updates"),
        ([*ROWS[:1], ROWS[1] | {"tokens/read": 7}], WEIGHTS, "update 2: tokens/read is 7, not 8"),
        (ROWS, {"a": [1.0, 2.0]}, "the saved model has other weights"),
        (ROWS, {"a": [1.0], "b": [0.0]}, "the saved model has other weights"),
    ],
)
def test_lost_rows_and_weights_are_refused(rows, weights, why: str, one: Path, tmp_path: Path) -> None:
    (one / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.raises(ValueError, match=why):
        compare(one, write(tmp_path / "several", rows, weights))


def test_nan_is_not_equal_to_anything(one: Path, tmp_path: Path) -> None:
    rows = [{"update": 1, "loss": 200.0, "tokens/read": 9}, {"update": 2, "loss": float("nan"), "tokens/read": 8}]
    with pytest.raises(ValueError, match="update 2: loss is nan"):
        compare(one, write(tmp_path / "several", rows, WEIGHTS))
