"""T5-style models."""

from collections.abc import Sequence

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.backbone.contract import Backbone, DecodingState

NO_LIMIT = 2**31 - 1
"""Maximum tokens of a row per expert."""


class EncoderDecoderBackbone(Backbone):
    """T5 and BART style: the encoder processes the prompt once, the decoder processes the response after a start token."""

    prompt_in_row = False

    def __init__(self, model: PreTrainedModel, peft_model: PeftModel | None = None) -> None:
        super().__init__(model, peft_model)
        if getattr(model.config, "decoder_start_token_id", None) is None:
            raise UserError(
                f"model type '{model.config.model_type}': its config.json names no decoder_start_token_id, the token that a "
                "response follows; write its id there (of mBART: the target language)"
            )
        for module in model.modules():
            if hasattr(module, "expert_capacity"):
                # Switch drops the tokens of a row beyond an expert's capacity. Token-by-token sampling drops none, so
                # scoring would use another model.
                module.expert_capacity = NO_LIMIT  # type: ignore[assignment]

    @property
    def called_modules(self) -> list[nn.Module]:
        return [self.encoder, self.decoder]

    @property
    def encoder(self) -> PreTrainedModel:
        """Module that processes prompts."""
        encoder: PreTrainedModel = self.model.get_encoder()
        return encoder

    @property
    def decoder(self) -> PreTrainedModel:
        """Module that processes responses."""
        decoder: PreTrainedModel = self.model.get_decoder()
        return decoder

    def logits(self, hidden: Tensor) -> Tensor:
        # Inputs of a tied vocabulary matrix are divided by sqrt(H) in T5 and LongT5, but never in mT5.
        config = self.model.config
        tied = config.tie_word_embeddings if config.model_type in ("umt5", "switch_transformers") else False
        divides = tied or getattr(config, "scale_decoder_outputs", False)
        return super().logits(hidden * config.d_model**-0.5 if divides else hidden)

    def fits(self, prompt_length: int, response_length: int) -> bool:
        # T5's relative positions are unlimited: its `n_positions` is the training length. BART's position table is finite.
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return limit is None or (prompt_length <= limit and response_length + 1 <= limit)

    def tokens_in_memory(self, prompt_length: int, response_lengths: Sequence[int]) -> int:
        return prompt_length + len(response_lengths) * (1 + max(response_lengths))

    def _encode(self, prompt: Padded) -> Tensor:
        """Return encoder states [P, L, H] of P prompts."""
        with self.recomputing():
            states: Tensor = self.encoder(input_ids=prompt.ids, attention_mask=prompt.mask().long()).last_hidden_state
        return states

    def _start_tokens(self, count: int) -> Tensor:
        return torch.full((count, 1), self.model.config.decoder_start_token_id, device=self.device)

    def hidden(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        encoded, mask = self._encode(prompt), prompt.mask().long()
        if prompt_of_response is not None:
            encoded, mask = encoded[prompt_of_response], mask[prompt_of_response]
        with self.recomputing():
            states: Tensor = self.decoder(  # causal: padding on the right of responses needs no mask
                input_ids=torch.cat([self._start_tokens(len(response.ids)), response.ids], dim=1),
                encoder_hidden_states=encoded,
                encoder_attention_mask=mask,
                use_cache=False,
            ).last_hidden_state
        return states

    def prefill(self, prompt: Padded) -> tuple[DecodingState, Tensor]:
        cache = EncoderDecoderCache(DynamicCache(config=self.model.config), DynamicCache(config=self.model.config))
        state = DecodingState(cache, prompt.mask().long(), torch.zeros_like(prompt.lengths), self._encode(prompt))
        return state, self.decode_step(state, self._start_tokens(len(prompt.lengths))[:, 0])

    def decode_step(self, state: DecodingState, tokens: Tensor) -> Tensor:
        states: Tensor = self.decoder(
            input_ids=tokens[:, None],
            encoder_hidden_states=state.encoded,
            encoder_attention_mask=state.attention_mask,
            past_key_values=state.cache,
            use_cache=True,
        ).last_hidden_state
        state.positions = state.positions + 1
        return states[:, -1]


def has_separate_matrix(model: PreTrainedModel) -> bool:
    """Return whether a T5 has an output matrix besides the embedding, which reads unscaled states (T5 v1.1, mT5, LongT5)."""
    config, head = model.config, model.get_output_embeddings()
    known = config.model_type in ("t5", "mt5", "longt5") and not getattr(config, "scale_decoder_outputs", False)
    return known and head is not None and head.weight is not model.get_input_embeddings().weight
