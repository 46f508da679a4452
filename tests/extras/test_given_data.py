"""Validation data in memory may be an array, which has no truth value, in each trainer of the extras."""

import numpy
import pytest

from align.extras.attributes import AttributeConfig, AttributeTrainer
from align.extras.distill import DistillConfig, DistillTrainer
from align.extras.rules import RuleConfig, RuleTrainer
from tests.extras.rules.planted import RULES

TRAINERS = {
    "rules": (RuleTrainer, RuleConfig, {"rules": RULES}, {"response": "b", "rule": "no-digits", "verdict": "follows"}),
    "attributes": (AttributeTrainer, AttributeConfig, {}, {"response": "b", "attributes": {"kind": 1}}),
    "distill": (DistillTrainer, DistillConfig, {}, {"completion": "b"}),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_validation_data_may_be_an_array(name, tmp_path):
    trainer, config, settings, row = TRAINERS[name]
    rows = [row | {"prompt": str(number)} for number in range(4)]
    settings = config(output_dir=str(tmp_path), report_to=["none"], dtype="float32", **settings)
    assert len(trainer("tiny-gpt2", rows, settings, validation_data=numpy.array(rows[:2])).held_out) == 2
