"""Heads, and the roles of a backbone: policy, reference, critic and reward model.

With LoRA, one frozen base serves them all: the policy, a separate critic and the reward model are adapters, the reference
is the base without adapters or with the frozen adapter that training started from.
"""

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from align.core.tensor_ops import Padded, entropy_of, log_probs_of
from align.models.adapters import adapter_parameters
from align.models.backbone import Backbone

REWARD_ADAPTER, VALUE_ADAPTER, REFERENCE_ADAPTER = "reward", "value", "reference"
"""Names of adapters on the policy's base: of a reward model, of a separate critic, of a reference that follows it."""
WHOLE_BYTES = 2**30
"""Larger logits are computed in parts of at most this many bytes, and again in the backward pass."""


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

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., H] -> [..] float32."""
        numbers: Tensor = self.linear(hidden)
        return numbers.squeeze(-1)


def predict_tokens(
    backbone: Backbone, states: Tensor, tokens: Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs [n] of tokens and, with `with_entropy`, entropies [n] in nats of the predictions; float32.

    Large logits are computed in parts and again in the backward pass: over a vocabulary of 128,000 the logits of 16,000
    tokens take 4 GB in bfloat16, and their gradient as much.

    Args:
        backbone: predicts with the active adapter.
        states: [n, H] before the tokens.
        tokens: [n] ids.
        temperature: divides the logits.
    """

    def of_part(states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        logits = backbone.logits(states)
        chosen = log_probs_of(logits, tokens, temperature)
        return (chosen, entropy_of(logits, temperature)) if with_entropy else (chosen,)

    count, sequence = len(tokens), backbone.sequence
    if sequence:  # each process predicts a part of them
        missing = -count % sequence.size
        states, tokens = pad(states, (0, 0, 0, missing)), pad(tokens, (0, missing))
        states, tokens = sequence.own_tokens(states[None])[0], sequence.own_tokens(tokens[None])[0]
    parts = math.ceil(len(tokens) * int(backbone.model.config.vocab_size) * states.element_size() / WHOLE_BYTES)
    if parts <= 1:
        found = [of_part(states, tokens)]
    else:
        found = [
            # The backward pass comes when the adapter's context has ended: it is entered again.
            checkpoint(of_part, *pair, use_reentrant=False, preserve_rng_state=False, context_fn=backbone.recompute_contexts)
            for pair in zip(states.chunk(parts), tokens.chunk(parts), strict=True)
        ]
    columns = (torch.cat(column) for column in zip(*found, strict=True))
    if sequence:
        columns = (sequence.all_tokens(column[None])[0, :count] for column in columns)
    log_probs, *entropy = columns
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

    The vocabulary product is taken only where `mask` holds; elsewhere both are 0.

    Args:
        hidden: [B, T+1, H] from `Backbone.hidden`.
        mask: [B, T] bool.
        temperature: divides the logits.
    """
    chosen, entropy = predict_tokens(backbone, hidden[:, :-1][mask], response.ids[mask], temperature, with_entropy)
    nothing = torch.zeros(mask.shape, device=hidden.device)
    return nothing.masked_scatter(mask, chosen), nothing if entropy is None else nothing.masked_scatter(mask, entropy)


def freeze_unused_lm_head(backbone: Backbone) -> None:
    """Freeze a vocabulary matrix that is not tied to the embedding: rewards and values give it no gradient."""
    vocabulary, embedding = backbone.model.get_output_embeddings(), backbone.model.get_input_embeddings()
    if vocabulary is not None and vocabulary.weight is not embedding.weight:
        vocabulary.requires_grad_(False)


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
        prompt_index: Tensor | None = None,
    ) -> Tensor:
        """Return log-probs [B, T] of the response tokens where `mask` holds (None: of all real ones)."""
        mask = response.mask() if mask is None else mask
        with self.backbone.adapter(self.adapter_name):
            hidden = self.backbone.hidden(prompt, response, prompt_index)
            # Inside the context: the vocabulary matrix may be one of the adapter's targets.
            return response_log_probs(self.backbone, hidden, response, mask, temperature)[0]


class RewardModel(nn.Module):
    """A backbone with a scalar head on the summary of a prompt and its response; `adapter` as for `LanguageModel`."""

    def __init__(self, backbone: Backbone, head: ScalarHead, adapter: str | None = None) -> None:
        super().__init__()
        self.backbone, self.head, self.adapter_name = backbone, head, adapter

    def forward(self, prompt: Padded, response: Padded, prompt_index: Tensor | None = None) -> Tensor:
        """Rewards [R] of R responses to N prompts; `prompt_index` [R] names each response's prompt."""
        with self.backbone.adapter(self.adapter_name):
            summary = self.backbone.summary(prompt, response, prompt_index)
        return cast(Tensor, self.head(summary))


class RewardLanguageModel(RewardModel):
    """A reward model that also predicts tokens, for a language-model loss beside that of its rewards."""

    def forward(  # type: ignore[override]
        self, prompt: Padded, response: Padded, prompt_index: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rewards [R]; with `mask` [R, T] bool also the log-probs [R, T] of the response tokens where it holds."""
        if mask is None:
            return super().forward(prompt, response, prompt_index)
        with self.backbone.adapter(self.adapter_name):
            hidden = self.backbone.hidden(prompt, response, prompt_index)
            log_probs = response_log_probs(self.backbone, hidden, response, mask)[0]
        rows = torch.arange(len(response.lengths), device=hidden.device)
        return self.head(hidden[rows, response.lengths]), log_probs


class Prediction(NamedTuple):
    """Predictions of policy and critic for responses, all [B, T], 0 past a response's end.

    Entropy costs a softmax: it is computed where gradients are off, or if it is learned.
    """

    log_probs: Tensor
    values: Tensor
    entropy: Tensor


class Role(Enum):
    """The outputs of an `ActorCritic`."""

    POLICY = "policy"
    REFERENCE = "reference"
    INITIAL = "initial policy"
    LANGUAGE_MODEL = "language model"
    REWARD = "reward"


class ActorCritic(nn.Module):
    """All weights that PPO trains in one module, under one engine, with the roles that share its backbone.

    Call it through `Roles`. `forward` is one entry point because a DeepSpeed engine's hooks are on it.

    Args:
        adapter: the policy's adapter; None: all weights are trained.
        start_adapter: of the starting model, if it shares the backbone; None: the bare base.
        critic: the critic's backbone, or None if it shares the policy's.
        critic_adapter: the critic's adapter; None: the policy's trunk.
        reward_heads: of reward models that are adapters on the backbone, by the adapter's name.
        learns_entropy: compute the entropy of the policy with its gradient.
        reference_adapter: of the reference, if it is no longer the starting model.
    """

    def __init__(
        self,
        backbone: Backbone,
        adapter: str | None,
        value_head: ScalarHead,
        start_adapter: str | None = None,
        critic: Backbone | None = None,
        critic_adapter: str | None = None,
        reward_heads: Mapping[str, ScalarHead] | None = None,
        learns_entropy: bool = False,
        reference_adapter: str | None = None,
    ) -> None:
        super().__init__()
        self.reference_adapter = reference_adapter or start_adapter
        self.backbone, self.adapter_name, self.start_adapter = backbone, adapter, start_adapter
        self.value_head, self.critic, self.critic_adapter = value_head, critic, critic_adapter
        self.reward_heads, self.learns_entropy = nn.ModuleDict(reward_heads or {}), learns_entropy

    def critic_weights(self) -> frozenset[str]:
        """Return the names of the trained weights that serve values alone."""
        adapter = adapter_parameters(self, self.critic_adapter) if self.critic_adapter else {}
        return frozenset(
            name
            for name, weight in self.named_parameters()
            if weight.requires_grad and (name.startswith(("value_head.", "critic.")) or name in adapter)
        )

    def forward(
        self,
        role: Role,
        prompt: Padded,
        response: Padded,
        temperature: float = 1.0,
        prompt_index: Tensor | None = None,
        reward: str = "",
    ) -> Prediction | Tensor:
        """Compute the output of `role`, see the methods of `Roles`; `reward` names the adapter of a reward model."""
        if role is Role.REWARD:
            head = cast(ScalarHead, self.reward_heads[reward])
            return cast(Tensor, RewardModel(self.backbone, head, reward)(prompt, response, prompt_index))
        if role is Role.POLICY:
            return self._policy(prompt, response, temperature, prompt_index)
        adapters = {Role.REFERENCE: self.reference_adapter, Role.INITIAL: self.start_adapter}
        model = LanguageModel(self.backbone, adapters.get(role, self.adapter_name))
        return cast(Tensor, model(prompt, response, None, temperature, prompt_index))

    def _policy(self, prompt: Padded, response: Padded, temperature: float, prompt_index: Tensor | None) -> Prediction:
        mask = response.mask()
        with self.backbone.adapter(self.adapter_name):
            hidden = self.backbone.hidden(prompt, response, prompt_index)
            with_entropy = self.learns_entropy or not torch.is_grad_enabled()
            log_probs, entropy = response_log_probs(self.backbone, hidden, response, mask, temperature, with_entropy)
        if self.critic is not None:
            hidden = self.critic.hidden(prompt, response, prompt_index)
        elif self.critic_adapter is not None:
            with self.backbone.adapter(self.critic_adapter):
                hidden = self.backbone.hidden(prompt, response, prompt_index)
        values = self.value_head(hidden[:, :-1]).masked_fill(~mask, 0.0)
        return Prediction(log_probs, values, entropy)


class Roles:
    """The roles of a PPO run.

    Args:
        actor_critic: an `ActorCritic`, or the engine around it.
        reference: a separate frozen language model; None: the policy's backbone is also the reference.
        initial: a frozen copy of the starting model, if `reference` follows the policy.
        reference_moves: whether the reference follows the policy.
    """

    def __init__(
        self,
        actor_critic: nn.Module,
        reference: nn.Module | None = None,
        initial: nn.Module | None = None,
        reference_moves: bool = False,
    ) -> None:
        self.actor_critic: Any = actor_critic
        self.reference_model: Any = reference
        self.initial_model: Any = initial
        self.reference_moves = reference_moves

    def policy(self, prompt: Padded, response: Padded, temperature: float, prompt_index: Tensor | None = None) -> Prediction:
        """Return log-probs, values and entropy of R responses to N prompts.

        Args:
            temperature: divides the logits.
            prompt_index: [R] the prompt of each response; None: response i answers prompt i.
        """
        return cast(Prediction, self.actor_critic(Role.POLICY, prompt, response, temperature, prompt_index))

    def reference(self, prompt: Padded, response: Padded, temperature: float, prompt_index: Tensor | None = None) -> Tensor:
        """Return log-probs [R, T] of the reference; arguments as for `policy`."""
        if self.reference_model is not None:
            return cast(Tensor, self.reference_model(prompt, response, None, temperature, prompt_index))
        return cast(Tensor, self.actor_critic(Role.REFERENCE, prompt, response, temperature, prompt_index))

    def initial(self, prompt: Padded, response: Padded, temperature: float, prompt_index: Tensor | None = None) -> Tensor:
        """Return log-probs [R, T] of the starting model, where it is not the reference; arguments as for `policy`."""
        if self.initial_model is not None:
            return cast(Tensor, self.initial_model(prompt, response, None, temperature, prompt_index))
        return cast(Tensor, self.actor_critic(Role.INITIAL, prompt, response, temperature, prompt_index))

    def language_model(self, prompt: Padded, response: Padded, prompt_index: Tensor | None = None) -> Tensor:
        """Return log-probs [R, T] of the policy at temperature 1, for a language-model loss."""
        return cast(Tensor, self.actor_critic(Role.LANGUAGE_MODEL, prompt, response, 1.0, prompt_index))

    def reward(self, adapter: str, prompt: Padded, response: Padded, prompt_index: Tensor | None = None) -> Tensor:
        """Return rewards [R] of a reward model that is an adapter on the policy's base."""
        return cast(Tensor, self.actor_critic(Role.REWARD, prompt, response, 1.0, prompt_index, adapter))


class MountedReward:
    """A reward model that is an adapter on the policy's base, called like a `RewardModel`."""

    def __init__(self, roles: Roles, adapter: str) -> None:
        self.roles, self.adapter = roles, adapter

    def __call__(self, prompt: Padded, response: Padded, prompt_index: Tensor | None, /) -> Tensor:
        """Return rewards [R]."""
        return self.roles.reward(self.adapter, prompt, response, prompt_index)
