"""Reward models in the form of the published ArmoRM: a Llama with a layer of attributes, and a gate that weighs them.

Source: Wang et al. 2024, arXiv 2406.12845, and `modeling_custom.py` of RLHFlow/ArmoRM-Llama3-8B-v0.1. Its class comes with
its weights; no code of a model's folder is run, so the class is written here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import LlamaModel, LlamaPreTrainedModel, PreTrainedConfig

GATED = "LlamaForRewardModelWithGating"
"""The name of the class in the `architectures` of a config."""


def is_gated(config: PreTrainedConfig) -> bool:
    """Whether a config is of such a reward model."""
    return config.model_type == "llama" and GATED in (config.architectures or [])


def _in_float32(layer: nn.Module, states: Tensor) -> Tensor:
    """What a linear layer makes of states, computed in float32 whatever both are in."""
    assert isinstance(layer, nn.Linear)
    return linear(states.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())


class GatingNetwork(nn.Module):
    """From a prompt's state to the weights of attributes; names and sizes are those of the published code.

    Args:
        config: has its size and its temperature.
        attributes: number of attributes that are weighed.
    """

    def __init__(self, config: PreTrainedConfig, attributes: int) -> None:
        super().__init__()
        inner = [getattr(config, "gating_hidden_dim", 1024)] * getattr(config, "gating_n_hidden", 3)
        widths = [config.hidden_size, *inner, attributes]
        self.temperature = float(getattr(config, "gating_temperature", 10))
        self.logit_scale = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in zip(widths, widths[1:], strict=False))

    def forward(self, states: Tensor) -> Tensor:
        """[R, H] -> [R, n] float32."""
        for layer in self.layers[:-1]:
            states = torch.relu(_in_float32(layer, states))
        return torch.softmax(_in_float32(self.layers[-1], states) / self.temperature, -1) * self.logit_scale.float()


class GatedLlama(LlamaPreTrainedModel):
    """The published model; `rewards` is its head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        attributes = getattr(config, "num_objectives", 19)
        self.model = LlamaModel(config)
        self.regression_layer = nn.Linear(config.hidden_size, attributes, bias=False)
        self.reward_transform_matrix = nn.Parameter(torch.eye(attributes))
        self.gating = GatingNetwork(config, attributes)
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **settings: Any) -> "GatedLlama":
        """A model without trained weights, as transformers' auto classes make one."""
        model: GatedLlama = cls._from_config(config, **settings)  # type: ignore[no-untyped-call]
        return model

    def rewards(self, prompt: Tensor, response: Tensor) -> Tensor:
        """Rewards [R] in float32.

        Args:
            prompt: [R, H] states of the last token of the prompt's last message.
            response: [R, H] states of the last token.
        """
        attributes = _in_float32(self.regression_layer, response) @ self.reward_transform_matrix.float()
        weights: Tensor = self.gating(prompt)
        return (weights * attributes).sum(-1)
