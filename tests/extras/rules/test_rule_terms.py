import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.errors import UserError
from align.extras.rules import rule_terms
from align.extras.rules.rule_terms import (
    RuleRewards,
    RuleTermSettings,
    RunningMoments,
    damped_multiplier,
    lagrangian_scores,
    next_multiplier,
    read_budgets,
)
from align.ppo.evaluation import Candidate, PolicySelection
from align.ppo.extensions import PolicyEvaluation
from align.ppo.records import Rollout
from align.ppo.rewards import apply_missing_eos
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


def test_a_lagrangian_and_its_multiplier_by_hand():
    preference, costs = torch.tensor([1.0, 0.0]), torch.tensor([[0.5, 0.0], [1.0, 0.5]])
    scores = lagrangian_scores(preference, costs, torch.tensor([2.0, 1.0]))
    assert scores.tolist() == [(1 - 1 - 1) / 4, (0 - 0 - 0.5) / 4]
    assert torch.equal(lagrangian_scores(preference, costs, torch.zeros(2)), preference)
    # ln 2 + .2 * 2 * (.4 - .1) = ln 2 + .12
    assert next_multiplier(2.0, 0.4, 0.1) == pytest.approx(2 * math.exp(0.12))
    assert next_multiplier(2.0, 0.1, 0.1) == 2.0
    assert next_multiplier(2.0, 0.0, 0.1) == pytest.approx(2 * math.exp(-0.04))
    assert next_multiplier(9.0, 1.0, 0.0) == 10.0
    multiplier = 1.0
    for _ in range(5000):
        multiplier = next_multiplier(multiplier, 0.0, 1.0)
    assert 0 < multiplier < 0.01


def test_budgets_move_multipliers_one_by_one(monkeypatch):
    monkeypatch.setattr(rule_terms, "DAMPING", 0.0)
    rules = terms(budgets=["0.1", "b=0.5"])
    rules.multipliers = {"a": 2.0, "b": 2.0}
    broken = violations([0.4, 0.4], [0.5, 0.5])
    learned = rules.training_scores(torch.tensor([1.0, 3.0]), broken)
    assert learned.tolist() == pytest.approx([(-1 - 2 * 0.4 - 2 * 0.5) / 5, (1 - 2 * 0.4 - 2 * 0.5) / 5])
    rules.adapt(broken)
    moved = {"rule_multiplier/a": 2 * math.exp(0.2 * 2 * 0.3), "rule_multiplier/b": 2.0}
    assert rules.metrics() == pytest.approx(moved)


def test_a_rollouts_own_excess_damps_its_multiplier_by_hand():
    assert damped_multiplier(2.0, 0.4, 0.1) == pytest.approx(2 * math.exp(1.5))
    assert damped_multiplier(2.0, 0.0, 0.1) == pytest.approx(2 * math.exp(-0.5))
    assert damped_multiplier(9.0, 0.4, 0.1) == 10.0
    rules = terms(budgets=["0.1", "b=0.5"])
    rules.multipliers = {"a": 2.0, "b": 2.0}
    learned = rules.training_scores(torch.tensor([1.0, 3.0]), violations([0.5, 0.3], [0.5, 0.5]))
    a = 2 * math.exp(5 * 0.3)  # b is at its budget
    expected = [(-1 - a * 0.5 - 2 * 0.5) / (3 + a), (1 - a * 0.3 - 2 * 0.5) / (3 + a)]
    assert learned.tolist() == pytest.approx(expected, abs=1e-6)
    assert rules.multipliers == {"a": 2.0, "b": 2.0}  # nothing of it is kept


def violations_over_time(budget, updates=200, count=256):
    """The share of a policy's answers that violate a rule, update by update; the preference likes violations, by one.

    The policy has one parameter, violates with sigmoid(parameter), and learns by policy gradient.
    """
    rules = terms(rules=["a"], budgets=[budget])
    luck = 0.5 * torch.randn(updates, count, generator=torch.Generator().manual_seed(0))
    parameter, found = 0.0, []
    for noise in luck:
        found.append(1 / (1 + math.exp(-parameter)))
        broken = (torch.arange(count) < found[-1] * count).float()
        scores = rules.training_scores(broken + noise, {"a": broken})
        advantages = (scores - scores.mean()) / scores.std()
        parameter += float(((broken - found[-1]) * advantages).mean())
        rules.adapt({"a": broken})
    return found, rules.multipliers["a"]


def test_a_budget_is_reached_and_kept_though_the_preference_is_against_it(monkeypatch):
    """Not below it either: the multiplier settles where the rule costs as much as the preference gains.

    Without damping, violations swing about their budget.
    """
    for budget in (0.1, 0.3):
        found, multiplier = violations_over_time(str(budget))
        assert found[0] == 0.5
        assert all(abs(share - budget) < 0.05 for share in found[100:]), (budget, found[100:])
        assert 0.5 < multiplier < 5
    free, _ = violations_over_time("1")
    assert free[-1] > 0.9
    monkeypatch.setattr(rule_terms, "DAMPING", 0.0)
    found, _ = violations_over_time("0.2")
    assert max(found[100:]) > 0.4
    assert min(found[100:]) < 0.1


