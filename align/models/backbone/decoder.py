"""GPT-style models, and the packing of prompts and responses into their rows."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from align.core.tensor_ops import Padded, length_mask
from align.models.backbone.attention import block_mask
from align.models.backbone.contract import Backbone, DecodingState
from align.models.backbone.static_decoding import StaticDecodingState, can_decode_statically


class DecoderBackbone(Backbone):
    """GPT style: one row holds a prompt and its responses, padded on the right only.

    With one response a row, causal attention needs no mask (the fast kernel). With several, a 4-D additive mask lets each
    response see the prompt and itself, and positions restart after the prompt.

    A prefix language model (`prefix_lm` in its config) always has a mask: its prompt tokens see the full prompt (UniLM,
    arXiv 1905.03197; T5, arXiv 1910.10683, figure 4).
    """

    prompt_in_row = True

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return not is_prefix_lm(self.model.config)

    def tokens_in_memory(self, prompt_length: int, response_lengths: Sequence[int]) -> int:
        if self.can_pack(prompt_length + max(response_lengths)):
            return prompt_length + sum(response_lengths)
        return super().tokens_in_memory(prompt_length, response_lengths)

    def can_pack(self, longest: int) -> bool:
        """Return whether responses may share their prompt's row if prompt and longest response have `longest` tokens.

        A 4-D mask replaces the model's sliding window, so the text must fit the window.
        """
        window = sliding_window(self.model.config)
        return self.shares_prompts and (window is None or longest <= window)

    def hidden(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        packed = prompt_of_response is not None and self.shares_prompts and len(prompt_of_response) > len(prompt.lengths)
        packed = packed and self.can_pack(int((prompt.lengths[prompt_of_response] + response.lengths).max()))
        if not packed:
            prompt, prompt_of_response = prompt if prompt_of_response is None else prompt.rows(prompt_of_response), None
        masked = packed or not self.causal  # otherwise positions are 0..n-1, which every model assumes without position ids
        rows = pack_rows(prompt, response, prompt_of_response, 128 if masked and self.block_attention else 1)
        extra: dict[str, Any] = {}
        if masked:
            make_mask = block_mask if self.block_attention else partial(packed_mask, dtype=self.model.dtype)
            mask: Any = make_mask(rows.segments, whole_prompt=not self.causal)
            extra = {"position_ids": rows.positions, "attention_mask": mask}
        with self.recomputing():
            states: Tensor = self.model.base_model(input_ids=rows.ids, use_cache=False, **extra).last_hidden_state
        return states[rows.row, rows.column]

    def prefill(self, prompt: Padded) -> tuple[DecodingState, Tensor]:
        width = prompt.ids.shape[1]
        shift = width - prompt.lengths  # the only left padding there is: sampling appends on the right
        columns = torch.arange(width, device=self.device)[None, :] - shift[:, None]
        ids = prompt.ids.gather(1, columns.clamp(min=0))
        attention_mask = (columns >= 0).long()
        cache = DynamicCache(config=self.model.config)
        seen = attention_mask if self.causal else packed_mask(attention_mask - 1, self.model.dtype, whole_prompt=True)
        states = self.model.base_model(
            input_ids=ids,
            attention_mask=seen,
            position_ids=columns.clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return DecodingState(cache, attention_mask, prompt.lengths.clone()), states[:, -1]

    def reserve(self, state: DecodingState, room: int) -> DecodingState:
        # If responses can share a prompt's row, the model accepts any mask and any positions.
        static = room > 0 and self.shares_prompts and can_decode_statically(self.model, state)
        return StaticDecodingState(state, self.model, room) if static else state

    def decode_step(self, state: DecodingState, tokens: Tensor) -> Tensor:
        if isinstance(state, StaticDecodingState):
            return state.step(self.model.base_model, tokens)
        state.attention_mask = torch.cat([state.attention_mask, torch.ones_like(tokens)[:, None]], dim=1)
        states: Tensor = self.model.base_model(
            input_ids=tokens[:, None],
            attention_mask=state.attention_mask,
            position_ids=state.positions[:, None],
            past_key_values=state.cache,
            use_cache=True,
        ).last_hidden_state
        state.positions = state.positions + 1
        return states[:, -1]


class PackedRows(NamedTuple):
    """Rows of prompts with their responses, and the indices of each response's states."""

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


def pack_rows(prompt: Padded, response: Padded, prompt_of_response: Tensor | None, multiple: int = 1) -> PackedRows:
    """Put each prompt and its responses into one row, without padding between them.

    Args:
        prompt_of_response: [B] prompt index of each response, ascending. If None, response i answers prompt i.
        multiple: L is rounded up to a multiple, because FlexAttention compiles a kernel for each L.
    """
    device, count, width = prompt.ids.device, len(response.lengths), response.ids.shape[1]
    prompt_of = torch.arange(count, device=device) if prompt_of_response is None else prompt_of_response
    before = torch.cumsum(response.lengths, 0) - response.lengths  # response tokens before each response, over all rows
    first = torch.searchsorted(prompt_of, torch.arange(len(prompt.lengths), device=device))  # each row's first response
    start = prompt.lengths[prompt_of] + before - before[first][prompt_of]  # [B] first column of each response
    row_lengths = prompt.lengths.index_add(0, prompt_of, response.lengths)
    length = -(-int(row_lengths.max()) // multiple) * multiple

    shape = (len(prompt.lengths), length)
    ids = torch.zeros(shape, dtype=torch.long, device=device)
    positions, segments = torch.zeros_like(ids), torch.full_like(ids, -1)
    ids[:, : prompt.ids.shape[1]] = prompt.ids[:, :length].masked_fill(~prompt.mask()[:, :length], 0)
    positions[:] = torch.arange(length, device=device)
    segments[length_mask(prompt.lengths, length)] = 0

    number, offset = response.mask().nonzero(as_tuple=True)  # only once, because the CPU waits for the GPU
    rows, columns = prompt_of[number], start[number] + offset
    ids[rows, columns] = response.ids[number, offset]
    positions[rows, columns] = prompt.lengths[rows] + offset
    segments[rows, columns] = number - first[rows] + 1

    # A shared row has more columns than the model's position table; padding must not index past the table.
    positions = positions.masked_fill(segments < 0, 0)
    after = (start[:, None] + torch.arange(width, device=device)).clamp(max=length - 1)
    column = torch.cat([prompt.lengths[prompt_of][:, None] - 1, after], dim=1)
    return PackedRows(ids, positions, segments, prompt_of[:, None], column)


def packed_mask(segments: Tensor, dtype: torch.dtype, whole_prompt: bool = False) -> Tensor:
    """Return an additive mask [P, 1, L, L]: a token sees its prompt, and its response up to itself.

    Args:
        segments: [P, L] from `pack_rows`.
        whole_prompt: whether prompt tokens see the full prompt.
    """
    own, other = segments[:, :, None], segments[:, None, :]
    causal = torch.ones(own.shape[1], own.shape[1], dtype=torch.bool, device=segments.device).tril()
    allowed = causal & ((own == other) | (other == 0))
    if whole_prompt:
        allowed = allowed | ((own == 0) & (other == 0))
    mask = torch.zeros(allowed.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min)[:, None]


def is_prefix_lm(config: PreTrainedConfig) -> bool:
    """Return whether prompt tokens of a decoder see the full prompt, as set in its config by `make_prefix_lm`."""
    return bool(getattr(config, "prefix_lm", False))


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Return the smallest attention window of a decoder's layers in tokens, or None if unlimited."""
    named = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size"))
    return min((int(window) for window in named if window), default=None)
