"""Distillation losses. Imports only torch.

n is the number of response tokens in the loss, V the vocabulary size, H the width of hidden states.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = {"cpu": 2**22, "cuda": 2**25}
"""Maximum number of float32 logits at a time: 16 MB for each of the two models, 128 MB on a GPU."""


class LossWeights(NamedTuple):
    """Weights of the three losses. DistilBERT (Sanh et al. 2019) uses 5, 2 and 1 at temperature 2."""

    ce: float
    lm: float
    cosine: float
    temperature: float


def soft_cross_entropy(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Cross-entropy [n] between teacher and student at `temperature`, in float32 nats.

    Its minimum is the teacher's entropy. A few rows of the logits [n, V] are processed at a time, and recomputed for their
    gradient, so no float32 copy of all logits is kept.
    """
    rows = max(1, CHUNK.get(student.device.type, CHUNK["cpu"]) // max(1, student.shape[-1]))
    parts = [
        cast(Tensor, checkpoint(_soft_cross_entropy, *pair, temperature, use_reentrant=False, preserve_rng_state=False))
        for pair in zip(student.split(rows), teacher.split(rows), strict=True)
    ]
    return torch.cat(parts)


def _soft_cross_entropy(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    target = torch.softmax(teacher.float() / temperature, dim=-1)
    return -(target * torch.log_softmax(student.float() / temperature, dim=-1)).sum(-1)


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cosine similarity of hidden states [n, H], in float32 [n]."""
    return 1 - torch.cosine_similarity(student.float(), teacher.float(), dim=-1)


def distillation_loss(
    ce: Tensor, negative_log_probs: Tensor, distances: Tensor, tokens: int, weights: LossWeights
) -> Tensor:
    """Weighted sum of the three losses, each averaged over the tokens of the global batch.

    The cross-entropy is multiplied by the squared temperature, to compensate for smaller gradients (Hinton et al. 2015,
    section 2), as in DistilBERT's code.

    Args:
        ce: [n] from `soft_cross_entropy`.
        negative_log_probs: [n].
        distances: [n] from `cosine_distance`; [0] if its weight is 0.
        tokens: number of tokens of the global batch.
    """
    loss = weights.ce * weights.temperature**2 * ce.sum() + weights.lm * negative_log_probs.sum()
    return (loss + weights.cosine * distances.sum()) / max(1, tokens)
