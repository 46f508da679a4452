"""Models of GPT style."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from align.core.tensor_ops import Padded
from align.models.backbone.attention import SEQUENCE
from align.models.backbone.contract import Backbone, DecodingState
from align.models.backbone.layout import pack_rows, packed_mask


class DecoderBackbone(Backbone):
    """GPT style: one row holds a prompt and its responses, padded on the right only.

    With one response a row, causal attention needs no mask (the fast kernel). With several, a 4-D additive mask lets each
    response see the prompt and itself, and positions restart after the prompt.

    A prefix language model (`prefix_lm` in its config) always has a mask: its prompt tokens see the whole prompt (UniLM,
    arXiv 1905.03197; T5, arXiv 1910.10683, figure 4).
    """

    prompt_in_row = True

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return not is_prefix_lm(self.model.config)

    @property
    def supports_sequence_parallel(self) -> bool:
        return self.causal

    def fits(self, prompt_length: int, response_length: int) -> bool:
        return self.context_length is None or prompt_length + response_length <= self.context_length

    def tokens_in_memory(self, prompt_length: int, response_lengths: Sequence[int]) -> int:
        if self.can_pack(prompt_length + max(response_lengths)):
            return prompt_length + sum(response_lengths)
        return len(response_lengths) * (prompt_length + max(response_lengths))

    def can_pack(self, longest: int) -> bool:
        """Return whether responses may share their prompt's row if prompt and longest response have `longest` tokens.

        A 4-D mask replaces the model's sliding window: a text has to fit that window.
        """
        window = sliding_window(self.model.config)
        return self.shares_prompts and (window is None or longest <= window)

    def hidden(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        packed = prompt_of_response is not None and self.shares_prompts and len(prompt_of_response) > len(prompt.lengths)
        packed = packed and self.can_pack(int((prompt.lengths[prompt_of_response] + response.lengths).max()))
        if not packed:
            prompt, prompt_of_response = prompt if prompt_of_response is None else prompt.rows(prompt_of_response), None
        masked = packed or not self.causal  # otherwise positions are 0..n-1, which every model assumes without position ids
        rows = pack_rows(prompt, response, prompt_of_response)
        extra: dict[str, Any] = {}
        if masked:
            mask = packed_mask(rows.segments, self.model.dtype, whole_prompt=not self.causal)
            extra = {"position_ids": rows.positions, "attention_mask": mask}
        states = self._read_shared(rows.ids) if self.sequence else self._read(rows.ids, **extra)
        return states[rows.row, rows.column]

    def _read(self, ids: Tensor, **extra: Any) -> Tensor:
        states: Tensor = self.model.base_model(input_ids=ids, use_cache=False, **extra).last_hidden_state
        return states

    def _read_shared(self, ids: Tensor) -> Tensor:
        """Return states [P, L, H] of rows [P, L] of which each process of `sequence` computes a part."""
        sequence = self.sequence
        assert sequence is not None
        ids = pad(ids, (0, -ids.shape[1] % sequence.size))
        positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        own = {"position_ids": sequence.own_tokens(positions), SEQUENCE: sequence}
        return sequence.all_tokens(self._read(sequence.own_tokens(ids), **own))

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

    def decode_step(self, state: DecodingState, tokens: Tensor) -> Tensor:
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


def is_prefix_lm(config: PreTrainedConfig) -> bool:
    """Return whether a decoder's prompts see themselves whole, as noted in its config by `make_prefix_lm`."""
    return bool(getattr(config, "prefix_lm", False))


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Return the smallest number of tokens that a layer of a decoder looks back; None: all."""
    named = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size"))
    return min((int(window) for window in named if window), default=None)
