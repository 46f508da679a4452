"""The losses of an attribute model's heads; imports only torch."""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

SCALE = (1.0, 7.0)
"""The lowest and the highest rating."""


def head_losses(outputs: Tensor, targets: Tensor, binary: Tensor) -> Tensor:
    """The loss [n] of each head, summed over the responses that were judged by it.

    For a yes or no it is the cross-entropy, with the share of labelers who chose yes as a soft target; for a rating, taken
    as (rating - 1) / 6, the squared error.

    Args:
        outputs: [R, n] of n heads.
        targets: [R, n], NaN where nobody judged, which adds nothing.
        binary: [n] bool.
    """
    judged = ~targets.isnan()
    known = torch.where(judged, targets, torch.zeros_like(targets)).to(outputs)
    low, high = SCALE
    entropy = binary_cross_entropy_with_logits(outputs, known, reduction="none")
    square = (outputs - (known - low) / (high - low)) ** 2
    losses = torch.where(binary, entropy, square)
    return torch.where(judged, losses, torch.zeros_like(losses)).sum(0)
