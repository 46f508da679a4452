"""Evaluation on fixed prompts during PPO: scores, the choice of the best policy, and warnings."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

import torch
from torch import Tensor

from align.models.backbone import Backbone
from align.models.roles import Roles
from align.ppo.config import PPOConfig
from align.ppo.experience import compute_role_outputs
from align.ppo.metrics import DriftWatch, OveroptimizationWatch, text_metrics
from align.ppo.rewards import Rewards
from align.ppo.rollout import Rollout, save_if_scoring_fails
from align.ppo.rule_terms import LARGEST_MULTIPLIER, RuleTerms
from align.ppo.scores import ScoreShaping
from align.training.run import Run

Save = Callable[[Path, dict[str, float]], None]
"""Saves the policy as it is now to a folder, with the metrics that belong to it."""


@dataclass(frozen=True)
class Candidate:
    """The evaluation of a policy."""

    update: int
    """0: the starting model."""
    scores: list[float]
    """Of its responses to the fixed prompts [N]."""
    within_budgets: bool = True
    """Whether it keeps all `rule_budgets`; True without any."""


def replaces(candidate: Candidate, kept: Candidate | None, confidence: float = 0.0, evaluations: int = 1) -> bool:
    """Whether a policy replaces the one kept so far, by budgets first, then by scores; arguments as `is_new_best`."""
    if kept is None or candidate.within_budgets == kept.within_budgets:
        return is_new_best(candidate.scores, kept.scores if kept else None, confidence, evaluations)
    return candidate.within_budgets and math.isfinite(fmean(candidate.scores))


def is_new_best(
    scores: Sequence[float], kept: Sequence[float] | None, confidence: float = 0.0, evaluations: int = 1
) -> bool:
    """Whether the policy of an evaluation replaces the one kept so far.

    The test is paired, because both answered the same prompts. Its level is divided by the number of evaluations
    (Bonferroni): the best of many noisy means is often luck.

    Args:
        scores: of the policy's responses to the fixed prompts [N].
        kept: those of the policy kept so far [N], None for none; of equal means the first stays.
        confidence: that the mean is higher, by a one-sided paired test (normal approximation) which errs at most
            once in 1 / (1 - confidence) runs; 0: any higher mean will do.
        evaluations: of the whole run.
    """
    if kept is None:
        return math.isfinite(fmean(scores))
    differences = [new - old for new, old in zip(scores, kept, strict=True)]
    mean = fmean(differences)
    if not confidence or len(differences) < 2:
        return mean > 0
    quantile = NormalDist().inv_cdf(1 - (1 - confidence) / evaluations)
    return mean > quantile * stdev(differences) / math.sqrt(len(differences))


class PolicyEvaluation:
    """Evaluates the policy and keeps the best one.

    Args:
        rewards: the training signal.
        judge: rewards outside the training signal, which select the policy to keep; None: the rewards do.
        folder: where the best policy goes.
    """

    def __init__(
        self,
        run: Run,
        config: PPOConfig,
        backbone: Backbone,
        roles: Roles,
        rewards: Rewards,
        rules: RuleTerms,
        judge: Rewards | None,
        save: Save,
        folder: Path,
    ) -> None:
        self.run, self.config, self.backbone, self.roles = run, config, backbone, roles
        self.rewards, self.rules, self.judge, self.save, self.folder = rewards, rules, judge, save, folder
        self.shaping = ScoreShaping(config)
        self.start: Candidate | None = None
        self.kept: Candidate | None = None
        self.evaluations = len(range(0, config.updates, config.evaluate_every)) + 1
        self.drift, self.overoptimization = DriftWatch(), OveroptimizationWatch(config.judge_patience)

    @property
    def should_stop(self) -> bool:
        """Whether the reward is being exploited: it rises while the judge's score falls."""
        return self.overoptimization.reached

    @torch.no_grad()
    def __call__(self, update: int, rollout: Rollout) -> dict[str, float]:
        """Score responses to the fixed prompts, which were sampled with fixed noise; keep the policy if it is the best."""
        with save_if_scoring_fails(self.run, rollout, update):
            preference, violations = self.rewards(rollout)[0], self.rules.violations(rollout)
        excess = self.rules.excess(violations)
        scores = self.shaping.apply_eos_rule(self.rules.score_to_compare(preference, violations), rollout)
        scores = scores - LARGEST_MULTIPLIER * excess  # the rule for a missing EOS must not replace it
        metrics = _mean_and_error("reward", scores) | self._kl(rollout) | text_metrics(rollout)
        if violations:
            metrics["preference"] = float(self.shaping.apply_eos_rule(preference, rollout).mean())
            metrics |= {f"rule/{rule}": float(broken.mean()) for rule, broken in violations.items()}
        judged = self.judge(rollout)[0] if self.judge else None
        if judged is not None:
            metrics |= _mean_and_error("judge", judged)
        for warning in self.drift.check(metrics):
            self.run.say(f"warning: reward rose, but {warning}: read the samples before trusting it")
        self.run.say(self.overoptimization.check(update, metrics))
        self.run.record("samples", _sample_rows(rollout, scores, judged), update)
        candidate = Candidate(update, (scores if judged is None else judged).tolist(), within_budgets=excess == 0)
        if metrics["kl"] <= self.config.max_kl and self._keep_if_best(candidate, metrics | {"update": update}):
            metrics["kept"] = 1.0
        if update and self.config.keep_policies:
            self.save(self.run.folder / "policies" / f"update-{update:06d}", metrics | {"update": update})
        return {f"validation/{name}": value for name, value in metrics.items()}

    def _keep_if_best(self, candidate: Candidate, metrics: dict[str, float]) -> bool:
        """Save the policy if it replaces the one kept so far; returns whether it did.

        With a test (`keep_confidence`), the starting model is kept first; without one, the best of the trained policies.
        """
        confidence = self.config.keep_confidence
        if candidate.update == 0:
            self.start = candidate
        if candidate.update <= self.config.critic_warmup and not (confidence and candidate.update == 0):
            return False
        if not replaces(candidate, self.kept, confidence, self.evaluations):
            return False
        self.kept = candidate
        self.save(self.folder, metrics)
        return True

    def warning(self) -> str:
        """A warning if the kept policy is not better than the starting model or over its budgets; else ""."""
        start, kept = self.start, self.kept
        if start is None or kept is None:
            return ""
        over = "" if kept.within_budgets else "; it is over the rule budgets, as every policy that was evaluated"
        if kept.update == 0:
            level = f"keep_confidence {self.config.keep_confidence:g}"
            return f"warning: no policy was better than the starting model at {level}: that is what was kept{over}"
        if replaces(kept, start):
            return f"warning: the policy of update {kept.update} was kept{over}" if over else ""
        by = "reward" if self.judge is None else "judge's score"
        means = f"{fmean(kept.scores):.3g}, that of the starting model {fmean(start.scores):.3g}"
        what = f"the kept policy, of update {kept.update}, is no better than the starting model"
        return f"warning: {what}: its {by} is {means}{over}"

    def _kl(self, rollout: Rollout) -> dict[str, float]:
        """KL to the starting model, per response and per token."""
        rows = [list(range(len(rollout)))]
        outputs = compute_role_outputs(self.config, rollout, rows, self.backbone, self.roles, self.run.accelerator)
        total = (outputs.log_probs - (outputs.reference if outputs.start is None else outputs.start)).sum()
        return {"kl": float(total / len(rollout)), "kl_per_token": float(total / rollout.lengths.sum())}

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        candidates = {name: found and asdict(found) for name, found in (("kept", self.kept), ("start", self.start))}
        return {**candidates, "drift": self.drift.state_dict(), "overoptimization": self.overoptimization.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.kept, self.start = (Candidate(**found) if found else None for found in (state["kept"], state["start"]))
        self.drift.load_state_dict(state["drift"])
        self.overoptimization.load_state_dict(state["overoptimization"])


def _mean_and_error(name: str, values: Tensor) -> dict[str, float]:
    """The mean of some values [B] and its standard error."""
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {name: float(values.mean()), f"{name}_error": error}


def _sample_rows(rollout: Rollout, scores: Tensor, judged: Tensor | None) -> list[dict[str, Any]]:
    """The rows of samples.jsonl."""
    rows: list[dict[str, Any]] = [
        {
            "prompt": list(prompt.conversation),
            "response": text,
            "reward": float(score),
            "ended": ended,
            "category": prompt.category,
        }
        for prompt, text, score, ended in zip(rollout.prompts, rollout.texts, scores, rollout.ended, strict=True)
    ]
    for row, score in zip(rows, judged if judged is not None else [], strict=False):
        row["judge"] = float(score)
    return rows
