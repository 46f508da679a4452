"""What a student is worth: the share of reward by hand, and a whole evaluation."""

import json
from pathlib import Path

import pytest

from align.errors import UserError
from align.eval.core.results import read_evaluations
from align.eval.distillation import DistillationConfig, reward_kept, run_distillation


def test_the_share_of_reward_by_hand():
    # The teacher gains 2 over the baseline, the student 1.5: three quarters.
    rewards = {"teacher": [3.0, 1.0], "student": [2.0, 1.0], "base": [0.0, 0.0], "worse": [-1.0, -1.0]}
    found = {name: reward_kept(rewards, name, "teacher", "base", 200, "rm") for name in rewards}
    assert [found[name].value for name in rewards] == [1.0, 0.75, 0.0, -0.5]
    assert found["teacher"].low is found["teacher"].high is None  # 1 by definition
    assert found["student"].low == pytest.approx(2 / 3)  # both times the first prompt: 2 of 3
    assert found["student"].high == 1.0
    unclear = reward_kept({**rewards, "teacher": [3.0, -1.0]}, "student", "teacher", "base", 200, "rm")
    assert (unclear.value, unclear.low) == (1.5, None)  # a quarter of the resamples shows no gain of the teacher
    assert "too uncertain" in unclear.note
    nothing = reward_kept(rewards, "student", "base", "teacher", 200, "rm")
    assert (nothing.value, nothing.note) == (None, "base gains nothing over teacher")


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hi", "Count to three.", "Who?")))
    shared = {"prompts": str(path), "max_new_tokens": 6, "dtype": "float32", "resamples": 100, "table": False}
    return shared | {"output": str(tmp_path / "out")}


def test_a_whole_evaluation(settings, sharp_folders, reward_folders):
    models = [sharp_folders[name] for name in ("tiny-llama", "tiny-gpt2", "tiny-t5")]
    run_distillation(
        DistillationConfig(models=models, reward_model=reward_folders["tiny-gpt2"], baseline="tiny-t5", **settings)
    )
    out = read_evaluations(Path(settings["output"], "distillation.json"))
    figures = {each.model: {figure.name: figure for figure in each.figures} for each in out}
    assert list(figures) == ["tiny-llama", "tiny-gpt2", "tiny-t5"]
    student = figures["tiny-gpt2"]
    assert 0.05 < student["million parameters"].value < 1
    assert student["tokens/s"].value > 10
    assert 0 <= student["preferred to tiny-llama"].value <= 1
    assert "preferred to tiny-llama" not in figures["tiny-llama"]
    kept = student["share of reward kept"]
    rewards = {name: figure["reward"].value for name, figure in figures.items()}
    gain = rewards["tiny-llama"] - rewards["tiny-t5"]
    expected = (rewards["tiny-gpt2"] - rewards["tiny-t5"]) / gain if gain > 0 else None
    assert kept.value == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"models": ["tiny-llama"]}, "a teacher and at least one student"),
        ({"models": ["tiny-llama", "tiny-gpt2"], "baseline": "tiny-llama"}, "baseline .* must be one of tiny-gpt2"),
    ],
)
def test_a_mistake_is_one_line(settings, more, complaint):
    with pytest.raises(UserError, match=complaint) as caught:
        DistillationConfig(reward_model="r", **settings, **more)
    assert "\n" not in str(caught.value)


def test_without_a_reward_model_there_is_no_baseline(settings):
    with pytest.raises(UserError, match="empty without reward_model"):
        DistillationConfig(models=["tiny-llama", "tiny-gpt2"], judge="a:b", baseline="tiny-gpt2", **settings)
