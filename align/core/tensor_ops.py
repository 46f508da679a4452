"""Tensor functions shared by all stages. Shapes: B rows, T response positions, V vocabulary."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

CPU_CHUNK, GPU_CHUNK = 2**21, 2**27
"""Maximum number of float32 logits at a time: 8 MB fit in a CPU's cache; a GPU needs work for all its cores."""


class Padded(NamedTuple):
    """Right-padded token rows. A row's end is given by its length, never by a token value."""

    ids: Tensor
    """[B, L] int64."""
    lengths: Tensor
    """[B] int64, each at most L."""

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], pad_id: int = 0) -> "Padded":
        """Pad lists of token ids to the longest one."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
        ids = torch.full((len(rows), int(lengths.max()) if len(rows) else 0), pad_id, dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.as_tensor(row, dtype=torch.long)
        return cls(ids, lengths)

    def to(self, device: torch.device | str) -> "Padded":
        return Padded(self.ids.to(device), self.lengths.to(device))

    def mask(self) -> Tensor:
        """[B, L] bool: True on real tokens."""
        return length_mask(self.lengths, self.ids.shape[1])

    def rows(self, index: Tensor | Sequence[int]) -> "Padded":
        """Select the rows of `index`, trimming columns that are padding in all of them."""
        lengths = self.lengths[index]
        return Padded(self.ids[index, : int(lengths.max())], lengths)

    def tolists(self) -> list[list[int]]:
        """Convert to lists without padding."""
        return [row[:length] for row, length in zip(self.ids.tolist(), self.lengths.tolist(), strict=True)]


class BatchLoss(NamedTuple):
    """Contribution of a micro-batch to the loss of its global batch, and metrics that are summed in the same way."""

    loss: Tensor
    """Scalar, with gradients."""
    sums: Mapping[str, Tensor | float] = MappingProxyType({})
    """Scalars by name, without gradients."""


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """Return [B, width] bool, True at positions below each row's length."""
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum `values` where `mask` is True, to a scalar. Masked values may be NaN."""
    return values.masked_fill(~mask, 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `values` where `mask` is True, or 0 if it is nowhere True."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True, min_std: float = 0.0) -> Tensor:
    """Scale to unit variance over masked positions, as in lm-human-preferences (biased variance, 1e-8).

    `values` must be the full global batch. The mean is removed (advantages) unless `shift_mean` is False (rewards).
    Values whose standard deviation is below `min_std` are divided by `min_std`.
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    whitened = (values - mean) * torch.rsqrt((variance + 1e-8).clamp(min=min_std**2))
    return (whitened if shift_mean else whitened + mean).masked_fill(~mask, 0.0)


