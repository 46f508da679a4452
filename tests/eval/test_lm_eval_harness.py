import json
import sys
from pathlib import Path

import pytest

from align.core.errors import UserError
from align.eval import lm_eval_harness
from align.eval.lm_eval_harness import LMEvalConfig, lost_measurement, metric_measurement, require_lm_eval, run_lm_eval_tasks
from align.eval.results import read_evaluations
from tests.files import write_rows

RECORDED = Path(__file__).with_name("lm_eval_0.4.13.json")
"""What lm-eval 0.4.13 found, see the file's `command`."""


def lost(before, after, higher=True):
    return lost_measurement("acc lost", before, after, higher, "base", "lm-eval")


def test_what_was_lost_by_hand():
    measurement = lost([1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0])
    assert (measurement.value, measurement.n, measurement.better) == (0.5, 4, "lower")
    assert -0.5 < measurement.low < 0.5 < measurement.high < 1  # four documents show little
    assert lost([1.0, 0.0], [0.0, 1.0]).value == 0.0
    assert lost([2.0, 4.0], [3.0, 5.0], higher=False).value == 1.0  # a perplexity that rose is a loss
    assert lost([2.0, 4.0], [3.0, 5.0]).value == -1.0
    measurement = lost([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])
    assert measurement.value == 0.0
    assert measurement.low < -0.2
    assert measurement.high > 0.2
    assert lost([2.0, 4.0], [3.0, 5.0], higher=False).low is None  # equal differences of a measurement
    assert lost([None, None], [None, None]).value is None
    assert lost([1.0, 0.0], [1.0]).value is None  # other documents
    assert metric_measurement("ppl", 12.5, [None, None], "").low is None
    assert metric_measurement("bleu", 0.9, [0.1, 0.2], "").low is None  # not their mean
    measurement = metric_measurement("acc", 0.5, [1.0, 0.0, 1.0, 0.0], "lm-eval")
    assert (measurement.value, measurement.n) == (0.5, 4)
    assert measurement.low < 0.5 < measurement.high


def test_the_recorded_output_of_lm_eval(monkeypatch, tmp_path):
    """The whole task, with what lm-eval said of two tiny models in the place of running it again."""
    recorded = json.loads(RECORDED.read_text())
    found = [
        {task: {"version": model["version"], "result": result} for task, result in model["tasks"].items()}
        for model in recorded["models"]
    ]
    said = dict(zip(("tiny-llama", "tiny-gpt2"), found, strict=True))
    asked = []

    def side(command):
        asked.append([word for word in command if word == "own_truthfulness"])
        return said[next(name for name in said if name in " ".join(command))]

    monkeypatch.setattr(lm_eval_harness, "require_lm_eval", lambda python: None)
    monkeypatch.setattr(lm_eval_harness, "run_lm_eval", side)
    config = LMEvalConfig(
        models=list(said), tasks=["own_truthfulness"], task_folder="configs/lm-eval", output=str(tmp_path), dtype="float32",
        table=False, limit=12,
    )  # fmt: skip
    run_lm_eval_tasks(config)
    run_lm_eval_tasks(config)
    assert asked == [["own_truthfulness"]] * 2, "each model once: the second run finds both in the files"
    before, after = (
        {measurement.name: measurement for measurement in each.measurements}
        for each in read_evaluations(tmp_path / "lm-eval.json")
    )
    accuracies = [model["tasks"]["own_truthfulness"]["samples"]["acc,none"] for model in recorded["models"]]
    for measurements, values in zip((before, after), accuracies, strict=True):
        assert measurements["own_truthfulness: acc"].value == pytest.approx(sum(values) / 12)
        assert measurements["own_truthfulness: acc"].scorer == "lm-eval 0.4.13"
        assert measurements["own_truthfulness: acc_norm"].n == 12
    difference = (sum(accuracies[0]) - sum(accuracies[1])) / 12
    assert after["own_truthfulness: acc lost"].value == pytest.approx(difference)
    assert "own_truthfulness: acc lost" not in before


def test_files_of_lm_eval_are_read_in_the_order_of_the_documents(tmp_path):
    """Rows of two filters, and a metric that is no number of a document."""
    folder = tmp_path / "model"
    folder.mkdir()
    results = {"alias": "t", "acc,none": 0.5, "acc_stderr,none": 0.5, "ppl,none": 3.0, "sample_len": 2}
    written = {"results": {"t": results}, "higher_is_better": {"t": {"acc": True, "ppl": False}}, "lm_eval_version": "9"}
    (folder / "results_2026-01-01T00.json").write_text(json.dumps(written))
    rows = [
        {"doc_id": n, "filter": "none", "metrics": ["acc", "ppl"], "acc": acc, "ppl": [1.0]}
        for n, acc in ((1, 0.0), (0, 1.0))
    ]
    write_rows(folder / "samples_t_2026-01-01T00.jsonl", rows)
    metrics = [
        {"metric": "acc", "filter": "none", "value": 0.5, "higher": True},
        {"metric": "ppl", "filter": "none", "value": 3.0, "higher": False},
    ]
    samples = {"acc,none": [1.0, 0.0], "ppl,none": [None, None]}
    assert lm_eval_harness.read_lm_eval(tmp_path) == {
        "t": {"version": "9", "result": {"metrics": metrics, "samples": samples}}
    }


def test_a_missing_lm_eval_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"align eval lm-eval needs lm-eval: pip install .* set lm_eval_python") as caught:
        require_lm_eval("")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="in the environment of"):
        require_lm_eval(sys.executable)
    with pytest.raises(UserError, match="nowhere/python: cannot be run"):
        require_lm_eval("nowhere/python")
    config = LMEvalConfig(models=["tiny-llama", "tiny-gpt2"], tasks=["x"], dtype="float32")
    with pytest.raises(UserError, match=r"lm-eval failed: .*No module named lm_eval") as caught:
        lm_eval_harness.run_lm_eval(config.command(str(tmp_path), ["x"]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"tasks": []}, "tasks is"),
        ({"models": ["a"]}, "models is"),
        ({"task_folder": "nowhere"}, "task_folder is"),
    ],
)
def test_a_mistake_is_one_line(more, complaint):
    with pytest.raises(UserError, match=complaint):
        LMEvalConfig(**{"models": ["a", "b"], "tasks": ["x"]} | more)
