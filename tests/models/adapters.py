"""What the tests of adapters share: a prompt with a response, states, and which weights belong to whom."""

import torch

from align.core.tensor_ops import Padded

PROMPTS, RESPONSES = [[9, 10, 11], [12]], [[20, 21, 1], [22, 23, 24, 25, 1]]
PROMPT, RESPONSE = Padded.from_lists(PROMPTS), Padded.from_lists(RESPONSES)
CARD = {"title": "A model", "stage": "sft"}


@torch.no_grad()
def states(backbone, adapter=None):
    with backbone.adapter(adapter):
        return backbone.hidden(PROMPT, RESPONSE)


def trainable(backbone):
    return {name for name, weight in backbone.model.named_parameters() if weight.requires_grad}


def adapter_weights(backbone, adapter):
    return {name: weight for name, weight in backbone.model.named_parameters() if f".{adapter}." in name}
