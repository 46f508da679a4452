"""The interface of every model to the other modules: prompts and responses.

A decoder processes a prompt and its response as one row of tokens. An encoder-decoder processes the prompt with its encoder
and the response with its decoder. Both return hidden states: `hidden[:, t]` predicts response token t, and
`hidden[:, length]` is the state after the last token. An encoder has no such states. All kinds have a `summary` of a prompt
and a response, the input of a reward head.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from align.core.errors import UserError
from align.core.tensor_ops import Padded


@dataclass(eq=False)
class DecodingState:
    """The state of sampling between tokens: the cache and its padding mask."""

    cache: Any
    attention_mask: Tensor
    """[B, columns so far]: 1 on real tokens (for an encoder-decoder: of the prompt)."""
    positions: Tensor
    """[B] position of the next token."""
    encoded: Tensor | None = None
    """[B, L, H] of an encoder-decoder's prompts."""

    def is_worth_selecting(self, left: int) -> bool:
        """Return whether to drop finished rows if `left` rows are unfinished."""
        return left < len(self.positions)

    def select(self, rows: Tensor) -> None:
        """Keep only the unfinished `rows` [kept] (int64)."""
        self.cache.batch_select_indices(rows)
        self.attention_mask = self.attention_mask[rows]
        self.positions = self.positions[rows]
        if self.encoded is not None:
            self.encoded = self.encoded[rows]


