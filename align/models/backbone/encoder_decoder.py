"""Models of T5 style."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from align.errors import UserError
from align.flops import Matrices, Shape, Stack, matrices_of
from align.models.backbone.contract import Backbone
from align.models.backbone.decoding import DecodingState
from align.tensor_ops import Padded


class EncoderDecoderBackbone(Backbone):
    """T5 and BART style: the encoder reads the prompt once, the decoder reads the response behind a start token."""

    one_row_per_conversation = False

    def fits(self, prompt_length: int, response_length: int) -> bool:
        # T5's relative positions have no end: its `n_positions` is the length it was trained on. BART's table has one.
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return limit is None or (prompt_length <= limit and response_length + 1 <= limit)

    def row_tokens(self, prompt_length: int, response_lengths: list[int]) -> int:
        return prompt_length + len(response_lengths) * (1 + max(response_lengths))

    def require_prompt_in_row(self, engine: str) -> None:
        name = self.model.config.model_type
        raise UserError(f"{engine}: vLLM cannot sample from an encoder-decoder ({name}); use engine transformers")

    def save_classifier(self, folder: Path, state: Mapping[str, Tensor], head: Tensor) -> None:
        """As the language model it is: transformers' T5 classifier reads one text with both halves, another model."""
        self.model.save_pretrained(folder, state_dict=dict(state))

    def _encode(self, prompt: Padded) -> Tensor:
        return self.model.get_encoder()(input_ids=prompt.ids, attention_mask=prompt.mask().long()).last_hidden_state

    def rehearse(self, count: int, prompt: int, responses: list[int]) -> Tensor:
        ids = torch.zeros(count, prompt, dtype=torch.long, device=self.device)
        mask, rows = torch.ones_like(ids), count * len(responses)
        encoded = self.model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        states = self.model.get_decoder()(
            input_ids=torch.zeros(rows, 1 + max(responses), dtype=torch.long, device=self.device),
            encoder_hidden_states=encoded.repeat_interleave(len(responses), 0),
            encoder_attention_mask=mask.repeat_interleave(len(responses), 0),
            use_cache=False,
        ).last_hidden_state
        return states[:, :-1].reshape(rows * max(responses), -1)

    def shape(self, adapter: str | None) -> Shape:
        width = self._attention_width()
        decoder = list(self.model.get_decoder().named_modules())
        # Keys and values of the attention to the prompt: names of T5 and of BART.
        cross = [pair for pair in decoder if re.search(r"(EncDecAttention\.[kv]|encoder_attn\.[kv]_proj)\b", pair[0])]
        of_prompt, both = matrices_of(cross, adapter), matrices_of(decoder, adapter)
        return Shape(
            Stack(
                Matrices(both.trained - of_prompt.trained, both.frozen - of_prompt.frozen), self._layers("decoder") * width
            ),
            self._vocabulary(),
            Stack(matrices_of(self.model.get_encoder().named_modules(), adapter), self._layers("encoder") * width),
            of_prompt,
        )

    def _start_tokens(self, count: int) -> Tensor:
        return torch.full((count, 1), self.model.config.decoder_start_token_id, device=self.device)

    def hidden(self, prompt: Padded, response: Padded, owner: Tensor | None = None, prefix: Sequence[int] = ()) -> Tensor:
        prompt = prompt.behind(prefix)  # an encoder looks both ways: what a prefix becomes depends on the prompt
        encoded, mask = self._encode(prompt), prompt.mask().long()
        if owner is not None:
            encoded, mask = encoded[owner], mask[owner]
        # The decoder is causal and padded on the right: it needs no mask of its own.
        return (
            self.model.get_decoder()(
                input_ids=torch.cat([self._start_tokens(len(response.lengths)), response.ids], dim=1),
                encoder_hidden_states=encoded,
                encoder_attention_mask=mask,
                use_cache=False,
            )
        ).last_hidden_state

    def start(self, prompt: Padded) -> tuple[DecodingState, Tensor]:
        cache = EncoderDecoderCache(DynamicCache(config=self.model.config), DynamicCache(config=self.model.config))
        state = DecodingState(cache, prompt.mask().long(), torch.zeros_like(prompt.lengths), self._encode(prompt))
        return state, self.step(state, self._start_tokens(len(prompt.lengths))[:, 0])

    def step(self, state: DecodingState, tokens: Tensor) -> Tensor:
        states = self.model.get_decoder()(
            input_ids=tokens[:, None],
            encoder_hidden_states=state.encoded,
            encoder_attention_mask=state.attention_mask,
            past_key_values=state.cache,
            use_cache=True,
        ).last_hidden_state
        state.positions = state.positions + 1
        return states[:, -1]

    def plain_logits(self, prompt: Padded, response: Padded) -> Tensor:
        decoder_ids = torch.cat([self._start_tokens(1), response.ids[:, :-1]], dim=1)
        return self.model(input_ids=prompt.ids, decoder_input_ids=decoder_ids, use_cache=False).logits
