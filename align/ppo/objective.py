"""The clipped losses of PPO, token by token; imports torch alone. The caller sums them and divides by global counts."""

import torch
from torch import Tensor


def policy_losses(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Clipped-ratio losses (Schulman et al. 2017, equation 7) and whether the clip decided; all [B, T].

    Args:
        log_probs, old_log_probs: of the same tokens, now and when they were sampled.
        advantages: whitened.
        clip: epsilon; the ratio counts between 1 - clip and 1 + clip.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip, 1 + clip)
    return torch.maximum(free, clipped), clipped > free


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Half of the larger of two squared errors, and whether the clip decided; all [B, T].

    The second error is that of values held within `clip` of the old ones (lm-human-preferences, `train_policy.py`, `loss`).
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    free, clipped = (values - returns) ** 2, (near - returns) ** 2
    return 0.5 * torch.maximum(free, clipped), clipped > free
