"""Gradients of micro-batches and of several losses add up to those of the whole; what is no number updates nothing."""

import math
from itertools import pairwise

import pytest
import torch

from align.batches.micro_batches import MicroBatch
from align.training.engine import NotFiniteError, TrainEngine
from tests.training.toy_modules import Weights, accumulate, regression, step, vector


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("sizes", [[1] * 12, [5, 5, 2], [3, 9]])
def test_micro_batches_change_no_gradient_and_no_metric(toy_run, dtype, tolerance, sizes):
    found = []
    for name, cut in (("whole", [12]), ("cut", sizes)):
        module, loss = regression(dtype)
        engine = TrainEngine(toy_run(name), module, 10)
        bounds = [sum(cut[:i]) for i in range(len(cut) + 1)]
        plan = [MicroBatch(list(range(a, b)), 1.0) for a, b in pairwise(bounds)]
        if name == "cut":
            plan.append(MicroBatch([0], 0.0))  # a filler, which must not count
        sums = accumulate(engine, plan, loss)
        gradients = [master.grad.clone() for master in engine.masters.values()]
        found.append((sums, gradients, engine.step(1)["grad_norm"]))
    (one, gradients_one, norm_one), (two, gradients_two, norm_two) = found
    assert float(one["rows"]) == float(two["rows"]) == 12.0
    assert float(one["loss"]) == pytest.approx(float(two["loss"]), rel=max(tolerance, 1e-6))
    assert norm_one == pytest.approx(norm_two, rel=tolerance)
    for left, right in zip(gradients_one, gradients_two, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def test_two_losses_add_up_before_one_step(toy_run):
    engine = TrainEngine(toy_run(adam_epsilon=1.0), Weights(vector(0.0)), 10)
    weight = engine.module.w[0]
    first = accumulate(engine, [MicroBatch([0], 1.0)], lambda rows: (2 * weight.sum() + 5, {}))
    second = accumulate(engine, [MicroBatch([0], 1.0)], lambda rows: (weight.sum() + 7, {}))
    assert (float(first["loss"]), float(second["loss"])) == (5.0, 7.0)
    assert engine.step(1)["grad_norm"] == 3.0
    assert weight.item() == pytest.approx(-0.1 * 3 / 4, abs=1e-7)
    assert step(engine, vector(1.0), update=2)["grad_norm"] == 1.0, "gradients start from nothing again"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_updates_nothing(toy_run, dtype, bad):
    engine = TrainEngine(toy_run(), Weights(vector(1.0, dtype=dtype)), 10)
    losses = [vector(1.0), vector(bad)]
    plan = [MicroBatch([0], 1.0), MicroBatch([1], 1.0)]
    with pytest.raises(NotFiniteError, match="loss is not a finite number"):
        accumulate(engine, plan, lambda rows: (engine.module.w[0].float().sum() * losses[rows[0]].sum(), {}))
    assert engine.module.w[0].item() == engine.masters["w.0"].item() == 1.0


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_gradient_that_is_no_number_updates_nothing(toy_run, limit):
    engine = TrainEngine(toy_run(max_grad_norm=limit), Weights(vector(0.0), vector(1.0)), 10)

    def loss(_):  # the loss is sqrt(0) = 0, its slope there is infinite
        return engine.module.w[0].sqrt().sum() + engine.module.w[1].sum(), {}

    accumulate(engine, [MicroBatch([0], 1.0)], loss)
    with pytest.raises(NotFiniteError, match="gradient is not a finite number"):
        engine.step(1)
    assert [weight.item() for weight in engine.module.w] == [0.0, 1.0]
