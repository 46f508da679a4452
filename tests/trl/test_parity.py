"""An update has the numbers of TRL 1.12's trainer, which benchmarks/trl_parity.py stored.

TRL deviates in four places, and the settings or the comparison make up for them:
- it whitens advantages by the unbiased variance, and here it is the biased one: a factor of sqrt((N - 1) / N) for N tokens;
- it ignores max_grad_norm: the settings of the comparison switch clipping off;
- it puts the score of a response that ended one position after its last token, and trains a value there: the advantages and
  the value loss of the case `stop` differ;
- its `policy/approxkl_avg` is the estimator k2, and here it is k3.
"""

import json
import math

import pytest
import torch

from align.ppo.extensions import Extension
from align.sampling.generation import Responses
from align.trl import PPOConfig, PPOTrainer
from benchmarks.trl_parity import CASES, EOS, METRICS, PROMPTS, REFERENCE, numbers_of, response_to, trainer_of

STORED = json.loads(REFERENCE.read_text(encoding="utf-8"))


DEVIATING = {"stop": ["loss/value_avg"], "epochs": ["policy/approxkl_avg", "loss/policy_avg"]}
"""Metrics that differ by the deviations above. After one step of one epoch, the other cases' are 0 on both sides."""


def update_by_align(folder, case, **changes):
    """The numbers of an update by this library."""
    found = {}

    class Recorder(Extension):
        def after_update(self, update, experience):
            found["prompts"] = [list(prompt.ids) for prompt in experience.rollout.prompts]
            found["advantages"] = experience.advantages

    def fixed_responses(prompts, *_):
        written = [response_to(list(prompt), case) for prompt in prompts]
        return Responses(written, [response[-1] == EOS for response in written])

    trainer = trainer_of(PPOTrainer, PPOConfig, case, str(folder), **changes)
    trainer.setup.extensions.append(Recorder())
    trainer.setup.sampler.sample = fixed_responses
    trainer.train()
    return numbers_of(trainer, found["advantages"][[found["prompts"].index(prompt) for prompt in PROMPTS]])


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    return {case: update_by_align(tmp_path_factory.mktemp(case), case) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_metrics_of_an_update_are_those_of_trl(updates, case):
    found = updates[case]["metrics"]
    names = [name for name in METRICS if name not in DEVIATING.get(case, ())]
    expected = {name: STORED[case]["metrics"][name] for name in names}
    assert {name: found[name] for name in names} == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case != "stop"])
def test_advantages_and_weights_after_an_update_are_those_of_trl(updates, case):
    found, stored = updates[case], STORED[case]
    tokens = sum(map(len, CASES[case].responses))
    assert len(found["advantages"]) == len(PROMPTS)
    factor = math.sqrt((tokens - 1) / tokens)
    unbiased = torch.tensor(found["advantages"]) * factor
    loss = found["metrics"]["loss/policy_avg"] * factor
    assert loss == pytest.approx(stored["metrics"]["loss/policy_avg"], abs=1e-5)
    assert torch.allclose(unbiased, torch.tensor(stored["advantages"]), rtol=0, atol=1e-5)
    assert found["weights"].keys() == stored["weights"].keys()
    for name, weight in found["weights"].items():
        assert torch.allclose(torch.tensor(weight), torch.tensor(stored["weights"][name]), rtol=0, atol=1e-5), name


def test_the_comparison_notices_another_coefficient(tmp_path):
    found, stored = update_by_align(tmp_path, "full", kl_coef=0.2), STORED["full"]["metrics"]
    assert abs(found["metrics"]["loss/value_avg"] - stored["loss/value_avg"]) > 1e-3
    assert found["metrics"]["objective/kl"] == pytest.approx(stored["objective/kl"], abs=1e-5)
