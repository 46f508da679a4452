"""The data of a PPO update, in the order in which it is made.

    Prompt           a validated row of a file                           align/data/records.py
    EncodedPrompt    its token ids                                       align/tokenization/encoded.py
    Rollout          B prompts, each with a sampled response             here
    RoleOutputs      outputs of policy, reference and critic for it      here
    Experience       a rollout ready for the loss                        here
    LossInputs       the tensors of a micro-batch                        align/ppo/losses.py

In a rollout, B counts its responses over all processes and T the tokens of the longest one. Its tensors are on the CPU and
equal on every process; [B, T] ones are float32, and entries past a response's end are masked. In a micro-batch
(`LossInputs`), B counts its responses, T is its longest one, and tensors are on this process's device.
The prompts of a rollout repeat: the responses to one prompt are neighbors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from align.core.tensor_ops import length_mask
from align.ppo.losses import LossInputs
from align.tokenization.encoded import EncodedPrompt, SampledResponse


@dataclass(frozen=True)
class Rollout:
    """Prompts with sampled responses, one each, in an order that does not depend on processes."""

    prompts: list[EncodedPrompt]
    responses: list[list[int]]
    ended: list[bool]
    """Whether a response has its end token."""
    texts: list[str]
    log_probs: list[list[float]] | None = None
    """Log-prob of each response token as the sampling engine computed it; None if the policy itself sampled."""

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
        """The responses as reward models take them."""
        return [
            SampledResponse(prompt.conversation, prompt.ids, ids, text, ended, prompt.given_as_ids)
            for prompt, ids, text, ended in zip(self.prompts, self.responses, self.texts, self.ended, strict=True)
        ]


@dataclass(frozen=True)
class RoleOutputs:
    """Outputs of policy, reference and critic for a rollout, before the policy is trained on it; [B, T]."""

    log_probs: Tensor
    ref_log_probs: Tensor
    values: Tensor
    entropy: Tensor
    initial_log_probs: Tensor | None = None
    """Log-probs by the initial policy; None where it is the reference."""
    fitted_values: Tensor | None = None
    """Values by a head that was fitted to the rollout, from which clipping starts; None: `values`."""
    value_states: dict[int, Tensor] = field(default_factory=dict)
    """Hidden states [n, H] before the tokens of each row that this process computed, which the value head reads."""


@dataclass(frozen=True)
class Experience:
    """A rollout with all that the loss reads."""

    rollout: Rollout
    training_scores: Tensor
    """[B] the training signal."""
    old: RoleOutputs
    advantages: Tensor
    """[B, T] from the estimator."""
    returns: Tensor | None
    """[B, T] from unwhitened advantages; None without a critic."""
    kl_coef: float
    scores: Tensor
    """[B] on the scale of the rewards, for metrics."""
    score_components: dict[str, Tensor]
    """[B] each: single rewards and other parts of the scores by name, for metrics."""
    token_weights: Tensor | None = None
    """[B, T] of the policy's losses; None: all are 1."""

    @property
    def lengths(self) -> Tensor:
        """[B] response tokens."""
        return self.rollout.lengths

    @property
    def mask(self) -> Tensor:
        """[B, T] True on response tokens."""
        return length_mask(self.lengths, self.advantages.shape[1])

    def loss_inputs(self, rows: Sequence[int], width: int, device: torch.device) -> LossInputs:
        """Return the tensors of some rows [B, T] for `ppo_loss`."""

        def chosen(tensor: Tensor) -> Tensor:
            return tensor[rows, :width].to(device)

        return LossInputs(
            chosen(self.old.log_probs),
            chosen(self.old.values if self.old.fitted_values is None else self.old.fitted_values),
            chosen(self.old.ref_log_probs),
            chosen(self.advantages),
            None if self.returns is None else chosen(self.returns),
            None if self.token_weights is None else chosen(self.token_weights),
        )
