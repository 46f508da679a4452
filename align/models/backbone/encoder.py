"""BERT-style models: bidirectional, without generation."""

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from align.core.tensor_ops import Padded
from align.models.backbone.contract import Backbone, refuse_language_model
from align.models.backbone.decoder import pack_rows


class SummaryState(nn.Module):
    """Replaces a classifier's last matrix `removed`, named `place`, so that the model returns the matrix's input."""

    def __init__(self, place: str, matrix: nn.Linear) -> None:
        super().__init__()
        self.place = place
        self._unlisted = (matrix,)  # outside the module tree: it is neither trained nor counted

    @property
    def removed(self) -> nn.Linear:
        return self._unlisted[0]

    def forward(self, state: Tensor) -> Tensor:
        """Return states [B, H] unchanged."""
        return state


def expose_summary(model: PreTrainedModel) -> SummaryState:
    """Replace a classifier's last matrix with a `SummaryState`, unless already done."""
    for module in model.modules():
        if isinstance(module, SummaryState):
            return module
    inside = f"{model.base_model_prefix}."
    outside = [(name, module) for name, module in model.named_modules() if not f"{name}.".startswith(inside)]
    matrices = [(name, module) for name, module in outside if isinstance(module, nn.Linear)]
    if not type(model).__name__.endswith("ForSequenceClassification") or not matrices:
        refuse_language_model(model.config.model_type)
    place, matrix = matrices[-1]
    summary = SummaryState(place, matrix)
    model.set_submodule(place, summary)
    return summary


def head_modules(model: PreTrainedModel) -> list[str]:
    """Return the modules between states and summary state (poolers), which pretraining may lack."""
    inside = (
        [f"{model.base_model_prefix}.pooler"] if isinstance(getattr(model.base_model, "pooler", None), nn.Module) else []
    )
    return inside + [
        name
        for name, child in model.named_children()
        if name != model.base_model_prefix and any(True for _ in child.parameters())
    ]


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the maximum number of positions of a model, or None for no limit."""
    config = model.config
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if not limit:
        return None
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    first = next((table.padding_idx for table in tables if isinstance(table, nn.Embedding)), None)
    return int(limit) if first is None else int(limit) - first - 1  # RoBERTa counts from its padding id


class EncoderBackbone(Backbone):
    """BERT style: a row holds a prompt and one response as a pair, with token types if the model has them.

    The tokenizer writes the marks of a pair (`[CLS] prompt [SEP]`, `response [SEP]`), see `PairTokenization`. A reward head
    uses the input of the classifier's last matrix.
    """

    prompt_in_row = True

    def __init__(self, model: PreTrainedModel, peft_model: PeftModel | None = None) -> None:
        super().__init__(model, peft_model)
        self.summary_state = expose_summary(model)
        if getattr(model.config, "attention_type", None) == "block_sparse":
            # BigBird attends to the last block of a batch's width from all positions, so its sparse states depend on the
            # padding; and once it has read a short row, it reads long ones in full too.
            model.base_model.set_attention_type("original_full")  # type: ignore[operator]
            model.config.attention_type = "original_full"

    @property
    def called_modules(self) -> list[nn.Module]:
        return [self.model]

    @property
    def hidden_size(self) -> int:
        return self.summary_state.removed.in_features

    @property
    def context_length(self) -> int | None:
        return position_limit(self.model)

    def summary(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        prompt = prompt if prompt_of_response is None else prompt.rows(prompt_of_response)
        config, packed = self.model.config, pack_rows(prompt, response, None)
        real, second = packed.segments >= 0, packed.segments == 1
        inputs = {"input_ids": packed.ids.masked_fill(~real, config.pad_token_id or 0), "attention_mask": real.long()}
        if getattr(config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = second.long()
        with self.recomputing():
            states: Tensor = self.model(**inputs).logits
        return states


def classifier_tensors(backbone: EncoderBackbone, head: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a classifier's last matrix by name: a head [1, H] and a bias of 0."""
    summary, dtype = backbone.summary_state, backbone.model.dtype
    tensors = {f"{summary.place}.weight": head.to(dtype)}
    if summary.removed.bias is not None:
        tensors[f"{summary.place}.bias"] = torch.zeros(1, dtype=dtype)
    return tensors