class Backbone(nn.Module):
    """A model behind one contract for decoders, encoder-decoders and encoders. Use `wrap(model)`, which verifies it.

    Attributes:
        model: the transformers model, with adapter layers inside if there are any.
        prompt_in_row: True if one row of tokens holds a prompt and its response (decoders, encoders).
        shares_prompts: whether one row can hold several responses to a prompt.
        recomputes: whether the backward pass recomputes the activations of layers (gradient checkpointing).
    """

    prompt_in_row: bool
    causal = False
    """Whether each token, including prompt tokens, sees only earlier tokens. A response may then hold several turns of a
    conversation, and a language-model loss can be taken on the prompt."""
    block_attention = False
    """Whether masks are FlexAttention's (`align.models.backbone.attention.block_mask`); only decoders have any."""

    def __init__(self, model: PreTrainedModel, peft_model: PeftModel | None = None) -> None:
        super().__init__()
        self.model = model
        # Outside the module tree: the adapter layers are already inside `model` and must not be listed twice.
        self._unlisted: dict[str, PeftModel | None] = {"peft": peft_model}
        self._entered_adapter: tuple[str | None] | None = None  # of the innermost `adapter` context, or None
        self.shares_prompts = self.recomputes = False

    @property
    def peft(self) -> PeftModel | None:
        """The PEFT model whose adapters are inside this backbone."""
        return self._unlisted["peft"]

    @property
    def called_modules(self) -> list[nn.Module]:
        """The modules of the model that a forward pass calls, except its vocabulary matrix."""
        return [self.model.base_model]

    @property
    def hidden_size(self) -> int:
        """H, the width of a hidden state."""
        config = self.model.config
        return int(getattr(config, "word_embed_proj_dim", None) or config.hidden_size)  # OPT-350m projects its states

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.device

    @property
    def context_length(self) -> int | None:
        """Maximum tokens per row (prompt and response together for a decoder), or None for no limit."""
        config = self.model.config
        limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        return int(limit) if limit else None

    def fits(self, prompt_length: int, response_length: int) -> bool:
        """Return whether a prompt and a response of these lengths fit the model's context."""
        return self.context_length is None or prompt_length + response_length <= self.context_length

    def require_fit(self, prompt_length: int, response_length: int, where: str) -> None:
        """Raise a UserError that names a record by `where` if its prompt and response exceed the model's context."""
        if not self.fits(prompt_length, response_length):
            raise UserError(
                f"{where}: {prompt_length} prompt and {response_length} response tokens do not fit the model's context of "
                f"{self.context_length}; lower the limits and set overlong to drop or truncate"
            )

    def tokens_in_memory(self, prompt_length: int, response_lengths: Sequence[int]) -> int:
        """Return the number of tokens in memory for a prompt with its responses, used to split micro-batches."""
        return len(response_lengths) * (prompt_length + max(response_lengths))

    def hidden(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        """Return hidden states [B, T+1, H] of B responses.

        Args:
            prompt: P prompts. With `shares_prompts`, each is processed once, however many responses it has.
            response: B responses.
            prompt_of_response: [B] prompt index of each response, ascending. If None, response i answers prompt i.

        Returns:
            `[:, t]` predicts response token t; `[:, t+1]` is the state after it. Values past a response's length are
            undefined.

        Raises:
            UserError: if the model is an encoder.
        """
        refuse_language_model(self.model.config.model_type)

    def summary(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        """Return one state [B, H] per prompt with its response, the input of a reward head. Arguments are as for `hidden`.

        It is the state after the response's last token, or the output of an encoder's pooler.
        """
        hidden = self.hidden(prompt, response, prompt_of_response)
        return hidden[torch.arange(len(response.lengths), device=hidden.device), response.lengths]

    def prefill(self, prompt: Padded) -> tuple[DecodingState, Tensor]:
        """Process prompts for sampling. Return the decoding state and the hidden state [B, H] that predicts token 0."""
        refuse_language_model(self.model.config.model_type)

    def reserve(self, state: DecodingState, room: int) -> DecodingState:
        """Return a state with room for `room` more tokens, whose steps a GPU replays, or the same state if it cannot."""
        return state

    def decode_step(self, state: DecodingState, tokens: Tensor) -> Tensor:
        """Append one token [B] to each row; return the hidden state [B, H] that predicts the next one."""
        refuse_language_model(self.model.config.model_type)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [.., V] of states [.., H]. Call it on response positions only.

        Raises:
            UserError: if the model was saved as a reward model, without its vocabulary matrix.
        """
        config, vocabulary = self.model.config, self.model.get_output_embeddings()
        if vocabulary is None:
            raise UserError(
                f"model '{config.name_or_path}' is a reward model: without a vocabulary matrix it cannot be a language model"
            )
        logits: Tensor = vocabulary(hidden)
        bias = getattr(self.model, "final_logits_bias", None)  # BART and its kin; other than 0 in Marian
        if bias is not None:
            logits = logits + bias[0].to(logits.dtype)
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

        PEFT's methods change `requires_grad`, which must not change under an optimizer or a DeepSpeed engine. This context
        sets only the two fields that select the computation, and restores them on exit.
        """
        wrappers = (BaseTunerLayer, AuxiliaryTrainingWrapper)  # the latter: full modules in an adapter
        layers = [layer for layer in self.model.modules() if isinstance(layer, wrappers)]
        outer, self._entered_adapter = self._entered_adapter, (name,)
        before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
        for layer in layers:
            layer._disable_adapters = name is None
            if name is not None:
                layer._active_adapter = [name]
        try:
            yield
        finally:
            self._entered_adapter = outer
            for layer, (active, disabled) in zip(layers, before, strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled

    def recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return contexts for `context_fn` of gradient checkpointing.

        The backward pass recomputes a block after its `adapter` context has exited. It must use the same adapter.
        """
        return nullcontext(), self._recompute(self._entered_adapter)

    @contextmanager
    def _recompute(self, entered_adapter: tuple[str | None] | None) -> Iterator[None]:
        with self.recomputing(), self.adapter(*entered_adapter) if entered_adapter else nullcontext():
            yield

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Disable saving of activations in this context, if `recomputes` is set and gradients are on.

        transformers recomputes layers only in training mode. Layers are in training mode only inside this context; the model
        stays in evaluation mode for all other uses, also after an error.
        """
        if not (self.recomputes and torch.is_grad_enabled()):
            yield
            return
        names = ("training", "gradient_checkpointing", "_gradient_checkpointing_func")
        values = (True, True, partial(checkpoint, use_reentrant=False, context_fn=self.recompute_contexts))
        layers = [module for module in self.model.modules() if hasattr(module, "gradient_checkpointing")]
        before = [[getattr(layer, name, None) for name in names] for layer in layers]
        try:
            for layer in layers:
                for name, value in zip(names, values, strict=True):
                    setattr(layer, name, value)
            yield
        finally:
            for layer, earlier in zip(layers, before, strict=True):
                for name, value in zip(names, earlier, strict=True):
                    setattr(layer, name, value)


def refuse_language_model(model_type: str, name: str = "") -> NoReturn:
    """Raise a UserError: an encoder is not a language model."""
    raise UserError(
        f"{f'model {name!r}: ' if name else ''}model type '{model_type}' reads text in both directions (an encoder): it can "
        "be a reward model or a judge, not a language model; choose a decoder (GPT style) or an encoder-decoder (T5 style)"
    )
