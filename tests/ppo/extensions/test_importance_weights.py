import dataclasses
import math

import pytest
import torch

from align.core.errors import UserError
from align.ppo.config import PPOConfig
from align.ppo.extensions.importance_weights import importance_weights
from align.ppo.metrics import engine_metrics
from tests.models.losses import experience_of, minibatch_loss, role_outputs


def test_weights_by_hand() -> None:
    engine = torch.tensor([math.log(0.2), math.log(0.4), math.log(0.1), -700.0])
    policy = torch.tensor([math.log(0.3), math.log(0.1), math.log(0.5), 0.0])
    # 0.3 / 0.2, 0.1 / 0.4, and 0.5 / 0.1 and more are cut to 2.
    torch.testing.assert_close(importance_weights(policy, engine, 2.0), torch.tensor([1.5, 0.25, 2.0, 2.0]))
    torch.testing.assert_close(importance_weights(policy, policy, 1.0), torch.ones(4))


@pytest.fixture
def found(make_ppo, load_sharp, hand_rollout):
    """A trainer, and a rollout that an engine sampled which finds each token e^0.5 or e^-1 times as likely, in turn."""
    trainer = make_ppo(load_sharp("tiny-llama"), engine="vllm-server", vllm={"importance_cap": 2.0})
    roles = role_outputs(trainer, hand_rollout)
    offset = torch.tensor([0.5, -1.0]).repeat(5)[: roles.log_probs.shape[1]]
    rows = zip(roles.log_probs + offset, hand_rollout.responses, strict=True)
    return trainer, dataclasses.replace(hand_rollout, log_probs=[row[: len(ids)].tolist() for row, ids in rows]), roles


def test_the_loss_and_its_gradient_by_hand(found) -> None:
    trainer, rollout, roles = found
    scores = torch.tensor([1.0, -0.5, 0.3, 0.0, 2.0, -1.0])
    experience = experience_of(trainer, rollout, scores, roles)
    weights = torch.tensor([math.exp(-0.5), 2.0]).repeat(5)[: experience.mask.shape[1]]  # e^1 is cut to 2
    torch.testing.assert_close(experience.signal.token_weights[experience.mask], weights.expand(6, -1)[experience.mask])
    figures = engine_metrics(experience) | trainer.extensions["vllm.importance_cap"].metrics()
    even, odd = int(experience.mask[:, 0::2].sum()), int(experience.mask[:, 1::2].sum())
    assert figures["sampling/importance_clipfrac"] == pytest.approx(odd / (even + odd))
    assert figures["sampling/importance_weight"] == pytest.approx((even * math.exp(-0.5) + odd * 2) / (even + odd), rel=1e-5)
    # r - 1 - log r, r = e^-0.5 or e^1: more than a run without weights accepts.
    k3 = (even * (math.exp(-0.5) - 0.5) + odd * (math.e - 2)) / (even + odd)
    assert figures["sampling/engine_kl"] == pytest.approx(k3, rel=1e-4)

    _, sums = minibatch_loss(trainer, experience, list(range(6)))(list(range(6)))
    expected = -(weights * experience.advantages)[experience.mask].mean()  # the ratio is 1
    assert float(sums["loss/policy"]) == pytest.approx(float(expected), abs=1e-5)
    plain = dataclasses.replace(experience, signal=dataclasses.replace(experience.signal, token_weights=None))
    _, without = minibatch_loss(trainer, plain, list(range(6)))(list(range(6)))
    assert abs(float(without["loss/policy"]) - float(expected)) > 0.01
    assert float(without["loss/value"]) == float(sums["loss/value"]), "values have no weights"


def test_without_weights_a_mismatch_stops_the_run(found) -> None:
    trainer, rollout, roles = found
    trainer.extensions.pop("vllm.importance_cap")
    experience = experience_of(trainer, rollout, torch.zeros(6), roles)
    assert experience.signal.token_weights is None
    with pytest.raises(UserError, match=r"samples from a different distribution .* vllm.importance_cap 2 corrects for it"):
        engine_metrics(experience)
    own = experience_of(trainer, dataclasses.replace(rollout, log_probs=None), torch.zeros(6), roles)
    assert engine_metrics(own) == {}


@pytest.mark.parametrize(("cap", "engine"), [(0.5, "vllm-server"), (-1.0, "vllm-server"), (2.0, "transformers")])
def test_settings_that_cannot_be_meant(cap: float, engine: str) -> None:
    with pytest.raises(UserError, match=r"^vllm\.importance_cap "):
        PPOConfig(vllm={"importance_cap": cap}, engine=engine)
