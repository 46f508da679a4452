"""The reward model that selects the policy to keep: when it stops a run, and what it needs."""

import pytest

from align.core.errors import UserError
from align.ppo import PPOConfig, PPOTrainer
from align.ppo.extensions.selection import OveroptimizationWatch


def evaluation(reward, selection_reward, kl=1.0):
    return {"reward": reward, "selection_reward": selection_reward, "kl": kl, "kl_per_token": kl / 10}


def test_the_reward_that_rises_while_the_judge_falls_stops_the_run():
    watch = OveroptimizationWatch(2)
    # The best selection reward is at update 1; update 2 counts, update 3 does not (the reward is lower too), update 4 does.
    for update, (reward, selected) in enumerate([(0.0, 0.0), (1.0, 2.0), (2.0, 1.0), (0.5, 1.0), (3.0, 1.5)]):
        assert watch.check(update, evaluation(reward, selected)) == ""
    other = OveroptimizationWatch(2)
    other.load_state_dict(watch.state_dict())
    assert not other.reached
    said = other.check(5, evaluation(4.0, 1.9, kl=20.0))
    assert other.reached
    assert said == (
        "stopped: from update 1 (KL 1 nats per response, 0.1 per token) to update 5 (KL 20 nats per response, 2 per token) "
        "the reward rose from 1 to 4 and the selection reward fell from 2 to 1.9"
    )


def test_a_judge_that_rises_again_starts_the_count_anew():
    watch = OveroptimizationWatch(2)
    for update, (reward, selected) in enumerate([(0.0, 0.0), (1.0, -1.0), (2.0, 0.5), (3.0, 0.4)]):
        watch.check(update, evaluation(reward, selected))
    assert not watch.reached


def test_without_patience_or_judge_nothing_stops():
    watch = OveroptimizationWatch(0)
    for update in range(9):
        watch.check(update, evaluation(float(update), -float(update)))
        assert watch.check(update, {"reward": float(update)}) == ""
    assert not watch.reached


def test_patience_needs_evaluations(tmp_path, align_cache):
    def likes_all(prompts, responses):
        return [1.0] * len(responses)

    config = PPOConfig(
        output_dir=str(tmp_path / "run"), report_to=["none"], selection={"reward_model": "any", "early_stopping_patience": 2}
    )
    with pytest.raises(UserError, match=r"selection\.early_stopping_patience needs validation_prompts"):
        PPOTrainer("tiny-gpt2", [likes_all], ["Hi"], config, selection_reward_model=likes_all)
