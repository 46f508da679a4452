"""How well a rule model agrees with people on held-out judgments. Plain Python and numpy; nothing here touches a model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from align.core.statistics import calibration_error, roc_auc

TINY = 1e-12


@dataclass(frozen=True)
class ScoredJudgment:
    """The verdicts of a model and of people on one response under one rule.

    Attributes:
        rule: its id.
        probability: that the response violates the rule, by the model.
        target: the share of labelers who saw it violated.
    """

    rule: str
    probability: float
    target: float


def rule_metrics(scored: Sequence[ScoredJudgment]) -> dict[str, float]:
    """All metrics of a rule model; docs/metrics.md defines each.

    AUC and balanced accuracy need responses of both kinds, and are left out for a rule that has only one. A target of
    exactly one half is neither kind.
    """
    by_rule: dict[str, list[ScoredJudgment]] = {}
    for item in scored:
        by_rule.setdefault(item.rule, []).append(item)
    per_rule = {rule: _figures(items) for rule, items in sorted(by_rule.items())}
    metrics = _figures(scored)
    for name in ("auc", "balanced_accuracy", "calibration_error"):
        known = [figures[name] for figures in per_rule.values() if name in figures]
        if known:  # a mean over rules, which count alike, however often each was judged
            metrics[name] = sum(known) / len(known)
        else:
            metrics.pop(name, None)
    for rule, figures in per_rule.items():
        metrics |= {f"rule/{rule}/{name}": value for name, value in figures.items()}
    return metrics


def _figures(items: Sequence[ScoredJudgment]) -> dict[str, float]:
    predicted = np.array([item.probability for item in items])
    target = np.array([item.target for item in items])
    clipped = predicted.clip(TINY, 1 - TINY)
    figures = {
        "loss": float(-(target * np.log(clipped) + (1 - target) * np.log1p(-clipped)).mean()),
        "judgments": float(len(items)),
        "violated": float(target.mean()),
        "calibration_error": calibration_error(predicted, target),
    }
    decided = target != 0.5
    violated, predicts_violation = target[decided] > 0.5, predicted[decided] > 0.5
    if violated.any() and not violated.all():
        figures["auc"] = roc_auc(predicted[decided], violated)
        figures["balanced_accuracy"] = float(
            (predicts_violation[violated].mean() + (~predicts_violation[~violated]).mean()) / 2
        )
    return figures
