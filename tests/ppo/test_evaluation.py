"""Which policy a run keeps: one within the rule budgets before any other, then the one with the highest mean."""

import math
from pathlib import Path

from align.ppo import PPOConfig, PPOTrainer
from align.ppo.evaluation import Candidate, is_better
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


def test_a_policy_that_is_worse_than_the_start_is_named(tmp_path, capsys):
    folder = trained(tmp_path, fewer_es)
    assert "| update | 0 |" not in (folder / "README.md").read_text()
    printed = " ".join(capsys.readouterr().err.split())
    assert "is no better than the initial policy: its selection reward is -0." in printed


def test_any_higher_mean_will_do() -> None:
    assert is_better(Candidate(1, [-9.0]), None)
    assert not is_better(Candidate(1, [math.nan, 1.0]), None)
    kept = Candidate(1, [2.0, 2.0])
    assert is_better(Candidate(2, [1.0, 3.1]), kept)
    assert not is_better(Candidate(2, [1.0, 3.0]), kept)  # of equal means the first stays
    assert not is_better(Candidate(2, [math.nan, 9.0]), kept)


def test_budgets_come_before_scores() -> None:
    low, high = Candidate(1, [0.0, 0.1]), Candidate(2, [5.0, 5.1])
    over = Candidate(3, [9.0, 9.1], violated_constraint="over")
    assert is_better(high, low)
    assert not is_better(over, low)
    assert is_better(low, over)
    assert not is_better(Candidate(4, [math.nan, 0.0]), over)
    assert is_better(over, Candidate(5, [8.0, 8.1], violated_constraint="over"))
    assert is_better(over, None)
