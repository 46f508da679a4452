"""The data of a PPO update, in the order in which it is made.

    Prompt           a validated row of a file                           align/data/records.py
    EncodedPrompt    its token ids                                       align/tokenization/encoded.py
    Rollout          B prompts, each with a sampled response             here
    Scores           the rewards of a rollout                            here
    RoleOutputs      outputs of policy, reference and critic for it      here
    TrainingSignal   the scores after the changes of extensions          here
    Experience       a rollout ready for the loss                        here
    ExperienceBatch  the tensors of a micro-batch                        here
    LossInputs       the part of a micro-batch that the loss needs       align/ppo/losses.py

In a rollout, B counts its responses over all processes and T the tokens of the longest one. Its tensors are on the CPU and
equal on every process; [B, T] ones are float32, and entries past a response's end are masked. In a micro-batch, B counts its
responses, T is its longest one, and tensors are on this process's device.
The prompts of a rollout repeat: the responses to one prompt are neighbors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from align.batches.micro_batches import MicroBatch, pack_groups
from align.core.tensor_ops import Padded, length_mask
from align.ppo.losses import LossInputs
from align.tokenization.encoded import EncodedPrompt, SampledResponse

SCORE_METRICS = frozenset({"mean", "std", "kl_penalized"})
"""Metrics `reward/<name>` of the score itself; no reward of an extension may have such a name."""


@dataclass(frozen=True)
class Rollout:
    """Prompts with sampled responses, one each, in an order that does not depend on processes."""

    prompts: list[EncodedPrompt]
    responses: list[list[int]]
    ended: list[bool]
    """Whether each response has an end token."""
    texts: list[str]
    log_probs: list[list[float]] | None = None
    """The sampling engine's log-prob of each response token, or None if the policy itself sampled."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> Tensor:
        """[B] response tokens."""
        return torch.tensor([len(response) for response in self.responses])

    @property
    def engine_log_probs(self) -> Tensor | None:
        """[B, T] `log_probs`."""
        return None if self.log_probs is None else pad_sequence(list(map(torch.tensor, self.log_probs)), batch_first=True)

    @property
    def ended_mask(self) -> Tensor:
        """[B] bool: `ended`."""
        return torch.tensor(self.ended)

    @property
    def sampled_responses(self) -> list[SampledResponse]:
        """Responses in the input format of reward models."""
        return [
            SampledResponse(prompt.conversation, prompt.ids, ids, text, ended, prompt.given_as_ids)
            for prompt, ids, text, ended in zip(self.prompts, self.responses, self.texts, self.ended, strict=True)
        ]


@dataclass(frozen=True)
class Scores:
    """The rewards of a rollout."""

    total: Tensor
    """[B] weighted sum of all rewards."""
    components: dict[str, Tensor]
    """[B] each: individual rewards and other parts of the scores, logged as `reward/<name>`."""


@dataclass(frozen=True)
class RoleOutputs:
    """Outputs of policy, reference and critic for a rollout, before the policy is trained on it; [B, T]."""

    log_probs: Tensor
    ref_log_probs: Tensor
    values: Tensor
    entropy: Tensor
    fitted_values: Tensor | None = None
    """Values of a head that was fitted to the rollout, from which clipping starts. If None, `values`."""
    value_states: dict[int, Tensor] = field(default_factory=dict)
    """Hidden states [n, H] before the tokens of each row that this process computed, the input of the value head."""


@dataclass(frozen=True)
class TrainingSignal:
    """The policy's training signal: the scores, which extensions may change, and optional token rewards and weights."""

    scores: Tensor
    """[B]."""
    components: dict[str, Tensor]
    """[B] each, logged as `reward/<name>`."""
    token_rewards: Tensor | None = None
    """[B, T] rewards of tokens, added to the score and the KL penalty, or None."""
    token_weights: Tensor | None = None
    """[B, T] factors of the policy's losses. None for 1."""
    corrects_sampling: bool = False
    """Whether `token_weights` correct for a sampling engine whose distribution differs from the policy's."""

    def add_token_rewards(self, rewards: Tensor) -> "TrainingSignal":
        """Return a signal with `rewards` [B, T] added to its token rewards."""
        return replace(self, token_rewards=rewards if self.token_rewards is None else self.token_rewards + rewards)

    def multiply_token_weights(self, weights: Tensor) -> "TrainingSignal":
        """Return a signal with its token weights multiplied by `weights` [B, T]."""
        return replace(self, token_weights=weights if self.token_weights is None else self.token_weights * weights)


@dataclass(frozen=True)
class Experience:
    """A rollout with everything that the loss needs."""

    rollout: Rollout
    scores: Tensor
    """[B] on the scale of the rewards, for metrics."""
    signal: TrainingSignal
    old: RoleOutputs
    advantages: Tensor
    """[B, T] from the estimator."""
    returns: Tensor | None
    """[B, T] from unwhitened advantages, or None without a critic."""
    kl_coef: float

    @property
    def lengths(self) -> Tensor:
        """[B] response tokens."""
        return self.rollout.lengths

    @property
    def mask(self) -> Tensor:
        """[B, T] True on response tokens."""
        return length_mask(self.lengths, self.advantages.shape[1])

    def batch(
        self, part: MicroBatch, minibatch: Sequence[int], device: torch.device, trains_critic: bool
    ) -> "ExperienceBatch":
        """Return a micro-batch as tensors on a device.

        Args:
            part: rows of the rollout in this micro-batch.
            minibatch: rows of the minibatch, over all processes.
            trains_critic: whether the loss has a value term.
        """
        inputs = pack_groups([prompt.ids for prompt in self.rollout.prompts], self.rollout.responses, part.groups, device)
        rows, width = part.rows, inputs.response.ids.shape[1]
        old_values = self.old.values if self.old.fitted_values is None else self.old.fitted_values

        def columns(tensor: Tensor) -> Tensor:
            return tensor[rows, :width].to(device)

        return ExperienceBatch(
            prompt=inputs.prompt,
            response=inputs.response,
            prompt_of_response=inputs.prompt_of_response,
            weight=part.weight,
            mask=inputs.response.mask(),
            old_log_probs=columns(self.old.log_probs),
            old_values=columns(old_values),
            ref_log_probs=columns(self.old.ref_log_probs),
            advantages=columns(self.advantages),
            returns=columns(self.returns) if trains_critic and self.returns is not None else None,
            token_weights=None if self.signal.token_weights is None else columns(self.signal.token_weights),
            minibatch_tokens=float(self.lengths[minibatch].sum()),
        )


@dataclass(frozen=True, kw_only=True)
class ExperienceBatch(LossInputs):
    """A micro-batch: B responses to P prompts."""

    prompt: Padded
    """[P, L]."""
    response: Padded
    """[B, T]."""
    prompt_of_response: Tensor | None
    """[B] prompt index of each response. If None, response i answers prompt i."""
    weight: float = 1.0
    """Factor of the loss and the metrics, see `MicroBatch`."""
