"""The loss of supervised fine-tuning; imports only torch."""

from torch import Tensor

from align.core.tensor_ops import masked_sum


def demonstration_loss(
    log_probs: Tensor,
    response_mask: Tensor,
    prompt_mask: Tensor,
    response_count: int,
    prompt_count: int,
    prompt_weight: float,
) -> Tensor:
    """Return the negative log-likelihood of the assistant's tokens, plus the weighted one of the prompt's tokens.

    With weight lambda this is GPT-1's L3 = L2 + lambda L1 (Radford et al. 2018, equation 5), each a mean over its kind
    of tokens in the global batch.

    Args:
        log_probs: [B, T] log-probs of a micro-batch.
        response_mask: [B, T] bool, the assistant's tokens.
        prompt_mask: [B, T] bool, the prompt's tokens.
        response_count: number of `response_mask` tokens in the global batch.
        prompt_count: number of `prompt_mask` tokens in the global batch.
        prompt_weight: lambda. 0 leaves out the prompt.
    """
    loss = -masked_sum(log_probs, response_mask) / max(1, response_count)
    if prompt_weight:
        loss = loss - prompt_weight * masked_sum(log_probs, prompt_mask) / max(1, prompt_count)
    return loss
