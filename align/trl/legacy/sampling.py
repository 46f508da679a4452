"""Sampling with transformers' `generate`, for queries of different lengths."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


@torch.no_grad()
def sample_responses(
    model: Any,
    queries: Sequence[Tensor],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    arguments: Mapping[str, Any],
    multiple: int | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Sample a response to each query. Return (query [L], response [T]) pairs. T5 responses include the start token.

    Args:
        model: model with a `generate` method.
        queries: token ids [L] of each query, without padding.
        tokenizer: tokenizer of the model.
        device: device of the model.
        arguments: arguments of `generate`.
        multiple: pad the length of queries to a multiple of this. Default: no rounding.
    """
    longest = max(map(len, queries))
    width = longest if multiple is None else -(-longest // multiple) * multiple
    pad_id = next((id for id in (tokenizer.pad_token_id, tokenizer.eos_token_id) if id is not None), 0)
    ids, mask = (torch.full((len(queries), width), value) for value in (pad_id, 0))
    has_encoder = bool(model.config.is_encoder_decoder)
    for row, query in enumerate(queries):
        place = slice(None, len(query)) if has_encoder else slice(width - len(query), None)
        ids[row, place], mask[row, place] = query.to("cpu"), 1
    model.eval()
    written = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), **arguments)
    start = 0 if has_encoder else width
    return [(query.to(device), row[start:]) for query, row in zip(queries, written, strict=True)]


def cut_after(response: Tensor, end_id: int | None) -> Tensor:
    """Truncate a response [T] after its first end token."""
    if end_id is None or not (ends := (response == end_id).nonzero()).numel():
        return response
    return response[: int(ends[0]) + 1]
