"""Several heads on one trunk, in memory and on disk."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from align.attributes.loss import SCALE
from align.errors import UserError, first_line
from align.files import read_json
from align.models.backbone import Backbone
from align.models.checkpoint import save_model
from align.models.loading import LoadedModel, load
from align.reward.checkpoint import ATTRIBUTE, HEAD, require_reward_model, save_reward_model
from align.runtime.distributed import compute_dtype
from align.settings import ModelConfig
from align.tensor_ops import Padded

HeadKind = Literal["binary", "scale", "ranking"]
PREFERENCE = "preference"
"""The head that rankings train."""


@dataclass(frozen=True)
class Head:
    """What one output means: a yes or no, a rating from 1 to 7, or a place in an order."""

    name: str
    kind: HeadKind


class AttributeModel(nn.Module):
    """A backbone with several heads that are read after a response's last token.

    Args:
        heads: what each output means.
        adapter: the adapter to compute with; None: the bare backbone.
    """

    def __init__(self, backbone: Backbone, heads: list[Head], adapter: str | None = None) -> None:
        super().__init__()
        self.backbone, self.heads, self.adapter_name = backbone, heads, adapter
        self.linear = nn.Linear(backbone.hidden_size, len(heads))
        nn.init.normal_(self.linear.weight, std=(backbone.hidden_size + 1) ** -0.5)
        nn.init.zeros_(self.linear.bias)

    def forward(self, prompt: Padded, response: Padded, prompt_index: Tensor | None = None) -> Tensor:
        """Outputs [R, n] of n heads for R responses, as they are learned: see `align.attributes.loss`."""
        with self.backbone.adapter(self.adapter_name):
            hidden = self.backbone.hidden(prompt, response, prompt_index)
        rows = torch.arange(len(response.lengths), device=hidden.device)
        last = hidden[rows, response.lengths].float()
        return nn.functional.linear(last, self.linear.weight.float(), self.linear.bias.float())


def in_label_units(outputs: Tensor, heads: list[Head]) -> Tensor:
    """Outputs [R, n] as labelers say them: a probability, a rating from 1 to 7, or as it is for a ranking."""
    low, high = SCALE
    columns = {
        "binary": torch.sigmoid(outputs),
        "scale": (low + (high - low) * outputs).clamp(low, high),
        "ranking": outputs,
    }
    return torch.stack([columns[head.kind][:, number] for number, head in enumerate(heads)], dim=1)


def save_attribute_model(
    folder: Path, loaded: LoadedModel, weights: Mapping[str, Tensor], linear: tuple[Tensor, Tensor], heads: list[Head],
    card: Mapping[str, Any],
) -> None:  # fmt: skip
    """Save an attribute model, whole or not at all. As a classifier of transformers it has its first head alone."""
    weight, bias = linear
    facts = _facts(loaded, heads, "heads")
    save_reward_model(folder, loaded, weights, weight[:1], facts, card, ATTRIBUTE, {"heads": weight, "biases": bias})


def save_generative_model(
    folder: Path, loaded: LoadedModel, weights: Mapping[str, Tensor], heads: list[Head], card: Mapping[str, Any]
) -> None:
    """Save a model of the generative form, whole or not at all: a language model, which also says what it rates."""
    save_model(folder, loaded, weights, card, {ATTRIBUTE.facts: _facts(loaded, heads, "generative")})


def _facts(loaded: LoadedModel, heads: list[Head], form: str) -> dict[str, Any]:
    rows = [{"name": head.name, "kind": head.kind} for head in heads]
    return {"form": form, "heads": rows, "mean": 0.0, "base": loaded.base}


def load_attribute_model(folder: str, dtype: str = "auto") -> tuple[AttributeModel, LoadedModel]:
    """Load an attribute model of the head form to score with: adapters merged, nothing trainable.

    Raises:
        UserError: if it is not one, or its files are broken.
    """
    require_reward_model(folder, ATTRIBUTE)
    loaded = load(ModelConfig(model=folder), compute_dtype(dtype), allow_reward_model=True)
    model = AttributeModel(loaded.backbone, heads_of(folder))
    try:
        stored = load_file(Path(folder) / HEAD)
        with torch.no_grad():
            model.linear.weight.copy_(stored["heads"])
            model.linear.bias.copy_(stored["biases"])
    except Exception as error:  # safetensors raises a type of its own
        raise UserError(f"{folder}: its {HEAD} is broken ({first_line(error)}); train it again") from error
    return model.eval().requires_grad_(False), loaded


def heads_of(folder: str) -> list[Head]:
    """What the outputs of an attribute model mean.

    Raises:
        UserError: if the folder is not one.
    """
    require_reward_model(folder, ATTRIBUTE)
    return [Head(row["name"], row["kind"]) for row in read_json(Path(folder) / ATTRIBUTE.facts)["heads"]]


def form_of(folder: str) -> str:
    """`heads` or `generative`. Raises: UserError if the folder is no attribute model."""
    require_reward_model(folder, ATTRIBUTE)
    return str(read_json(Path(folder) / ATTRIBUTE.facts).get("form", "heads"))
