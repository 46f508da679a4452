"""What every other module knows of a model: it reads prompts and responses.

A decoder reads them laid end to end in one row; an encoder-decoder reads the prompt with its encoder and the response with
its decoder. Both give the same thing: hidden states from which response tokens are predicted (`hidden[:, t]` predicts token
t) and after which a reward is read (`hidden[:, length]`, the state after the last real token).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from align.errors import UserError
from align.flops import Matrices, Shape, matrices_of
from align.models.backbone.decoding import DecodingState
from align.tensor_ops import Padded


class Backbone(nn.Module, ABC):
    """A language model behind one contract for decoders and encoder-decoders.

    Use `wrap(model)`: it picks the kind and checks on a few tokens that hidden states and logits computed here equal the
    model's own.
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
    def hidden(self, prompt: Padded, response: Padded, owner: Tensor | None = None, prefix: Sequence[int] = ()) -> Tensor:
        """Hidden states [R, T+1, H] of R responses.

        Args:
            prompt: N prompts; each is read once, however many responses it has.
            response: R responses.
            owner: [R] the prompt of each response, ascending; None: response i answers prompt i.
            prefix: token ids that stand in front of every prompt; read once for all, where responses share a row.

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
