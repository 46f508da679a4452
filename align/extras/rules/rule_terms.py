"""Rules in the reward: the normalized preference reward plus `weight` times the mean over rules of normalized P(follows).

Source: Sparrow, Glaese et al. 2022, section 2.7.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from align.core.errors import UserError
from align.core.settings import option
from align.extras.rules.judgments import RuleModelSettings, RuleScorer, rules_of_model
from align.models.roles import Roles
from align.ppo.extensions import Extension, PolicyEvaluation, TrainingContext
from align.ppo.records import RoleOutputs, Rollout, TrainingSignal
from align.ppo.scoring_models import load_source, make_scorer, require_readable
from align.reward.checkpoint import RULE
from align.runtime.flops import forward_flops
from align.training.engine import TrainEngine

RULE_ADAPTER = "rules"
"""Name of a rule model's adapter on the policy's base."""
PREFERENCE = "preference"
Violations = Mapping[str, Tensor]
"""Probability that each response violates each rule [B], by rule id."""
LEAST_DEVIATION = 0.1
"""Minimum divisor of a rule's P(follows): its deviation if one response in 100 violates the rule. Without it, the rule
model's noise on a rule with little variation would become arbitrarily large scores."""


@dataclass(kw_only=True)
class RuleTermSettings(RuleModelSettings):
    """Rule model and the weight of its verdicts."""

    weight: float = option(
        1.0, "Weight of the mean P(follows) over rules relative to the preference reward, both normalized (Sparrow).", ge=0
    )


@dataclass
class RunningMoments:
    """Count, mean and sum of squared deviations of all numbers so far (Chan, Golub and LeVeque 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Biased standard deviation, or 1 if all numbers are equal, because it is a divisor."""
        return math.sqrt(self.squares / self.count) if self.squares > 0 else 1.0

    def add(self, values: Tensor) -> None:
        """Add numbers to the statistics."""
        values = values.double()
        mean, added = float(values.mean()), values.numel()
        shift, total = mean - self.mean, self.count + added
        self.squares += float(((values - mean) ** 2).sum()) + shift**2 * self.count * added / total
        self.mean += shift * added / total
        self.count = total


class RuleRewards(Extension):
    """Combines a rule model's violation probabilities with the preference reward."""

    gives_scores = True

    def __init__(self, settings: RuleTermSettings) -> None:
        self.settings, self.card = settings, {"rule model": settings.model}
        self.texts = rules_of_model(settings.model, settings.rules)
        self.moments = {name: RunningMoments() for name in (PREFERENCE, *self.texts)}
        self.first: dict[str, tuple[float, float]] = {}
        """Mean and standard deviation of each part in the first evaluation, the scale of all evaluations."""

    def load(self, context: TrainingContext) -> None:
        self.context = context
        self.source = load_source(self.settings.model, context.policy, context.run.model_config.dtype, RULE_ADAPTER, RULE)
        self.adapters = [self.source.adapter_on_policy] if self.source.adapter_on_policy else []
        self.modules = [self.source.loaded.model] if self.source.loaded else []

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        policy, prompts, length = self.context.policy, self.context.prompts, self.context.max_new_tokens
        scorer = make_scorer(self.source, self.context.run, policy, roles, prompts, length)
        self.scorer = RuleScorer(scorer, self.texts, scorer.tokenization or policy.tokenization)
        require_readable(self.source.name, scorer, prompts, length, policy, max(self.scorer.lengths))

    def _violations_of(self, rollout: Rollout) -> dict[str, Tensor]:
        """Return the probability that each response violates each rule [B]."""
        return dict(zip(self.texts, self.scorer(rollout.sampled_responses), strict=True))

    def shape(self, signal: TrainingSignal, rollout: Rollout, old: RoleOutputs) -> TrainingSignal:
        self.violations = self._violations_of(rollout)
        components = signal.components | {f"rule/{rule}": broken for rule, broken in self.violations.items()}
        return replace(signal, scores=self.training_scores(signal.scores, self.violations), components=components)

    def flops(self, lengths: Sequence[tuple[int, Sequence[int]]]) -> float:
        profile, rules = self.scorer.scorer.flops_profile, self.scorer.lengths
        if profile is None:
            return 0.0
        return sum(forward_flops(profile, prompt + length, rules) for prompt, responses in lengths for length in responses)

    def evaluate(self, evaluation: PolicyEvaluation) -> None:
        violations, preference = self._violations_of(evaluation.rollout), evaluation.scores
        evaluation.scores = self.comparable_scores(preference, violations)
        preference = evaluation.missing_eos.apply(preference, evaluation.rollout.ended_mask)
        evaluation.metrics["preference"] = float(preference.mean())
        evaluation.metrics |= {f"rule/{rule}": float(broken.mean()) for rule, broken in violations.items()}

    def training_scores(self, preference: Tensor, violations: Violations) -> Tensor:
        """Return training scores [B], after adding the parts to the running statistics."""
        parts = _parts(preference, violations)
        for name, values in parts.items():
            self.moments[name].add(values)
        scales = {name: _scale(name, moments) for name, moments in self.moments.items()}
        return self._weighted(parts, scales)

    def comparable_scores(self, preference: Tensor, violations: Violations) -> Tensor:
        """Return scores [B] standardized by the statistics of the first evaluation."""
        parts = _parts(preference, violations)
        if not self.first:
            for name, values in parts.items():
                moments = RunningMoments()
                moments.add(values)
                self.first[name] = _scale(name, moments)
        return self._weighted(parts, self.first)

    def _weighted(self, parts: Mapping[str, Tensor], scales: Mapping[str, tuple[float, float]]) -> Tensor:
        rules = torch.stack([_scaled(parts, scales, rule) for rule in self.texts]).mean(0)
        return _scaled(parts, scales, PREFERENCE) + self.settings.weight * rules

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics of training and of the first evaluation."""
        moments = {name: asdict(moments) for name, moments in self.moments.items()}
        return {"moments": moments, "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. Raise a UserError if it belongs to other rules."""
        if state["moments"].keys() != self.moments.keys():
            before = ", ".join(name for name in state["moments"] if name != PREFERENCE) or "none"
            raise UserError(f"the checkpoint was saved with the rules {before}; resume with the same rules")
        self.moments = {name: RunningMoments(**stored) for name, stored in state["moments"].items()}
        self.first = {name: (mean, std) for name, (mean, std) in state["first"].items()}


def _parts(preference: Tensor, violations: Violations) -> dict[str, Tensor]:
    """Return the preference, and P(follows) of each rule."""
    return {PREFERENCE: preference} | {rule: 1 - broken for rule, broken in violations.items()}


def _scale(name: str, moments: RunningMoments) -> tuple[float, float]:
    if name == PREFERENCE:
        return moments.mean, moments.std
    return moments.mean, max(LEAST_DEVIATION, moments.std if moments.squares else 0.0)


def _scaled(parts: Mapping[str, Tensor], scales: Mapping[str, tuple[float, float]], name: str) -> Tensor:
    mean, std = scales[name]
    return (parts[name] - mean) / std
