"""The loss and the metrics of a rule model, by hand."""

import math

import pytest
import torch

from align.rules.judgments import ScoredJudgment, rule_metrics
from align.rules.train import judgment_loss


def test_loss_of_two_labelers_who_disagree_by_hand():
    # p = sigmoid(1) = .7310586; half of -log p = .3132617 and half of -log(1 - p) = 1.3132617.
    logits = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    loss = judgment_loss(logits, torch.tensor([0.5]))
    assert loss.item() == pytest.approx(0.8132617, abs=1e-7)
    loss.backward()
    assert logits.grad.item() == pytest.approx(0.7310586 - 0.5, abs=1e-7)  # it pulls toward their share


def test_loss_of_several_rules_is_their_sum():
    logits, targets = torch.tensor([0.0, 2.0, -1.0]), torch.tensor([1.0, 1.0, 1 / 3])
    by_hand = math.log(2) + math.log1p(math.exp(-2)) + (math.log1p(math.exp(1)) / 3 + 2 * math.log1p(math.exp(-1)) / 3)
    assert judgment_loss(logits, targets).item() == pytest.approx(by_hand, abs=1e-6)


def test_far_away_logits_stay_finite():
    logits = torch.tensor([-1000.0, 1000.0], requires_grad=True)
    loss = judgment_loss(logits, torch.tensor([1.0, 0.0]))
    loss.backward()
    assert loss.item() == 2000.0
    assert logits.grad.tolist() == [-1.0, 1.0]


def test_metrics_by_hand():
    judged = {
        "a": [(0.9, 1.0), (0.6, 0.0), (0.4, 1.0), (0.1, 0.0)],
        "b": [(0.2, 0.0), (0.8, 0.5)],
        "c": [(0.7, 0.75)],
    }
    scored = [ScoredJudgment(rule, *pair) for rule, pairs in judged.items() for pair in pairs]
    metrics = rule_metrics(scored)
    # Rule a: violated ones at .9 and .4, others at .6 and .1: three of four pairs in order; one of two right on each side.
    assert metrics["rule/a/auc"] == 0.75
    assert metrics["rule/a/balanced_accuracy"] == 0.5
    # One in each bin: |.9 - 1| + |.6 - 0| + |.4 - 1| + |.1 - 0| over 4.
    assert metrics["rule/a/calibration_error"] == pytest.approx(0.35)
    assert metrics["rule/a/violated"] == 0.5
    # b has one decided response and c has no other kind: neither can be told apart.
    assert not {"rule/b/auc", "rule/c/auc", "rule/b/balanced_accuracy"} & metrics.keys()
    assert metrics["auc"] == 0.75
    errors = (0.35, (0.2 + 0.3) / 2, 0.05)
    assert metrics["calibration_error"] == pytest.approx(sum(errors) / 3)
    losses = [-t * math.log(p) - (1 - t) * math.log(1 - p) for pairs in judged.values() for p, t in pairs]
    assert metrics["loss"] == pytest.approx(sum(losses) / 7)
    assert metrics["judgments"] == 7


def test_a_certain_model_that_is_wrong_has_a_finite_loss():
    assert math.isfinite(rule_metrics([ScoredJudgment("a", 0.0, 1.0)])["loss"])
