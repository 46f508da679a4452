"""Rules in the reward: a weighted term (Sparrow), or violation budgets with one Lagrange multiplier each.

The weighted form is the normalized preference reward plus `rule_weight` times the mean over rules of the normalized
P(follows) (Glaese et al. 2022, section 2.7). Under budgets, each rule subtracts its multiplier times P(violates).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from align.core.errors import UserError, nearest_name_hint
from align.extras.rules.scoring import RuleScorer
from align.ppo.config import PPOConfig
from align.ppo.records import Rollout
from align.ppo.scores import RunningMoments

PREFERENCE = "preference"
Violations = Mapping[str, Tensor]
"""How likely each response violates each rule [B], by the rule's id."""
LEAST_DEVIATION = 0.1
"""Least divisor of a rule's P(follows): the deviation where one response in 100 violates it. Otherwise a rule that hardly
varies would turn the rule model's noise into scores of any size."""
FIRST_MULTIPLIER, LARGEST_MULTIPLIER = 1.0, 10.0
"""In standard deviations of the preference per violation. The largest is also the penalty in evaluations per share of
responses beyond a budget."""
RATE, DAMPING = 0.2, 5.0
"""Step size of the multipliers, and how strongly a rollout's own excess changes its multiplier."""


def read_budgets(given: Sequence[str], rules: Sequence[str]) -> dict[str, float]:
    """Parse the budget of each rule, a share of responses that may violate it: numbers for all, RULE=NUMBER for one.

    Raises:
        UserError: for an unknown rule, a rule without a budget, or a number that is not from 0 to 1.
    """
    budgets: dict[str, float] = {}
    for text in given:
        rule, equals, number = text.rpartition("=")
        try:
            budget = float(number)
        except ValueError:
            budget = -1.0
        if not 0 <= budget <= 1:
            raise UserError(f"rule_budgets: {text!r} must be a share from 0 to 1, or RULE=SHARE")
        if equals and rule not in rules:
            raise UserError(f"rule_budgets: no rule '{rule}'{nearest_name_hint(rule, rules)}")
        budgets |= {rule: budget} if equals else {rule: budget for rule in rules if rule not in budgets}
    missing = [rule for rule in rules if budgets and rule not in budgets]
    if missing:
        raise UserError(f"rule_budgets: none for rule '{missing[0]}'; give {missing[0]}=SHARE, or a share for all")
    return budgets


