"""Which policy a run keeps: one within the rule budgets before any other, and none that was not tested against the start."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from align.model_registry.registry import resolve_model
from align.ppo import PPOConfig, PPOTrainer
from align.ppo.evaluation import Candidate, is_better, is_new_best
from align.ppo.toy_rewards import share_of_e

WORDS = ["red", "green", "blue", "one", "two", "three", "dog", "cat"]


def fewer_es(prompts, responses):
    """The opposite of the reward."""
    return [-value for value in share_of_e(prompts, responses)]


def trained(folder: Path, judge=None, **more) -> Path:
    config = PPOConfig(
        output_dir=str(folder / "run"),
        report_to=["none"],
        dtype="float32",
        max_new_tokens=12,
        missing_eos_score=None,
        learning_rate=1e-2,
        kl_coef=0.0,
        eval_steps=6,
        max_kl=1000.0,
        total_updates=6,
        rollout_batch_size=32,
        **more,
    )
    return PPOTrainer("tiny-gpt2", [share_of_e], WORDS, config, WORDS, selection_reward_model=judge).train()


def test_the_first_trained_policy_is_tested_against_the_start(tmp_path, capsys):
    """The judge likes the start best, so the start is what is kept, and the run says it."""
    folder = trained(tmp_path, fewer_es, best_policy_confidence=0.95)
    printed = " ".join(capsys.readouterr().err.split())
    assert "warning: no policy was better than the initial policy at best_policy_confidence 0.95" in printed
    assert "| update | 0 |" in (folder / "README.md").read_text()
    kept, start = (load_file(path / "model.safetensors") for path in (folder, Path(resolve_model("tiny-gpt2"))))
    assert all(torch.equal(kept[name], start[name].float()) for name in kept)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows if "validation/is_best" in row] == [0]


def test_a_policy_that_is_better_replaces_the_start(tmp_path, capsys):
    folder = trained(tmp_path, best_policy_confidence=0.9)
    assert "| update | 0 |" not in (folder / "README.md").read_text()
    assert "initial policy" not in capsys.readouterr().err


def test_without_a_test_a_policy_that_is_worse_than_the_start_is_named(tmp_path, capsys):
    folder = trained(tmp_path, fewer_es)
    assert "| update | 0 |" not in (folder / "README.md").read_text()
    printed = " ".join(capsys.readouterr().err.split())
    assert "is no better than the initial policy: its selection reward is -0." in printed


def test_any_higher_mean_will_do_without_a_test() -> None:
    assert is_new_best([-9.0], None)
    assert not is_new_best([math.nan, 1.0], None)
    assert is_new_best([1.0, 3.1], [2.0, 2.0])
    assert not is_new_best([1.0, 3.0], [2.0, 2.0])  # of equal means the first stays
    assert not is_new_best([math.nan, 9.0], [2.0, 2.0])


def test_the_paired_test_by_hand() -> None:
    # Differences 1, 2, 3, 2: mean 2, standard deviation sqrt(2 / 3), standard error sqrt(1 / 6) = 0.408; 2 / 0.408 = 4.9.
    kept, scores = [10.0, -10.0, 0.0, 5.0], [11.0, -8.0, 3.0, 7.0]
    assert is_new_best(scores, kept, 0.95)  # 1.645
    assert is_new_best(scores, kept, 0.999999)  # 4.75
    assert not is_new_best(scores, kept, 0.999999, evaluations=10)  # 5.2
    assert not is_new_best([11.0, -11.0, 0.1, 5.0], kept, 0.95)  # 0.025 with an error of 0.41


@pytest.mark.parametrize("evaluations", [1, 5, 20])
def test_a_policy_that_is_no_better_seldom_replaces_the_kept_one(evaluations: int) -> None:
    """Over whole runs of policies that are all the same, a tenth or fewer replace the first at confidence 0.9."""
    random.seed(0)
    replaced = 0
    for _ in range(300):
        kept = [random.gauss(0, 1) for _ in range(48)]
        runs = ([random.gauss(0, 1) for _ in range(48)] for _ in range(evaluations))
        replaced += any(is_new_best(scores, kept, 0.9, evaluations) for scores in runs)
    assert replaced < 0.15 * 300


def test_budgets_come_before_scores() -> None:
    low, high = Candidate(1, [0.0, 0.1]), Candidate(2, [5.0, 5.1])
    over = Candidate(3, [9.0, 9.1], violated_constraint="over")
    assert is_better(high, low)
    assert not is_better(over, low)
    assert is_better(low, over)
    assert is_better(low, over, 0.95, 10)
    assert not is_better(Candidate(4, [math.nan, 0.0]), over)
    assert is_better(over, Candidate(5, [8.0, 8.1], violated_constraint="over"))
    assert is_better(over, None)
