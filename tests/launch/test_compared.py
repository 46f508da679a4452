import pytest
import torch
from safetensors.torch import save_file

from tests.files import write_rows
from tests.launch.compared import Apart, compare

ROWS = [{"update": 1, "loss": 200.0, "tokens/read": 9, "seconds": 4.0}, {"update": 2, "loss": 0.5, "tokens/read": 8}]
APART = [{"update": 1, "loss": 202.0, "tokens/read": 9, "seconds": 9.0}, {"update": 2, "loss": 0.25, "tokens/read": 8}]
WEIGHTS = {"a": [1.0, 2.0], "b": [0.0]}


@pytest.mark.parametrize(
    ("rows", "weights", "found"),
    [
        (APART, {"a": [1.0, 2.5], "b": [0.125]}, Apart(0.25, "update 2: loss", 0.5, "a", 2)),
        (ROWS[:1], WEIGHTS, "other updates"),
        ([*ROWS[:1], ROWS[1] | {"tokens/read": 7}], WEIGHTS, "update 2: tokens/read is 7, not 8"),
        ([*ROWS[:1], ROWS[1] | {"loss": float("nan")}], WEIGHTS, "update 2: loss is nan"),
        (ROWS, {"a": [1.0], "b": [0.0]}, "the saved model has other weights"),
    ],
)
def test_differences_are_named_and_lost_rows_nan_and_other_weights_refused(rows, weights, found, tmp_path):
    for name, metrics, tensors in (("one", ROWS, WEIGHTS), ("several", rows, weights)):
        (tmp_path / name / "model").mkdir(parents=True)
        write_rows(tmp_path / name / "metrics.jsonl", metrics)
        tensors = {key: torch.tensor(value) for key, value in tensors.items()}
        save_file(tensors, tmp_path / name / "model" / "model.safetensors")
    if isinstance(found, Apart):
        assert compare(tmp_path / "one", tmp_path / "several") == found
    else:
        with pytest.raises(ValueError, match=found):
            compare(tmp_path / "one", tmp_path / "several")
