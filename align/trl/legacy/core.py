"""Functions and classes of `trl.core` that are imported by scripts for TRL 0.4 to 0.11."""

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TopKLogitsWarper, TopPLogitsWarper

from align.core.tensor_ops import entropy_of, log_probs_of
from align.trl.ppo_trainer import masked_mean, masked_var, masked_whiten

__all__ = [
    "LengthSampler",
    "PPODecorators",
    "clip_by_value",
    "entropy_from_logits",
    "logprobs_from_logits",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "respond_to_batch",
    "set_seed",
]


class LengthSampler:
    """Draws a length from `min_value` to `max_value` - 1 with NumPy's global generator."""

    def __init__(self, min_value: int, max_value: int) -> None:
        self.values = list(range(min_value, max_value))

    def __call__(self) -> int:
        """Draw a length."""
        return int(np.random.choice(self.values))


def set_seed(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class PPODecorators:
    """Context manager that frees GPU memory after a call, for subclasses of the trainer."""

    optimize_device_cache = False

    @classmethod
    @contextmanager
    def empty_device_cache(cls) -> Iterator[None]:
        """Free cached memory at the end of the block if `optimize_device_cache` is set."""
        yield
        if cls.optimize_device_cache and torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()


def logprobs_from_logits(logits: Tensor, labels: Tensor | None, gather: bool = True) -> Tensor:
    """Return the log-probs [B, L] of labels [B, L], or without `gather` the log-probs [B, L, V] of all tokens."""
    return log_probs_of(logits, labels) if gather and labels is not None else logits.log_softmax(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropy [..], in nats, of the distributions given by logits [.., V]."""
    return entropy_of(logits)


def clip_by_value(x: Tensor, tensor_min: Tensor | float, tensor_max: Tensor | float) -> Tensor:
    """Clamp values to a range, elementwise."""
    return torch.maximum(torch.minimum(x, torch.as_tensor(tensor_max)), torch.as_tensor(tensor_min))


@torch.no_grad()
def respond_to_batch(model: nn.Module, queries: Tensor, txt_len: int = 20, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Sample `txt_len` tokens after each query. Queries [B, L] have no padding. Return token ids [B, txt_len]."""
    warpers: list[Any] = [TopKLogitsWarper(top_k=top_k)] if top_k > 0 else []
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p=top_p))
    ids = queries
    for _ in range(txt_len):
        logits = model(ids)[0][:, -1]
        for warp in warpers:
            logits = warp(ids, logits)
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
    return ids[:, queries.shape[1] :]
