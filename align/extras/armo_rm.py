"""The published reward model ArmoRM: a Llama with an attribute head and a prompt-dependent gating network.

Source: Wang et al. 2024, arXiv 2406.12845, and `modeling_custom.py` of RLHFlow/ArmoRM-Llama3-8B-v0.1. This file replaces
that class, because no code from a model's folder is executed.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaModel, LlamaPreTrainedModel, PreTrainedConfig

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.data.conversation import user_turn
from align.models.backbone import Backbone
from align.models.heads import Float32Linear
from align.tokenization import Tokenization


class GatingNetwork(nn.Module):
    """Computes attribute weights from the prompt's hidden state. Names and sizes match the published code."""

    def __init__(self, config: PreTrainedConfig, attributes: int) -> None:
        super().__init__()
        inner = [getattr(config, "gating_hidden_dim", 1024)] * getattr(config, "gating_n_hidden", 3)
        widths = [config.hidden_size, *inner, attributes]
        self.temperature = float(getattr(config, "gating_temperature", 10))
        self.logit_scale = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList(Float32Linear(*pair) for pair in zip(widths, widths[1:], strict=False))

    def forward(self, states: Tensor) -> Tensor:
        """[B, H] -> [B, n] float32."""
        for layer in self.layers[:-1]:
            states = torch.relu(layer(states))
        return torch.softmax(self.layers[-1](states) / self.temperature, -1) * self.logit_scale.float()


class GatedLlama(LlamaPreTrainedModel):
    """The published model. `rewards` is its head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        attributes = getattr(config, "num_objectives", 19)
        self.model = LlamaModel(config)
        self.regression_layer = Float32Linear(config.hidden_size, attributes, bias=False)
        self.reward_transform_matrix = nn.Parameter(torch.eye(attributes))
        self.gating = GatingNetwork(config, attributes)
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **settings: Any) -> "GatedLlama":
        """Create a model without trained weights, as transformers' auto classes do."""
        model: GatedLlama = cls._from_config(config, **settings)  # type: ignore[no-untyped-call]
        return model

    @staticmethod
    def reward_model(backbone: Backbone, tokenization: Tokenization, name: str) -> "GatedRewardModel":
        """Return the reward model around a loaded `GatedLlama`. Raise a UserError if its template opens no answer."""
        prompt = user_turn("Hi")
        asking = tokenization.chat.template_ids(tokenization.chat.render(prompt, generation_prompt=False))
        opening = tokenization.chat.template_ids(tokenization.chat.render(prompt))[len(asking) :]
        if not opening:
            raise UserError(f"{name}: its chat template has no generation prompt, which the gating layer needs")
        return GatedRewardModel(backbone, opening)

    def rewards(self, prompt: Tensor, response: Tensor) -> Tensor:
        """Return rewards [B] in float32 from the hidden states [B, H] at the end of the prompt and of the response."""
        attributes: Tensor = self.regression_layer(response) @ self.reward_transform_matrix.float()
        weights: Tensor = self.gating(prompt)
        return (weights * attributes).sum(-1)


class GatedRewardModel(nn.Module):
    """A backbone whose attributes at the end of a response are weighted by the prompt.

    The gate's input is the state of the token before `opening`, with which the template opens an answer.
    """

    def __init__(self, backbone: Backbone, opening: list[int]) -> None:
        super().__init__()
        self.backbone, self.opening = backbone, opening

    def forward(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        """Return rewards [B] of B responses to P prompts. `prompt_of_response` [B] maps responses to prompts."""
        prompts = prompt.tolists()
        ends = [last_place(ids, self.opening) for ids in prompts]
        owner = range(len(prompts)) if prompt_of_response is None else prompt_of_response.tolist()
        read = [ids[:end] for ids, end in zip(prompts, ends, strict=True)]
        written = [[*prompts[n][ends[n] :], *ids] for n, ids in zip(owner, response.tolists(), strict=True)]
        device = prompt.ids.device
        prompt, response = Padded.from_lists(read).to(device), Padded.from_lists(written).to(device)
        hidden = self.backbone.hidden(prompt, response, prompt_of_response)
        rows = torch.arange(len(written), device=device)
        return cast(GatedLlama, self.backbone.model).rewards(hidden[:, 0], hidden[rows, response.lengths])


def last_place(ids: list[int], part: list[int]) -> int:
    """Return the last index of `part` in `ids`, ignoring its last token, which may merge with the following text.

    Raises:
        UserError: if `part` is missing, or nothing precedes it.
    """
    part = part[:-1] or part
    for place in range(len(ids) - len(part), 0, -1):
        if ids[place : place + len(part)] == part:
            return place
    raise UserError("the reward model's prompt was truncated or does not end with the chat template's generation prompt")
