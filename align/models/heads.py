"""A backbone in a single role: log-probs of a language model, or a scalar head on it."""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from align.core.tensor_ops import Padded, entropy_of, log_probs_of
from align.models.backbone import Backbone

WHOLE_BYTES = {"cpu": 2**30, "cuda": 2**32}
"""Maximum size of logits in bytes. Larger ones are computed in parts, and recomputed in the backward pass."""


def predict_tokens(
    backbone: Backbone, states: Tensor, tokens: Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs [n] of tokens and, with `with_entropy`, entropies [n] in nats of the predictions; float32.

    Large logits are computed in parts and recomputed in the backward pass: with a vocabulary of 128,000, the logits of
    16,000 tokens take 4 GB in bfloat16, and so does their gradient.

    Args:
        backbone: backbone that predicts with the active adapter.
        states: [n, H] before the tokens.
        tokens: [n] ids.
        temperature: divides the logits.
    """

    def of_part(states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        logits = backbone.logits(states)
        chosen = log_probs_of(logits, tokens, temperature)
        return (chosen, entropy_of(logits, temperature)) if with_entropy else (chosen,)

    whole = WHOLE_BYTES.get(states.device.type, WHOLE_BYTES["cpu"])
    parts = math.ceil(len(tokens) * int(backbone.model.config.vocab_size) * states.element_size() / whole)
    if parts <= 1:
        found = [of_part(states, tokens)]
    else:
        found = [
            # The backward pass runs after the adapter's context has exited, so it is entered again.
            checkpoint(of_part, *pair, use_reentrant=False, preserve_rng_state=False, context_fn=backbone.recompute_contexts)
            for pair in zip(states.chunk(parts), tokens.chunk(parts), strict=True)
        ]
    log_probs, *entropy = (torch.cat(column) for column in zip(*found, strict=True))
    return log_probs, entropy[0] if with_entropy else None


def response_log_probs(
    backbone: Backbone,
    hidden: Tensor,
    response: Padded,
    mask: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probs [B, T] of response tokens and entropies [B, T] of their predictions (0 unless `with_entropy`).

    The vocabulary product is computed only where `mask` is true; elsewhere both are 0.

    Args:
        hidden: [B, T+1, H] from `Backbone.hidden`.
        mask: [B, T] bool.
        temperature: divides the logits.
    """
    places = mask.nonzero(as_tuple=True)
    chosen, entropy = predict_tokens(backbone, hidden[places], response.ids[places], temperature, with_entropy)
    nothing = torch.zeros(mask.shape, device=hidden.device)
    return nothing.masked_scatter(mask, chosen), nothing if entropy is None else nothing.masked_scatter(mask, entropy)


class Float32Linear(nn.Linear):
    """A linear map computed in float32 for any dtype of weights and input."""

    def forward(self, input: Tensor) -> Tensor:
        """[.., H] -> [.., n] float32."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias)


class ScalarHead(nn.Module):
    """A linear map from a hidden state to one number, computed in float32.

    It is initialized with standard deviation 1/sqrt(H+1) and bias 0 (lm-human-preferences, `policy.py`).
    """

    def __init__(self, hidden_size: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = Float32Linear(hidden_size, 1, bias=bias)
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


class ValueHead(ScalarHead):
    """A scalar head for values: a linear map that gradients train, and a fitted term on the running mean of hidden states.

    Both start at 0, because random initialization would add noise to a trunk shared with the policy. The fitted term is not
    a parameter: neither the dtype of the weights nor their sharding affects it. Its input is the running mean over tokens,
    because single states predict returns worse and vary more from token to token (docs/studies/critic.md).
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        nn.init.zeros_(self.linear.weight)
        self.fitted: tuple[Tensor, Tensor] | None = None
        """Weight [H] and bias [] of the fitted term, float32."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, H] -> [B, T] float32."""
        values = super().forward(hidden)
        if self.fitted is None:
            return values
        weight, bias = self.fitted
        return values + running_mean(hidden.float()) @ weight + bias


def running_mean(states: Tensor) -> Tensor:
    """Return the means [.., T, H] over each token and all earlier ones."""
    counts = torch.arange(1, states.shape[-2] + 1, device=states.device)
    return states.cumsum(-2) / counts[:, None]


class LanguageModel(nn.Module):
    """A backbone that predicts responses, with an adapter unless None: the model of SFT, and PPO's frozen reference."""

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
        """Return log-probs [B, T] of the response tokens where `mask` is true (all real tokens if None)."""
        mask = response.mask() if mask is None else mask
        with self.backbone.adapter(self.adapter_name):
            hidden = self.backbone.hidden(prompt, response, prompt_of_response)
            # Inside the context, because the vocabulary matrix may be one of the adapter's targets.
            return response_log_probs(self.backbone, hidden, response, mask, temperature)[0]


class RewardModel(nn.Module):
    """A backbone with a scalar head on the summary of a prompt and its response; `adapter` as for `LanguageModel`."""

    def __init__(self, backbone: Backbone, head: ScalarHead, adapter: str | None = None) -> None:
        super().__init__()
        self.backbone, self.head, self.adapter_name = backbone, head, adapter

    def forward(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        """Return rewards [B] of B responses to P prompts. `prompt_of_response` [B] is the prompt index of each response."""
        with self.backbone.adapter(self.adapter_name):
            summary = self.backbone.summary(prompt, response, prompt_of_response)
        return cast(Tensor, self.head(summary))