def test_evaluations_are_compared_in_the_unit_of_the_first():
    rules = terms(weight=1.0)
    first = rules.comparable_scores(torch.tensor([1.0, 3.0]), violations([0.8, 0.6], [0.5, 0.5]))
    assert float(first.mean()) == pytest.approx(0)
    rules.training_scores(torch.tensor([100.0]), violations([0.0], [0.0]))  # training moves nothing
    later = rules.comparable_scores(torch.tensor([3.0, 3.0]), violations([0.6, 0.6], [0.5, 0.5]))
    assert later.tolist() == pytest.approx([1.5, 1.5], abs=1e-5)


def test_under_budgets_a_policy_that_keeps_them_is_worth_its_preference():
    rules = terms(budgets=["0.5"])
    rules.comparable_scores(torch.tensor([1.0, 3.0]), violations([0.0, 0.0], [0.0, 0.0]))
    within, beyond = violations([1.0, 0.0], [0.2, 0.2]), violations([0.7, 0.5], [0.2, 0.2])
    for broken, excess in ((within, 0.0), (beyond, 0.1)):
        assert rules.comparable_scores(torch.tensor([3.0, 3.0]), broken).tolist() == [1.0, 1.0]
        assert rules.excess(broken) == pytest.approx(excess, abs=1e-6)


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


@pytest.mark.parametrize("settings", [{}, {"budgets": ["0.1"]}])
def test_the_checkpoint_holds_all_that_decides(settings):
    rules, again = terms(**settings), terms(**settings)
    for number in range(3):
        broken = violations([0.1 * number, 0.4], [0.9, 0.2 * number])
        rules.comparable_scores(torch.tensor([1.0, number]), broken)
        rules.training_scores(torch.tensor([1.0, number]), broken)
        rules.adapt(broken)
    again.load_state_dict(json.loads(json.dumps(rules.state_dict())))
    broken = violations([0.3, 0.1], [0.2, 0.6])
    for step in ("comparable_scores", "training_scores"):
        ours, theirs = (getattr(each, step)(torch.tensor([0.5, 2.0]), broken) for each in (rules, again))
        assert torch.equal(ours, theirs)
    assert rules.metrics() == again.metrics()
    stored = terms().state_dict()
    del stored["moments"]["b"]
    with pytest.raises(UserError, match="written under the rules a: resume"):
        terms().load_state_dict(stored)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["a=0.1"], "none for rule 'b'; give b=SHARE"),
        (["c=0.1"], "no rule 'c'"),
        (["much"], "'much' must be a share"),
        (["2"], "'2' must be a share"),
        (["a=-1", "0.1"], "'a=-1' must be a share"),
    ],
)
def test_budgets(given, says):
    with pytest.raises(UserError, match=says):
        read_budgets(given, ["a", "b"])
    assert read_budgets([], ["a"]) == {}
    assert read_budgets(["a=0.3", "0.1"], ["a", "b"]) == read_budgets(["0.1", "a=0.3"], ["a", "b"]) == {"a": 0.3, "b": 0.1}


def judged(said, **given):
    """The terms of rules whose judge says how likely each response violates each rule, call by call."""
    made, said = terms(**given), iter(said)
    made.scorer = lambda responses: next(said)
    made.context = SimpleNamespace(missing_eos_penalty=None, missing_eos_score=-1.0)
    return made


def test_violations_come_from_the_judge_in_its_order():
    rules, parts = judged([torch.tensor([[0.1, 0.2], [0.3, 0.4]])]), {}
    prompts = [EncodedPrompt(({"role": "user", "content": "Hi"},), [1])] * 2
    rules.transform_scores(torch.zeros(2), Rollout(prompts, [[2], [2]], [True, True], ["", ""]), parts)
    assert list(parts) == ["rule/a", "rule/b"]
    assert torch.allclose(torch.stack(list(parts.values())), torch.tensor([[0.1, 0.2], [0.3, 0.4]]))


@pytest.mark.parametrize(
    ("policies", "kept"),
    [
        # Preference in deviations of the first evaluation, mean violation, whether responses end.
        ([(0.0, 0.0, True), (-1.2, 0.05, True), (2.0, 0.6, False)], [1, 0.0]),
        ([(0.0, 0.6, True), (2.0, 0.6, False), (-1.2, 0.05, True)], [3, -1.2]),
        ([(0.0, 0.5, True), (0.3, 0.07, True), (0.05, 0.05, True)], [3, 0.05]),
        ([(0.0, 0.5, True), (0.3, 0.4, True), (0.0, 0.2, True)], [3, -10 * (0.2 - 0.05)]),
    ],
    ids=["never-ending", "never-ending first", "a little over", "none within"],
)
def test_a_policy_within_its_budgets_is_kept_before_any_other(policies, kept, hand_rollout):
    rules = judged([torch.full((1, 6), violation) for _, violation, _ in policies], rules=["a"], budgets=["0.05"])
    spread = torch.tensor([-1.0, 1.0] * 3)
    wanted = iter([spread + mean for mean, _, _ in policies])
    selection = PolicySelection(25.0)
    for update, (_, _, ends) in enumerate(policies, 1):
        evaluation = PolicyEvaluation(update, dataclasses.replace(hand_rollout, ended=[ends] * 6), next(wanted))
        rules.evaluate(evaluation)
        ended = evaluation.rollout.ended_mask
        scores = apply_missing_eos(evaluation.scores, ended, None, -1.0) - evaluation.penalty  # as `Evaluator` reads them
        selection.update(Candidate(update, scores.tolist(), evaluation.violated_constraint), kl=0.0)
    state = json.loads(json.dumps(selection.state_dict()))["best"]
    assert state["update"] == kept[0]
    assert sum(state["scores"]) / 6 == pytest.approx(kept[1], abs=1e-4)
