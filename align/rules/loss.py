"""The loss of a rule model; imports only torch."""

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def judgment_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over judged rules of the cross-entropy -t log p - (1 - t) log(1 - p), with p = sigmoid(logit).

    Args:
        logits: [R] of the rule being violated.
        targets: [R] the share of labelers who saw it violated, 0 to 1. Where they disagree the loss is
            smallest at that share.
    """
    return binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="sum")
