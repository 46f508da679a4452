"""The cache of tokens already read, during sampling."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache


class PrefixCache(DynamicCache):
    """Keys and values of one prefix in front of many rows; the rows themselves are not stored."""

    complete = False
    """Whether the prefix has been read; what follows are the rows after it."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **settings: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [N, heads, columns, width] of the prefix followed by each row."""
        if not self.complete:
            return super().update(key_states, value_states, layer_idx, *args, **settings)
        layer: Any = self.layers[layer_idx]

        def append_rows(prefix: Tensor, rows: Tensor) -> Tensor:
            return torch.cat([prefix.expand(len(rows), -1, -1, -1), rows], dim=2)

        return append_rows(layer.keys, key_states), append_rows(layer.values, value_states)


class DecodingState:
    """The state of sampling between tokens: the cache, and which of its columns are padding."""

    def __init__(self, cache: Any, attention_mask: Tensor, positions: Tensor, encoded: Tensor | None = None) -> None:
        self.cache = cache
        self.attention_mask = attention_mask
        """[B, columns so far]: 1 on real tokens (for an encoder-decoder: of the prompt)."""
        self.positions = positions
        """[B] position of the next token."""
        self.encoded = encoded

    def select(self, rows: Tensor) -> None:
        """Keep only `rows` [kept] (int64): those that have not ended."""
        self.cache.batch_select_indices(rows)
        self.attention_mask = self.attention_mask[rows]
        self.positions = self.positions[rows]
        if self.encoded is not None:
            self.encoded = self.encoded[rows]
