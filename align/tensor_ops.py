"""Small tensor functions that every stage shares. They import torch alone and keep no state.

Shapes: B rows, T response positions, V vocabulary. A mask is 1 where a position counts. Sums and counts are returned
apart where a mean would have to be taken over several processes: a mean of means weighs short rows too heavily.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Padded(NamedTuple):
    """Token rows padded on the right: where a row ends is told by its length, never by the value of a token."""

    ids: Tensor
    """[B, L] int64."""
    lengths: Tensor
    """[B] int64, each at most L."""

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], pad_id: int = 0) -> "Padded":
        """Pad lists of token ids to the longest of them."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
        ids = torch.full((len(rows), int(lengths.max()) if len(rows) else 0), pad_id, dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.as_tensor(row, dtype=torch.long)
        return cls(ids, lengths)

    def to(self, device: torch.device | str) -> "Padded":
        """The same rows on another device."""
        return Padded(self.ids.to(device), self.lengths.to(device))

    def mask(self) -> Tensor:
        """[B, L] bool: True on real tokens."""
        return length_mask(self.lengths, self.ids.shape[1])

    def rows(self, index: Tensor | Sequence[int]) -> "Padded":
        """The rows of `index`, with columns that none of them uses cut off."""
        lengths = self.lengths[index]
        return Padded(self.ids[index, : int(lengths.max())], lengths)

    def tolists(self) -> list[list[int]]:
        """The rows without their padding."""
        return [row[:length] for row, length in zip(self.ids.tolist(), self.lengths.tolist(), strict=True)]


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """[B, width] bool: True at positions below each row's length."""
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` where `mask` holds; a scalar. What is masked may be anything, NaN included."""
    return values.masked_fill(~mask, 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` where `mask` holds; 0 if it holds nowhere."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True, epsilon: float = 1e-8) -> Tensor:
    """Scale to unit variance over the masked positions, as lm-human-preferences does (biased variance, 1e-8).

    Args:
        values: any shape; must hold the whole global batch, or processes would whiten differently.
        shift_mean: True removes the mean (advantages); False keeps it (rewards).
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    whitened = (values - mean) * torch.rsqrt(variance + epsilon)
    return (whitened if shift_mean else whitened + mean).masked_fill(~mask, 0.0)


def log_probs_of(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of `tokens` [..] under `logits` [.., V] divided by `temperature`; float32 [..].

    The temperature belongs to the policy that is trained: old, new and reference log-probs must all be divided alike.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(logits, dim=-1)


def entropy_of(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of the distribution of `logits` [.., V] at `temperature`; float32 [..]."""
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    # log Z - E[x]: one pass over exp, without the log-probability of every token.
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp()
    total = weights.sum(-1)
    return total.log() + top.squeeze(-1) - (weights * logits).sum(-1) / total


def cut_by_tokens(lengths: Sequence[int], budget: int, largest: int | None = None) -> Iterator[list[int]]:
    """Cut rows into batches of at most `budget` padded tokens, after sorting by length so that little is padding.

    Args:
        lengths: tokens of each row.
        budget: padded tokens a batch may hold (rows x longest row); a longer single row gets a batch of its own.
        largest: most rows in one batch.

    Yields:
        Lists of row numbers, longest rows first (memory peaks at once, not after an hour). Every row is in one list.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batch: list[int] = []
    for row in order:
        # Rows come longest first, so the first row of a batch is its width.
        full = batch and lengths[batch[0]] * (len(batch) + 1) > budget
        if full or (largest is not None and len(batch) >= largest):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
