"""The loss of supervised fine-tuning; imports only torch."""

from torch import Tensor

from align.core.tensor_ops import masked_sum


def demonstration_loss(log_probs: Tensor, mask: Tensor, count: int) -> Tensor:
    """Negative log-likelihood of the assistant's tokens: a micro-batch's share of the mean over the global batch.

    Args:
        log_probs: [B, T] of a micro-batch.
        mask: [B, T] bool, the assistant's tokens.
        count: tokens of `mask` in the global batch.
    """
    return -masked_sum(log_probs, mask) / max(1, count)
