"""What the roles of an actor-critic compute for a prompt and its response."""

import pytest
import torch

from align.core.tensor_ops import Padded
from align.models.roles import ActorCriticOutput, Role

PROMPT, RESPONSE = Padded.from_lists([[9, 10, 11], [12]]), Padded.from_lists([[20, 21], [22, 23, 24, 25]])


def test_an_actor_critic_says_values_before_tokens_and_entropy_only_without_gradients(tiny_name, load_sharp, make_ppo):
    trainer = make_ppo(load_sharp(tiny_name))
    module, backbone = trainer.engine.module, trainer.loaded.backbone
    torch.nn.init.normal_(module.value_head.linear.weight)
    with torch.no_grad():
        prediction: ActorCriticOutput = module(Role.POLICY, PROMPT, RESPONSE, 0.7)
        hidden = backbone.hidden(PROMPT, RESPONSE)
        values = module.value_head(hidden[:, :-1])
        logits = backbone.logits(hidden[1, 2]) / 0.7
        entropy = -(torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum()
    torch.testing.assert_close(prediction.values, values * RESPONSE.mask(), atol=1e-6, rtol=0)
    assert float(prediction.entropy[1, 2]) == pytest.approx(float(entropy), abs=1e-5)
    assert prediction.entropy[0, 2:].tolist() == prediction.values[0, 2:].tolist() == [0.0, 0.0]
    assert module(Role.POLICY, PROMPT, RESPONSE).entropy.abs().max() == 0.0
