from types import SimpleNamespace

import pytest
import torch

from align.core.errors import UserError
from align.ppo import PPOTrainer
from align.ppo.extensions import PolicyEvaluation
from align.ppo.extensions.selection import RewardModelSelection, SelectionSettings
from align.ppo.records import Rollout, Scores
from align.ppo.reward_functions import WeightedFunction
from align.ppo.rewards import MissingEos
from tests.ppo.rewards import long


def selection(patience):
    """A selection as after `load`, without prompts."""
    made = RewardModelSelection(SelectionSettings(early_stopping_patience=patience), WeightedFunction("own", 1.0, long))
    made.context = SimpleNamespace(prompts=[], training_prompts=[], max_new_tokens=4)
    made.card = {"chosen by": "own"}
    return made


def evaluate(chosen, update, reward, selection_reward, kl=1.0):
    """Evaluate a policy with these mean rewards; returns what is printed."""
    chosen.rewards = lambda rollout: Scores(torch.tensor([selection_reward]), {})
    evaluation = PolicyEvaluation(
        update=update,
        rollout=Rollout([], [[1]], [True], ["x"]),
        scores=torch.tensor([reward]),
        missing_eos=MissingEos(),
        kl=kl,
        kl_per_token=kl / 10,
    )
    chosen.evaluate(evaluation)
    assert evaluation.metrics["selection_reward"] == pytest.approx(selection_reward)
    assert evaluation.selection_scores.tolist() == pytest.approx([selection_reward])
    return evaluation.messages


def test_the_reward_that_rises_while_the_judge_falls_stops_the_run():
    first, resumed = selection(2), selection(2)
    # The best selection reward is at update 1; update 2 counts, update 3 does not (the reward is lower too), update 4 does.
    for update, (reward, selected) in enumerate([(0.0, 0.0), (1.0, 2.0), (2.0, 1.0), (0.5, 1.0), (3.0, 1.5)]):
        assert evaluate(first, update, reward, selected) == []
    resumed.load_state_dict(first.state_dict())
    assert not resumed.should_stop
    (line,) = evaluate(resumed, 5, 4.0, 1.9, kl=20.0)
    assert resumed.should_stop
    for part in ("update 1 (KL 1 ", "update 5 (KL 20 ", "rose from 1 to 4", "fell from 2 to 1.9"):
        assert part in line


def test_a_judge_that_rises_again_or_no_patience_stops_nothing():
    patient = selection(2)
    for update, (reward, selected) in enumerate([(0.0, 0.0), (1.0, -1.0), (2.0, 0.5), (3.0, 0.4)]):
        evaluate(patient, update, reward, selected)
    assert not patient.should_stop
    endless = selection(0)
    assert [evaluate(endless, update, float(update), -float(update)) for update in range(9)] == [[]] * 9
    assert not endless.should_stop


@pytest.mark.parametrize("patience", [0, 2])
def test_a_selection_without_use_is_refused(patience, make_config):
    selection = {"reward_model": "any", "early_stopping_patience": patience}
    if not patience:
        with pytest.raises(UserError, match=r"save_best_policy is False, but must be true with selection\.reward_model"):
            make_config(selection=selection, save_best_policy=False)
    config = make_config(selection=selection, save_best_policy=not patience)
    with pytest.raises(UserError, match=r"selection\.reward_model needs validation_prompts"):
        PPOTrainer("tiny-gpt2", [long], ["Hi"], config, selection_reward_model=long)