class RuleTerms:
    """Combines rules with the preference reward; without a scorer, the preference reward alone counts."""

    def __init__(self, config: PPOConfig, scorer: RuleScorer | None = None) -> None:
        self.config, self.scorer = config, scorer
        self.rules = tuple(scorer.rules) if scorer else ()
        self.budgets = read_budgets(config.rule_budgets, self.rules) if scorer else {}
        self.multipliers = dict.fromkeys(self.budgets, FIRST_MULTIPLIER)
        self.moments = {name: RunningMoments() for name in (PREFERENCE, *self.rules)}
        self.first: dict[str, tuple[float, float]] = {}
        """Mean and standard deviation of each part in the first evaluation, the scale of all evaluations."""

    def violations(self, rollout: Rollout) -> dict[str, Tensor]:
        """How likely each response violates each rule [B]; empty without a rule model."""
        if self.scorer is None:
            return {}
        return dict(zip(self.rules, self.scorer(rollout.sampled), strict=True))

    def score_to_learn(self, preference: Tensor, violations: Violations) -> Tensor:
        """Scores to learn from [B]; the parts are added to the running statistics first."""
        if not self.rules:
            return preference
        parts = _parts(preference, violations)
        for name, values in parts.items():
            self.moments[name].add(values)
        scales = {name: _scale(name, moments) for name, moments in self.moments.items()}
        if self.budgets:
            costs = torch.stack([violations[rule] for rule in self.rules])
            multipliers = torch.tensor(list(self._each(damped_multiplier, violations).values()))
            return lagrangian_scores(_scaled(parts, scales, PREFERENCE), costs, multipliers)
        return self._weighted(parts, scales)

    def score_to_compare(self, preference: Tensor, violations: Violations) -> Tensor:
        """Scores to compare evaluations by [B], on the scale of the first one, where each part has mean 0 and deviation 1.

        Under budgets: the preference alone; `excess` has the rest.
        """
        if not self.rules:
            return preference
        parts = _parts(preference, violations)
        if not self.first:
            for name, values in parts.items():
                moments = RunningMoments()
                moments.add(values)
                self.first[name] = _scale(name, moments)
        if not self.budgets:
            return self._weighted(parts, self.first)
        return _scaled(parts, self.first, PREFERENCE)

    def excess(self, violations: Violations) -> float:
        """How far the mean violations exceed their budgets, summed over rules; 0 if none does, or without budgets."""
        over = [float(violations[rule].mean()) - budget for rule, budget in self.budgets.items()]
        return sum(excess for excess in over if excess > 1e-6)  # float32 rounds a mean that is at its budget

    def _weighted(self, parts: Mapping[str, Tensor], scales: Mapping[str, tuple[float, float]]) -> Tensor:
        rules = torch.stack([_scaled(parts, scales, rule) for rule in self.rules]).mean(0)
        return _scaled(parts, scales, PREFERENCE) + self.config.rule_weight * rules

    def _each(self, step: Callable[[float, float, float], float], violations: Violations) -> dict[str, float]:
        """Apply a function of multiplier, mean cost and budget to every rule's multiplier."""
        return {
            rule: step(self.multipliers[rule], float(violations[rule].mean()), self.budgets[rule])
            for rule in self.rules
            if rule in self.budgets
        }

    def adapt(self, violations: Violations) -> None:
        """Update the multipliers after a rollout."""
        self.multipliers = self._each(next_multiplier, violations)

    def metrics(self) -> dict[str, float]:
        """The multipliers of the next rollout; docs/metrics.md defines them."""
        return {f"rule_multiplier/{rule}": value for rule, value in self.multipliers.items()}

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        moments = {name: moments.state_dict() for name, moments in self.moments.items()}
        return {"moments": moments, "multipliers": self.multipliers, "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises: UserError if it was written under other rules."""
        if state["moments"].keys() != self.moments.keys():
            before = ", ".join(name for name in state["moments"] if name != PREFERENCE) or "none"
            raise UserError(f"the checkpoint was written under the rules {before}: resume it with those")
        for name, stored in state["moments"].items():
            self.moments[name].load_state_dict(stored)
        self.multipliers |= {rule: value for rule, value in state["multipliers"].items() if rule in self.multipliers}
        self.first = {name: (mean, std) for name, (mean, std) in state["first"].items()}


def _parts(preference: Tensor, violations: Violations) -> dict[str, Tensor]:
    """The preference, and of each rule how likely it is followed."""
    return {PREFERENCE: preference} | {rule: 1 - broken for rule, broken in violations.items()}


def _scale(name: str, moments: RunningMoments) -> tuple[float, float]:
    """Mean and deviation that a part is normalized by."""
    if name == PREFERENCE:
        return moments.mean, moments.std
    return moments.mean, max(LEAST_DEVIATION, moments.std if moments.squares else 0.0)


def _scaled(parts: Mapping[str, Tensor], scales: Mapping[str, tuple[float, float]], name: str) -> Tensor:
    mean, std = scales[name]
    return (parts[name] - mean) / std


def lagrangian_scores(preference: Tensor, costs: Tensor, multipliers: Tensor) -> Tensor:
    """Scores [B] (preference - sum of multiplier x cost) / (1 + sum of multipliers).

    The division keeps the scale of scores constant while multipliers grow.

    Args:
        preference: [B].
        costs: [R, B] of R constraints.
        multipliers: [R], 0 or more.

    Source: Dai et al. 2023, "Safe RLHF" (arXiv 2310.12773), appendix B, for one constraint.
    """
    return (preference - (multipliers[:, None] * costs).sum(0)) / (1 + multipliers.sum())


def next_multiplier(multiplier: float, cost: float, budget: float) -> float:
    """A multiplier after a rollout: larger while the mean cost is above its budget, smaller below.

    ln(multiplier) moves by `RATE` x multiplier x (cost - budget), which keeps it above 0 (Dai et al. 2023, equation 31).
    """
    return min(LARGEST_MULTIPLIER, multiplier * math.exp(min(RATE * multiplier * (cost - budget), 1.0)))


def damped_multiplier(multiplier: float, cost: float, budget: float) -> float:
    """The multiplier that a rollout is scored with: `multiplier` x e^(`DAMPING` x (cost - budget)).

    A multiplier sums up past excess. Alone it rises until the cost is far below the budget, and both swing. A part that
    follows the current cost damps this, as the proportional term of a PID controller does (Stooke et al. 2020, "Responsive
    Safety in Reinforcement Learning by PID Lagrangian Methods", arXiv 2007.03964, which adds it; here it multiplies).

    Args:
        cost: mean of the rollout that is scored.
    """
    return min(LARGEST_MULTIPLIER, multiplier * math.exp(DAMPING * (cost - budget)))