def log_probs_of(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probability of `tokens` [..] under `logits` [.., V] divided by `temperature`; float32 [..].

    The temperature belongs to the policy that is trained: old, new and reference log-probs must all be divided by it.
    """
    return cast(Tensor, _LogProbs.apply(logits, tokens, temperature))  # type: ignore[no-untyped-call]


class _LogProbs(torch.autograd.Function):
    """Log-probabilities in chunks of rows in float32. Saves only the original logits for backward.

    Over a vocabulary of 50,000, float32 copies of all logits would be the largest tensors of a training step.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        flat, chosen = _rows_of(logits), tokens.reshape(-1)
        normalizer = flat.new_empty(len(flat), dtype=_wide(logits))
        result = torch.empty_like(normalizer)
        for rows in _chunks(flat):
            picked = _scaled(flat[rows].gather(-1, chosen[rows, None]).squeeze(-1), temperature)
            relative, top = _minus(flat[rows], temperature)
            normalizer[rows] = relative.exp_().sum(-1).log_().add_(top.squeeze(-1))
            result[rows] = picked - normalizer[rows]
        ctx.save_for_backward(logits, chosen, normalizer)
        ctx.temperature = temperature
        return result.view(tokens.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # (one-hot - softmax) / temperature
        logits, chosen, normalizer = ctx.saved_tensors
        share = gradients[0].reshape(-1, 1) / ctx.temperature
        result, flat = torch.empty_like(logits, memory_format=torch.contiguous_format), _rows_of(logits)
        gradient = _rows_of(result)
        for rows in _chunks(flat):
            log_probs, _ = _minus(flat[rows], ctx.temperature, normalizer[rows, None])
            gradient[rows] = log_probs.exp_().mul_(-share[rows]).scatter_add_(-1, chosen[rows, None], share[rows])
        return result, None, None


def entropy_of(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the entropy in nats of the distribution of `logits` [.., V] at `temperature`; float32 [..]."""
    return cast(Tensor, _Entropy.apply(logits, temperature))  # type: ignore[no-untyped-call]


class _Entropy(torch.autograd.Function):
    """Entropy in chunks of rows in float32, like `_LogProbs`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        flat = _rows_of(logits)
        normalizer = flat.new_empty(len(flat), dtype=_wide(logits))  # log Z, relative to the largest logit
        entropy = torch.empty_like(normalizer)
        for rows in _chunks(flat):
            # log Z - E[x], both relative to the largest logit.
            relative, _ = _minus(flat[rows], temperature)
            weights = relative.exp()
            total = weights.sum(-1)
            # A masked token has probability 0 and logit -inf, whose product would be NaN.
            expected = weights.mul_(relative.clamp_(min=torch.finfo(relative.dtype).min)).sum(-1) / total
            normalizer[rows] = total.log()
            entropy[rows] = normalizer[rows] - expected
        ctx.save_for_backward(logits, normalizer, entropy)
        ctx.temperature = temperature
        return entropy.view(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # -p (log p + entropy) / temperature
        logits, normalizer, entropy = ctx.saved_tensors
        share = gradients[0].reshape(-1, 1) / ctx.temperature
        result, flat = torch.empty_like(logits, memory_format=torch.contiguous_format), _rows_of(logits)
        gradient = _rows_of(result)
        for rows in _chunks(flat):
            log_probs = _minus(flat[rows], ctx.temperature)[0].sub_(normalizer[rows, None])
            log_probs.clamp_(min=torch.finfo(log_probs.dtype).min)
            gradient[rows] = -share[rows] * log_probs.exp() * (log_probs + entropy[rows, None])
        return result, None


def _rows_of(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of `logits` [n, V]."""
    elements = CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK
    count = max(1, elements // logits.shape[-1])
    for start in range(0, len(logits), count):
        yield slice(start, min(start + count, len(logits)))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return a scaled copy of the logits in at least float32."""
    copied = logits.to(_wide(logits), copy=True)
    return copied.div_(temperature) if temperature != 1.0 else copied


def _minus(logits: Tensor, temperature: float, subtracted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return logits / temperature - `subtracted` in at least float32, and `subtracted` [n, 1] (by default, the row maximum).

    A GPU widens the logits while it subtracts, which saves a pass over them.
    """
    as_they_are = temperature == 1.0 and logits.device.type != "cpu"
    scaled = logits if as_they_are else _scaled(logits, temperature)
    if subtracted is None:
        subtracted = scaled.amax(-1, keepdim=True).to(_wide(logits))
    return (scaled - subtracted if as_they_are else scaled.sub_(subtracted)), subtracted


def cut_by_tokens(lengths: Sequence[int], budget: int, padding: int | None = None) -> Iterator[list[int]]:
    """Yield lists of rows with at most `budget` padded tokens (rows x longest row). A longer row forms its own list.

    The longest rows come first, so memory peaks at the start. `padding` limits the padding tokens in a list.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batch: list[int] = []
    padded = 0
    for row in order:
        # Rows are sorted longest first, so the first row of a batch sets its width.
        width = lengths[batch[0]] if batch else lengths[row]
        padded += width - lengths[row]
        full = width * (len(batch) + 1) > budget or (padding is not None and padded > padding)
        if batch and full:
            yield batch
            batch, padded = [], 0
        batch.append(row)
    if batch:
        yield batch
