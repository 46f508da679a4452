"""What sampling carries from token to token."""

from typing import Any

from torch import Tensor


class DecodingState:
    """The cache, and which of its columns are padding."""

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
