"""What the tests of adapters share: a prompt with a response, states, which weights belong to whom, and reward models."""

import torch

from align.core.tensor_ops import Padded
from align.models.checkpoint import weights_of
from align.models.heads import RewardModel, ScalarHead
from align.reward.checkpoint import save_reward_model

PROMPTS, RESPONSES = [[9, 10, 11], [12]], [[20, 21, 1], [22, 23, 24, 25, 1]]
PROMPT, RESPONSE = Padded.from_lists(PROMPTS), Padded.from_lists(RESPONSES)
IDS = torch.tensor([[9, 10, 11, 20, 21]])
CARD = {"title": "A model", "stage": "sft"}


@torch.no_grad()
def states(backbone, adapter=None):
    with backbone.adapter(adapter):
        return backbone.hidden(PROMPT, RESPONSE)


@torch.no_grad()
def logits_of(loaded):
    """[2, T+1, V] for `RESPONSE`."""
    with loaded.backbone.adapter(loaded.adapter):
        return loaded.backbone.logits(loaded.backbone.hidden(PROMPT, RESPONSE))


def response_logits(backbone, adapter=None):
    """[3, V]: of the tokens of `IDS` after the first three, and of the one after them."""
    with torch.no_grad(), backbone.adapter(adapter):
        hidden = backbone.hidden(Padded.from_lists([IDS[0, :3].tolist()]), Padded.from_lists([IDS[0, 3:].tolist()]))
        return backbone.logits(hidden)[0]


def trainable(backbone):
    return {name for name, weight in backbone.model.named_parameters() if weight.requires_grad}


def adapter_weights(backbone, adapter):
    return {name: weight for name, weight in backbone.model.named_parameters() if f".{adapter}." in name}


def save_reward(folder, loaded, mean=0.0, seed=6, head=None, **more):
    """Save a loaded model with a random head as a reward model, which is returned."""
    torch.manual_seed(seed)
    model = RewardModel(loaded.backbone, head or ScalarHead(loaded.backbone.hidden_size, bias=False), loaded.adapter)
    state = model.state_dict()  # of a larger module, as an engine hands it over
    weights, metadata = (
        weights_of(loaded.backbone, state),
        {"mean": mean, "mean_over": 4, "base": loaded.base},
    )
    save_reward_model(folder, loaded, weights, state["head.linear.weight"], metadata, CARD | {"stage": "reward"}, **more)
    return model
