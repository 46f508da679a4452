"""Models of GPT style."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForSequenceClassification, PreTrainedConfig
from transformers.cache_utils import DynamicCache

from align.errors import UserError
from align.flops import Shape, Stack, matrices_of
from align.models.backbone.contract import Backbone
from align.models.backbone.decoding import DecodingState, PrefixCache
from align.models.backbone.layout import lay_out, segment_mask
from align.tensor_ops import Padded


class DecoderBackbone(Backbone):
    """GPT style: one row holds a prompt and its responses, padded on the right only.

    With one response a row, causal attention needs no mask (the fast kernel). With several, each response sees the
    prompt and itself through a 4-D additive mask, with positions that restart after the prompt.
    """

    one_row_per_conversation = True

    def fits(self, prompt_length: int, response_length: int) -> bool:
        return self.context_length is None or prompt_length + response_length <= self.context_length

    def row_tokens(self, prompt_length: int, response_lengths: list[int]) -> int:
        if self._can_pack(prompt_length + max(response_lengths)):
            return prompt_length + sum(response_lengths)
        return len(response_lengths) * (prompt_length + max(response_lengths))

    def _can_pack(self, longest: int) -> bool:
        """Whether responses may share their prompt's row, of which prompt and longest response have `longest` tokens.

        A 4-D mask replaces the sliding window that the model would lay over a row, so a text has to fit that window.
        """
        windows = (getattr(self.model.config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        return self.shares_prompts and all(window is None or longest <= window for window in windows)

    def require_classifier(self) -> None:
        if type(self.model.config) not in AutoModelForSequenceClassification._model_mapping:
            name = self.model.config.model_type
            raise UserError(f"model type '{name}': transformers has no sequence classifier of it to save a reward model as")

    def save_classifier(self, folder: Path, state: Mapping[str, Tensor], head: Tensor) -> None:
        """As `...ForSequenceClassification` with one label: the class that TRL's RewardTrainer makes."""
        config = copy.deepcopy(self.model.config)
        config.num_labels, config.pad_token_id = 1, _pad_id(config)
        with torch.device("meta"):
            classifier = AutoModelForSequenceClassification.from_config(config, dtype=self.model.dtype)
        prefix = classifier.base_model_prefix + "."
        weights = {key: value for key, value in state.items() if key.startswith(prefix)}
        weights["score.weight"] = head.to(self.model.dtype)
        classifier.save_pretrained(folder, state_dict=weights)

    def classifier_adapter(self, head: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
        changes = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
        return changes, {"base_model.model.score.weight": head.to(self.model.dtype)}

    def hidden(self, prompt: Padded, response: Padded, owner: Tensor | None = None, prefix: Sequence[int] = ()) -> Tensor:
        packed = owner is not None and self.shares_prompts and len(owner) > len(prompt.lengths)
        packed = packed and self._can_pack(len(prefix) + int((prompt.lengths[owner] + response.lengths).max()))
        if not packed:
            prompt, owner, prefix = (prompt if owner is None else prompt.rows(owner)).behind(prefix), None, ()
        rows = lay_out(prompt, response, owner)
        extra: dict[str, Any] = {}
        if packed:  # else, without padding on the left, positions are 0..n-1, as every model assumes when told nothing
            mask = segment_mask(rows.segments, self.model.dtype)
            extra = {"position_ids": rows.positions + len(prefix), "attention_mask": pad(mask, (len(prefix), 0))}
        if prefix:
            extra["past_key_values"] = self._read_prefix(prefix)
        states = self.model.base_model(input_ids=rows.ids, use_cache=False, **extra).last_hidden_state
        return states[rows.row, rows.column]

    def _read_prefix(self, prefix: Sequence[int]) -> PrefixCache:
        cache = PrefixCache(config=self.model.config)
        self.model.base_model(torch.tensor([prefix], device=self.device), past_key_values=cache, use_cache=True)
        cache.whole = True
        return cache

    def rehearse(self, count: int, prompt: int, responses: list[int]) -> Tensor:
        packed = len(responses) > 1 and self._can_pack(prompt + max(responses))
        rows, answer = (count, sum(responses)) if packed else (count * len(responses), max(responses))
        ids = torch.zeros(rows, prompt + answer, dtype=torch.long, device=self.device)
        extra = {"position_ids": ids, "attention_mask": segment_mask(ids, self.model.dtype)} if packed else {}
        states = self.model.base_model(input_ids=ids, use_cache=False, **extra).last_hidden_state
        return states[:, prompt - 1 : -1].reshape(rows * answer, -1)

    def shape(self, adapter: str | None) -> Shape:
        body = matrices_of(self.model.base_model.named_modules(), adapter)
        return Shape(Stack(body, self._layers("decoder") * self._attention_width()), self._vocabulary())

    def start(self, prompt: Padded) -> tuple[DecodingState, Tensor]:
        width = prompt.ids.shape[1]
        shift = width - prompt.lengths  # the only left padding there is: sampling appends on the right
        columns = torch.arange(width, device=self.device)[None, :] - shift[:, None]
        ids = prompt.ids.gather(1, columns.clamp(min=0))
        attention_mask = (columns >= 0).long()
        cache = DynamicCache(config=self.model.config)
        states = self.model.base_model(
            input_ids=ids,
            attention_mask=attention_mask,
            position_ids=columns.clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return DecodingState(cache, attention_mask, prompt.lengths.clone()), states[:, -1]

    def step(self, state: DecodingState, tokens: Tensor) -> Tensor:
        state.attention_mask = torch.cat([state.attention_mask, torch.ones_like(tokens)[:, None]], dim=1)
        states = self.model.base_model(
            input_ids=tokens[:, None],
            attention_mask=state.attention_mask,
            position_ids=state.positions[:, None],
            past_key_values=state.cache,
            use_cache=True,
        ).last_hidden_state
        state.positions = state.positions + 1
        return states[:, -1]

    def plain_logits(self, prompt: Padded, response: Padded) -> Tensor:
        ids = torch.cat([prompt.ids, response.ids], dim=1)
        return self.model(input_ids=ids, use_cache=False).logits[:, prompt.ids.shape[1] - 1 : -1]


def _pad_id(config: PreTrainedConfig) -> int:
    """The pad id of a classifier: it reads its score at the last token that is not this one."""
    for candidate in (config.pad_token_id, config.eos_token_id):
        if isinstance(candidate, list):
            candidate = candidate[0]
        if candidate is not None:
            return candidate
    return 0
