import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.errors import UserError
from align.extras.rules import rule_terms
from align.extras.rules.rule_terms import RuleRewards, RuleTermSettings, RunningMoments
from align.ppo.extensions import PolicyEvaluation
from align.ppo.records import Rollout, TrainingSignal
from align.ppo.rewards import MissingEos
from align.tokenization.encoded import EncodedPrompt


@pytest.fixture(autouse=True)
def _a_rule_model(monkeypatch):
    """Its rules are those that are named, without any a and b."""
    monkeypatch.setattr(rule_terms, "rules_of_model", lambda model, wanted: dict.fromkeys(wanted or "ab", "A rule."))


def terms(**given):
    return RuleRewards(RuleTermSettings(model="x", **given))


def violations(a, b):
    return {"a": torch.tensor(a), "b": torch.tensor(b)}


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=5))
def test_running_moments_are_those_of_all_numbers_at_once(batches):
    moments, flat = RunningMoments(), torch.tensor([x for batch in batches for x in batch], dtype=torch.float64)
    for batch in batches:
        moments = dataclasses.replace(moments)  # as a run that was killed goes on
        moments.add(torch.tensor(batch, dtype=torch.float64))
    assert moments.mean == pytest.approx(float(flat.mean()), abs=1e-9)
    assert moments.squares == pytest.approx(float(((flat - flat.mean()) ** 2).sum()), abs=1e-6)


def test_the_weighted_form_by_hand():
    """Preference 1, 3 then 8: means 2 and 4, deviations 1 and sqrt(26/3); each rule likewise, from P(follows)."""
    rules = terms(weight=2.0)
    first = rules.training_scores(torch.tensor([1.0, 3.0]), violations([0.8, 0.6], [0.5, 0.5]))
    # Rule a is followed with .2 and .4: normalized -1 and 1. Rule b never varies: 0. Their mean, twice: -1 and 1.
    assert first.tolist() == pytest.approx([-1 - 1, 1 + 1], abs=1e-5)
    second = rules.training_scores(torch.tensor([8.0]), violations([0.1], [0.5]))
    # Follows .2, .4, .9: mean .5, deviation sqrt((.09 + .01 + .16) / 3) = .2943920; (.9 - .5) / .2943920 = 1.3587324.
    assert second.item() == pytest.approx((8 - 4) / math.sqrt(26 / 3) + 2 * 1.3587324 / 2, abs=1e-5)


def test_evaluations_are_compared_in_the_unit_of_the_first():
    rules = terms(weight=1.0)
    first = rules.comparable_scores(torch.tensor([1.0, 3.0]), violations([0.8, 0.6], [0.5, 0.5]))
    assert float(first.mean()) == pytest.approx(0)
    rules.training_scores(torch.tensor([100.0]), violations([0.0], [0.0]))  # training moves nothing
    later = rules.comparable_scores(torch.tensor([3.0, 3.0]), violations([0.6, 0.6], [0.5, 0.5]))
    assert later.tolist() == pytest.approx([1.5, 1.5], abs=1e-5)


def test_a_rule_that_hardly_varied_at_first_is_not_divided_by_that():
    """One of four answers is 0.02 likely to violate rule a: 0.005 on average, a twentieth of the least deviation of 0.1."""
    rules = terms(weight=1.0)
    never = [0.0, 0.0, 0.0, 0.0]
    rules.comparable_scores(torch.tensor([1.0, 3.0, 1.0, 3.0]), violations([0.0, 0.0002, 0.0, 0.0002], never))
    later = rules.comparable_scores(torch.tensor([3.0] * 4), violations([0.02, 0.0, 0.0, 0.0], never))
    # The preference is 1 deviation up. Rule a: (0.0001 - 0.005) / 0.1, in the mean over two rules.
    assert float(later.mean()) == pytest.approx(1 - 0.049 / 2, abs=1e-4)
    learned = terms(weight=1.0).training_scores(torch.tensor([2.0] * 4), violations([0.002, 0.0, 0.0, 0.0], never))
    assert learned.tolist() == pytest.approx([-0.0015 / 0.1 / 2] + [0.0005 / 0.1 / 2] * 3, abs=1e-5)


def test_the_checkpoint_holds_all_that_decides():
    rules, again = terms(), terms()
    for number in range(3):
        broken = violations([0.1 * number, 0.4], [0.9, 0.2 * number])
        rules.comparable_scores(torch.tensor([1.0, number]), broken)
        rules.training_scores(torch.tensor([1.0, number]), broken)
    again.load_state_dict(json.loads(json.dumps(rules.state_dict())))
    broken = violations([0.3, 0.1], [0.2, 0.6])
    for step in ("comparable_scores", "training_scores"):
        ours, theirs = (getattr(each, step)(torch.tensor([0.5, 2.0]), broken) for each in (rules, again))
        assert torch.equal(ours, theirs)
    stored = terms().state_dict()
    del stored["moments"]["b"]
    with pytest.raises(UserError, match="saved with the rules a; resume"):
        terms().load_state_dict(stored)


def judged(said, **given):
    """The terms of rules whose judge says how likely each response violates each rule, call by call."""
    made, said = terms(**given), iter(said)
    made.scorer = lambda responses: next(said)
    return made


def test_violations_come_from_the_judge_in_its_order():
    rules = judged([torch.tensor([[0.1, 0.2], [0.3, 0.4]])])
    prompts = [EncodedPrompt(({"role": "user", "content": "Hi"},), [1])] * 2
    rollout = Rollout(prompts, [[2], [2]], [True, True], ["", ""])
    parts = rules.shape(TrainingSignal(torch.zeros(2), {}), rollout, None).components
    assert list(parts) == ["rule/a", "rule/b"]
    assert torch.allclose(torch.stack(list(parts.values())), torch.tensor([[0.1, 0.2], [0.3, 0.4]]))


def test_an_evaluation_has_comparable_scores_and_the_preference_with_the_score_for_a_missing_end(hand_rollout):
    rules = judged([torch.full((1, 6), 0.25)] * 2, rules=["a"], weight=1.0)
    rollout = dataclasses.replace(hand_rollout, ended=[False, True, False, True, True, False])
    # First mean 0 and deviation 2. The three responses that end have 2, 2 and -2, then 3, 3 and -1; the others count as -4.
    for update, more, scores, preference in ((0, 0.0, [-1.0, 1.0], -10 / 6), (1, 1.0, [-0.5, 1.5], -7 / 6)):
        evaluation = PolicyEvaluation(
            update=update,
            rollout=rollout,
            scores=torch.tensor([-2.0, 2.0] * 3) + more,
            missing_eos=MissingEos(score=-4.0),
            kl=0.0,
            kl_per_token=0.0,
        )
        rules.evaluate(evaluation)
        assert evaluation.scores.tolist() == pytest.approx(scores * 3, abs=1e-5)
        assert evaluation.metrics == {"preference": pytest.approx(preference), "rule/a": 0.25}
