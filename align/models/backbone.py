"""The one file that knows T5 from GPT.

Every other module speaks of prompts and responses. A decoder reads them laid end to end in one row; an encoder-decoder
reads the prompt with its encoder and the response with its decoder. Both give the same thing: hidden states from which
response tokens are predicted (`hidden[:, t]` predicts token t) and after which a reward is read
(`hidden[:, length]`, the state after the last real token).
"""

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from align.errors import UserError
from align.flops import Matrices, Shape, Stack, matrices_of
from align.models.decoding import DecodingState
from align.models.layout import lay_out, segment_mask
from align.models.verification import verify
from align.tensor_ops import Padded


class Backbone(nn.Module, ABC):
    """A language model behind one contract for decoders and encoder-decoders.

    Use `Backbone.of(model)`: it picks the kind and checks on a few tokens that hidden states and logits computed here
    equal the model's own.
    """

    one_row_per_conversation: bool
    """True if a response may hold several turns (their loss is masked); False if each turn needs a row of its own."""

    def __init__(self, model: PreTrainedModel, peft_model: PeftModel | None = None) -> None:
        super().__init__()
        self.model = model
        # Outside the module tree: the adapter layers are already inside `model`, and must not be listed twice.
        self._unlisted: dict[str, Any] = {"peft": peft_model}
        self._chosen: tuple[str | None] | None = None  # what `adapter` was entered with, the innermost; None: not entered
        self.shares_prompts = False

    @staticmethod
    def of(model: PreTrainedModel, peft_model: PeftModel | None = None, check: bool = True) -> "Backbone":
        """Wrap `model`; with `check`, compare with the model's own logits and learn whether rows can share a prompt.

        Args:
            model: a causal or sequence-to-sequence language model from transformers.
            peft_model: the PEFT model whose adapter layers are inside `model`, if any.

        Raises:
            UserError: if the architecture computes its logits in a way that this class does not reproduce.
        """
        kind = EncoderDecoderBackbone if model.config.is_encoder_decoder else DecoderBackbone
        backbone = kind(model, peft_model)
        if check:
            backbone.shares_prompts = verify(backbone)
        return backbone

    @property
    def peft(self) -> PeftModel | None:
        """The PEFT model whose adapters live in this backbone."""
        return self._unlisted["peft"]

    @property
    def hidden_size(self) -> int:
        """H, the width of a hidden state."""
        return self.model.config.hidden_size

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def context_length(self) -> int | None:
        """Most tokens in one row (prompt and response together for a decoder), or None where the model sets no limit."""
        return getattr(self.model.config, "max_position_embeddings", None) or getattr(self.model.config, "n_positions", None)

    @abstractmethod
    def fits(self, prompt_length: int, response_length: int) -> bool:
        """Whether the model can read a prompt and a response of these lengths."""

    @abstractmethod
    def row_tokens(self, prompt_length: int, response_lengths: list[int]) -> int:
        """Tokens that are held in memory for a prompt and its responses."""

    @abstractmethod
    def save_classifier(self, folder: Path, state: Mapping[str, Tensor], head: Tensor) -> None:
        """Save the backbone with a reward head in the form that other libraries load.

        Args:
            state: whole weights by their names in `self.model`.
            head: [1, H] weight.
        """

    def require_classifier(self) -> None:
        """Refuse to train a reward model that could not be saved at the end.

        Raises:
            UserError: if transformers has no classifier of this architecture.
        """

    def classifier_adapter(self, head: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a saved reward adapter holds beside its weights: changes to its config, further tensors."""
        return {}, {}

    def require_prompt_in_row(self, engine: str) -> None:
        """Refuse a model for which `engine` is not made: vLLM continues a row of tokens and knows no separate encoder.

        Raises:
            UserError: for an encoder-decoder.
        """

    def require_fit(self, prompt_length: int, response_length: int, where: str) -> None:
        """Refuse what the model cannot read.

        Raises:
            UserError: if prompt and response are beyond the model's context.
        """
        if not self.fits(prompt_length, response_length):
            raise UserError(
                f"{where}: {prompt_length} prompt and {response_length} response tokens do not fit the model's context of "
                f"{self.context_length}; lower the limits and set overlong to drop or truncate"
            )

    @abstractmethod
    def hidden(self, prompt: Padded, response: Padded, owner: Tensor | None = None) -> Tensor:
        """Hidden states [R, T+1, H] of R responses.

        Args:
            prompt: N prompts; each is read once, however many responses it has.
            response: R responses.
            owner: [R] the prompt of each response, ascending; None: response i answers prompt i.

        Returns:
            `[:, t]` predicts response token t; `[:, t+1]` is the state after it. Positions past a response's length
            hold values without meaning.
        """

    @abstractmethod
    def rehearse(self, count: int, prompt: int, responses: list[int]) -> Tensor:
        """States [n, H] that predict the response tokens of `count` prompts and responses of these lengths, all token 0.

        For counting memory on tensors without data, where `hidden` cannot look at lengths.
        """

    @abstractmethod
    def shape(self, adapter: str | None) -> Shape:
        """What the cost of a token depends on, with `adapter` in use (None: the bare base)."""

    @property
    def cached_numbers(self) -> int:
        """Numbers that sampling keeps for each token of prompt and response: a key and a value in every layer."""
        config = self.model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return 2 * self._layers("decoder") * heads * self._attention_width() // config.num_attention_heads

    def _layers(self, part: str) -> int:
        config = self.model.config
        named = (getattr(config, name, None) for name in (f"{part}_layers", f"num_{part}_layers"))
        return next((count for count in named if count), config.num_hidden_layers)

    def _attention_width(self) -> int:
        """H Q, the heads of an attention layer times the width of a head."""
        config = self.model.config
        head = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
        return config.num_attention_heads * head if head else config.hidden_size

    def _vocabulary(self) -> Matrices:
        out = self.model.get_output_embeddings()
        return matrices_of(out.named_modules(), None) if out is not None else Matrices()

    @abstractmethod
    def start(self, prompt: Padded) -> tuple[DecodingState, Tensor]:
        """Read prompts for sampling: the state to go on from and the hidden state [B, H] that predicts token 0."""

    @abstractmethod
    def step(self, state: DecodingState, tokens: Tensor) -> Tensor:
        """Append one token [B] to each row; the hidden state [B, H] that predicts the next."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., H] -> [.., V]; call it on response positions only, prompts need no vocabulary product.

        Raises:
            UserError: if the model was saved as a reward model, without its vocabulary matrix.
        """
        config, vocabulary = self.model.config, self.model.get_output_embeddings()
        if vocabulary is None:
            raise UserError(
                f"model '{config.name_or_path}' is a reward model: without a vocabulary matrix it cannot be a language model"
            )
        if getattr(config, "scale_decoder_outputs", False):  # T5 with tied embeddings
            hidden = hidden * config.d_model**-0.5
        logits = vocabulary(hidden)
        if getattr(config, "logits_scaling", None):  # Granite
            logits = logits / config.logits_scaling
        if getattr(config, "logit_scale", None):  # Cohere
            logits = logits * config.logit_scale
        if getattr(config, "final_logit_softcapping", None):  # Gemma 2
            logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
        return logits

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """Compute with the adapter `name`, or with the bare base for None.

        PEFT's own switches also change `requires_grad`, which must not move under an optimiser or a DeepSpeed engine
        that was built on it; so only the two fields that choose the computation are set, and set back.
        """
        kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)  # the latter: whole modules that an adapter has of its own
        layers = [layer for layer in self.model.modules() if isinstance(layer, kinds)]
        outer, self._chosen = self._chosen, (name,)
        before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
        for layer in layers:
            layer._disable_adapters = name is None
            if name is not None:
                layer._active_adapter = [name]
        try:
            yield
        finally:
            self._chosen = outer
            for layer, (active, disabled) in zip(layers, before, strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled

    def recompute_contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """For `context_fn` of torch's checkpointing: a block that is computed again in the backward pass, when `adapter`
        has long been left, must compute with the adapter that it was computed with first.
        """
        return nullcontext(), self.adapter(*self._chosen) if self._chosen else nullcontext()

    @abstractmethod
    def plain_logits(self, prompt: Padded, response: Padded) -> Tensor:
        """The model's own logits [B, T, V] for the response tokens; no padding allowed."""


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

    def hidden(self, prompt: Padded, response: Padded, owner: Tensor | None = None) -> Tensor:
        packed = owner is not None and self.shares_prompts and len(owner) > len(prompt.lengths)
        packed = packed and self._can_pack(int((prompt.lengths[owner] + response.lengths).max()))
        if owner is not None and not packed:
            prompt, owner = prompt.rows(owner), None
        rows = lay_out(prompt, response, owner)
        extra: dict[str, Tensor] = {}
        if packed:  # else, without padding on the left, positions are 0..n-1, as every model assumes when told nothing
            extra = {"position_ids": rows.positions, "attention_mask": segment_mask(rows.segments, self.model.dtype)}
        states = self.model.base_model(input_ids=rows.ids, use_cache=False, **extra).last_hidden_state
        return states[rows.row, rows.column]

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

    def hidden(self, prompt: Padded, response: Padded, owner: Tensor | None = None) -> Tensor:
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


def model_class(config: PreTrainedConfig) -> Any:
    """The transformers class that loads a checkpoint: language model of either kind, or a decoder with a `score` head."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    names = config.architectures or []
    if any(name.endswith("ForSequenceClassification") for name in names):
        return AutoModelForSequenceClassification
    return AutoModelForCausalLM


def _pad_id(config: PreTrainedConfig) -> int:
    """The pad id of a classifier: it reads its score at the last token that is not this one."""
    for candidate in (config.pad_token_id, config.eos_token_id):
        if isinstance(candidate, list):
            candidate = candidate[0]
        if candidate is not None:
            return candidate
    return 0


def attention_kernel(config: PreTrainedConfig) -> str:
    """Which of transformers' attention implementations to load a model with.

    T5 trains a bias inside its attention. The fused CPU and GPU kernels have no gradient for it, so training would leave
    them for another path than scoring takes, and in bfloat16 the ratio at the first minibatch would not be 1.
    """
    return "eager" if hasattr(config, "relative_attention_num_buckets") else "sdpa"


def task_type(model: PreTrainedModel) -> str:
    """PEFT's name for what the model does, written into adapters so that PEFT's own classes load them."""
    return "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
