"""A backbone in a single role: a language model, or a reward model with its scalar head."""

from typing import cast

import torch
from torch import Tensor, nn

from align.core.tensor_ops import Padded
from align.models.backbone import Backbone
from align.models.log_probs import response_log_probs


class Float32Linear(nn.Linear):
    """A linear map computed in float32, whatever its weights and its input are in."""

    def forward(self, input: Tensor) -> Tensor:
        """[.., H] -> [.., n] float32."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias)


class ScalarHead(nn.Module):
    """A linear map from a hidden state to one number, computed in float32.

    A reward head starts with standard deviation 1/sqrt(H+1) and bias 0 (lm-human-preferences, `policy.py`); a value head on
    a trunk that the policy shares starts at 0, because noise would reach the trunk.
    """

    def __init__(self, hidden_size: int, start_at_zero: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.linear = Float32Linear(hidden_size, 1, bias=bias)
        if start_at_zero:
            nn.init.zeros_(self.linear.weight)
        else:
            nn.init.normal_(self.linear.weight, std=(hidden_size + 1) ** -0.5)
        if bias:
            nn.init.zeros_(self.linear.bias)

    @classmethod
    def around(cls, linear: nn.Linear) -> "ScalarHead":
        """Return a head that shares the weights of a classifier's linear layer."""
        head = cls(linear.in_features, bias=linear.bias is not None)
        head.linear.weight, head.linear.bias = linear.weight, linear.bias
        return head

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., H] -> [..] float32."""
        numbers: Tensor = self.linear(hidden)
        return numbers.squeeze(-1)


class LanguageModel(nn.Module):
    """A backbone that predicts responses: the model of SFT, and PPO's frozen reference.

    Args:
        adapter: the adapter to compute with; None: the bare backbone.
    """

    def __init__(self, backbone: Backbone, adapter: str | None = None) -> None:
        super().__init__()
        self.backbone, self.adapter_name = backbone, adapter

    def forward(
        self,
        prompt: Padded,
        response: Padded,
        mask: Tensor | None = None,
        temperature: float = 1.0,
        prompt_of_response: Tensor | None = None,
    ) -> Tensor:
        """Return log-probs [B, T] of the response tokens where `mask` holds (None: of all real ones)."""
        mask = response.mask() if mask is None else mask
        with self.backbone.adapter(self.adapter_name):
            hidden = self.backbone.hidden(prompt, response, prompt_of_response)
            # Inside the context: the vocabulary matrix may be one of the adapter's targets.
            return response_log_probs(self.backbone, hidden, response, mask, temperature)[0]


class RewardModel(nn.Module):
    """A backbone with a scalar head on the summary of a prompt and its response; `adapter` as for `LanguageModel`."""

    def __init__(self, backbone: Backbone, head: ScalarHead, adapter: str | None = None) -> None:
        super().__init__()
        self.backbone, self.head, self.adapter_name = backbone, head, adapter

    def forward(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        """Rewards [B] of B responses to P prompts; `prompt_of_response` [B] names each response's prompt."""
        with self.backbone.adapter(self.adapter_name):
            summary = self.backbone.summary(prompt, response, prompt_of_response)
        return cast(Tensor, self.head(summary))


class RewardLanguageModel(RewardModel):
    """A reward model that also predicts tokens, for a language-model loss beside that of its rewards."""

    def forward(  # type: ignore[override]
        self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rewards [B]; with `mask` [B, T] bool also the log-probs [B, T] of the response tokens where it holds."""
        if mask is None:
            return super().forward(prompt, response, prompt_of_response)
        with self.backbone.adapter(self.adapter_name):
            hidden = self.backbone.hidden(prompt, response, prompt_of_response)
            log_probs = response_log_probs(self.backbone, hidden, response, mask)[0]
        rows = torch.arange(len(response.lengths), device=hidden.device)
        return self.head(hidden[rows, response.lengths]), log_probs


def freeze_unused_lm_head(backbone: Backbone) -> None:
    """Freeze a vocabulary matrix that is not tied to the embedding: rewards and values give it no gradient."""
    vocabulary, embedding = backbone.model.get_output_embeddings(), backbone.model.get_input_embeddings()
    if vocabulary is not None and vocabulary.weight is not embedding.weight:
        vocabulary.requires_grad_(False)
