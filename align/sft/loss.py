"""The loss of supervised fine-tuning; imports torch alone."""

from torch import Tensor

from align.tensor_ops import masked_sum


def demonstration_loss(
    log_probs: Tensor, learn: Tensor, context: Tensor, learn_count: int, context_count: int, context_weight: float
) -> Tensor:
    """Negative log-likelihood of the assistant's tokens, and of the prompt's at a weight.

    With weight lambda this is GPT-1's L3 = L2 + lambda L1 (Radford et al. 2018, equation 5), each a mean over the tokens of
    its own kind in the global batch.

    Args:
        log_probs: [B, T] of a micro-batch.
        learn: [B, T] bool, tokens that the assistant said.
        context: [B, T] bool, tokens of the prompt.
        learn_count, context_count: such tokens in the global batch.
        context_weight: lambda; 0 leaves the prompt out.
    """
    loss = -masked_sum(log_probs, learn) / max(1, learn_count)
    if context_weight:
        loss = loss - context_weight * masked_sum(log_probs, context) / max(1, context_count)
    return loss
