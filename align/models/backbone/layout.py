"""Prompts and responses packed into the rows of a decoder, end to end."""

from typing import NamedTuple

import torch
from torch import Tensor

from align.core.tensor_ops import Padded, length_mask


class PackedRows(NamedTuple):
    """Rows of prompts with their responses, and where each response's states are."""

    ids: Tensor
    """[P, L] padded on the right; L is the longest row of a prompt with its responses."""
    positions: Tensor
    """[P, L] restarting after the prompt for every response."""
    segments: Tensor
    """[P, L] 0 on the prompt, 1.. on the responses of a row, -1 on padding."""
    row: Tensor
    """[B, 1] the row of each response."""
    column: Tensor
    """[B, T+1] the column of each hidden state."""


def pack_rows(prompt: Padded, response: Padded, prompt_of_response: Tensor | None) -> PackedRows:
    """Put each prompt and its responses into one row, without padding between them.

    Args:
        prompt_of_response: [B] the prompt of each response, ascending; None: response i answers prompt i.
    """
    device, count, width = prompt.ids.device, len(response.lengths), response.ids.shape[1]
    prompt_of = torch.arange(count, device=device) if prompt_of_response is None else prompt_of_response
    before = torch.cumsum(response.lengths, 0) - response.lengths  # response tokens before each, over all rows
    first = torch.searchsorted(prompt_of, torch.arange(len(prompt.lengths), device=device))  # each row's first response
    start = prompt.lengths[prompt_of] + before - before[first][prompt_of]  # [B] column where a response begins
    row_lengths = prompt.lengths.index_add(0, prompt_of, response.lengths)
    length = int(row_lengths.max())

    shape = (len(prompt.lengths), length)
    ids = torch.zeros(shape, dtype=torch.long, device=device)
    positions, segments = torch.zeros_like(ids), torch.full_like(ids, -1)
    ids[:, : prompt.ids.shape[1]] = prompt.ids[:, :length].masked_fill(~prompt.mask()[:, :length], 0)
    positions[:] = torch.arange(length, device=device)
    segments[length_mask(prompt.lengths, length)] = 0

    real = response.mask()
    offsets = torch.arange(width, device=device)[None, :].expand(count, width)
    rows, columns = prompt_of[:, None].expand(count, width)[real], (start[:, None] + offsets)[real]
    ids[rows, columns] = response.ids[real]
    positions[rows, columns] = (prompt.lengths[prompt_of][:, None] + offsets)[real]
    segments[rows, columns] = (torch.arange(count, device=device) - first[prompt_of] + 1)[:, None].expand(-1, width)[real]

    # The columns of a shared row outnumber the positions that a model has a table for; padding must not point past it.
    positions = positions.masked_fill(segments < 0, 0)
    after = (start[:, None] + offsets).clamp(max=length - 1)
    column = torch.cat([prompt.lengths[prompt_of][:, None] - 1, after], dim=1)
    return PackedRows(ids, positions, segments, prompt_of[:, None], column)


def packed_mask(segments: Tensor, dtype: torch.dtype, whole_prompt: bool = False) -> Tensor:
    """Return an additive mask [P, 1, L, L]: a token sees its prompt, and its own response up to itself.

    Args:
        segments: [P, L] from `pack_rows`.
        whole_prompt: prompt tokens see all of the prompt.
    """
    own, other = segments[:, :, None], segments[:, None, :]
    causal = torch.ones(own.shape[1], own.shape[1], dtype=torch.bool, device=segments.device).tril()
    allowed = causal & ((own == other) | (other == 0))
    if whole_prompt:
        allowed = allowed | ((own == 0) & (other == 0))
    mask = torch.zeros(allowed.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min)[:, None]
