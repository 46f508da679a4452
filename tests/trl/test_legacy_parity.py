"""Three steps have the numbers of TRL 0.11's trainer, which benchmarks/trl_legacy_parity.py stored.

Repairs of TRL are part of the stored numbers; `steps_by_trl` lists them.
"""

import json
import sys

import pytest
import torch

import align.trl.legacy
from align.trl.legacy.learner import Learner
from benchmarks.trl_legacy_parity import CASES, REFERENCE, orders, steps

STORED = json.loads(REFERENCE.read_text(encoding="utf-8"))
TOLERANCE = 1e-4


def steps_by_align(monkeypatch, case, **changes):
    order = orders()

    def minibatches(learner, rows, epoch):
        if sys._getframe(1).f_code.co_name == "forward":  # which reads the rows before the first epoch, in any order
            return [list(range(rows))]
        chosen, size = next(order), learner.config.global_backward_batch_size
        return [chosen[start : start + size] for start in range(0, rows, size)]

    monkeypatch.setattr(Learner, "minibatches", minibatches)
    return steps(align.trl.legacy, case, **changes)


@pytest.mark.parametrize("case", CASES)
def test_statistics_and_weights_of_three_steps_are_those_of_trl(monkeypatch, case):
    found, stored = steps_by_align(monkeypatch, case), STORED[case]
    for row, expected in zip(found["stats"], stored["stats"], strict=True):
        assert row == pytest.approx(expected, abs=TOLERANCE, rel=TOLERANCE)
    assert found["weights"].keys() == stored["weights"].keys()
    for name, weight in found["weights"].items():
        difference = (torch.tensor(weight) - torch.tensor(stored["weights"][name])).abs()
        if name.endswith("c_attn.bias"):  # the softmax cancels the key's bias: its gradient is rounding, which Adam enlarges
            difference = difference.view(3, -1)[[0, 2]]
        assert difference.max() <= TOLERANCE, name


@pytest.mark.parametrize("change", [{"init_kl_coef": 0.12}, {"vf_coef": 0.31}, {"lam": 0.94}, {"cliprange_value": 0.19}])
def test_the_comparison_notices_another_setting(monkeypatch, change):
    found, stored = steps_by_align(monkeypatch, "gpt2", **change)["stats"], STORED["gpt2"]["stats"]
    assert found[-1] != pytest.approx(stored[-1], abs=TOLERANCE, rel=TOLERANCE)
