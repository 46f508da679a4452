"""Attribute model with several heads on one backbone: module, loading and losses."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from align.core.errors import UserError, first_line
from align.core.files import read_json
from align.core.tensor_ops import Padded
from align.models.backbone import Backbone
from align.models.heads import Float32Linear
from align.models.loading import LoadedModel, load_whole
from align.reward.checkpoint import ATTRIBUTE, HEAD, require_reward_model
from align.runtime.distributed import compute_dtype

Form = Literal["heads", "generative"]
HeadKind = Literal["binary", "scale", "ranking"]
PREFERENCE = "preference"
"""Name of the head trained on rankings."""
SCALE = (1.0, 7.0)
"""Lowest and highest rating."""


@dataclass(frozen=True)
class Head:
    """Type of an output: binary, a rating from 1 to 7, or the preference reward trained on rankings."""

    name: str
    kind: HeadKind


class AttributeModel(nn.Module):
    """A backbone with several heads on the final state of prompt and response. Uses `adapter` if set."""

    def __init__(self, backbone: Backbone, heads: list[Head], adapter: str | None = None) -> None:
        super().__init__()
        self.backbone, self.heads, self.adapter_name = backbone, heads, adapter
        self.linear = Float32Linear(backbone.hidden_size, len(heads))
        nn.init.normal_(self.linear.weight, std=(backbone.hidden_size + 1) ** -0.5)
        nn.init.zeros_(self.linear.bias)

    def forward(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        """Return outputs [B, n] of n heads for B responses, in the units of `head_losses`."""
        with self.backbone.adapter(self.adapter_name):
            return cast(Tensor, self.linear(self.backbone.summary(prompt, response, prompt_of_response)))


def in_label_units(outputs: Tensor, heads: list[Head]) -> Tensor:
    """Convert outputs [B, n] to label units: probability, rating from 1 to 7, or preference reward (unchanged)."""
    low, high = SCALE
    columns = {
        "binary": torch.sigmoid(outputs),
        "scale": (low + (high - low) * outputs).clamp(low, high),
        "ranking": outputs,
    }
    return torch.stack([columns[head.kind][:, number] for number, head in enumerate(heads)], dim=1)


def load_attribute_model(folder: str, dtype: str = "auto") -> tuple[AttributeModel, LoadedModel]:
    """Load an attribute model with heads for scoring, frozen and with adapters merged.

    Raises:
        UserError: if the folder is not an attribute model, or is broken.
    """
    require_reward_model(folder, ATTRIBUTE)
    loaded = load_whole(folder, compute_dtype(dtype), allow_reward_model=True)
    model = AttributeModel(loaded.backbone, heads_of(folder))
    try:
        stored = load_file(Path(folder) / HEAD)
        model.linear.load_state_dict({"weight": stored["heads"], "bias": stored["biases"]})
    except Exception as error:  # includes safetensors' error type
        raise UserError(f"{folder}: invalid {HEAD} ({first_line(error)}); train the model again") from error
    return model.eval().requires_grad_(False), loaded


def heads_of(folder: str) -> list[Head]:
    """Return the heads of a saved attribute model. Raise a UserError if the folder is not one."""
    require_reward_model(folder, ATTRIBUTE)
    return [Head(row["name"], row["kind"]) for row in read_json(Path(folder) / ATTRIBUTE.metadata_file)["heads"]]


def form_of(folder: str) -> str:
    """Return `heads` or `generative`. Raise a UserError if the folder is not an attribute model."""
    require_reward_model(folder, ATTRIBUTE)
    return str(read_json(Path(folder) / ATTRIBUTE.metadata_file).get("form", "heads"))


def head_losses(outputs: Tensor, targets: Tensor, binary: Tensor) -> Tensor:
    """Return the loss [n] of each head, summed over judged responses.

    A yes/no attribute uses the cross-entropy, with the fraction of yes as a soft target. A rating, scaled to
    (rating - 1) / 6, uses the squared error.

    Args:
        outputs: [B, n] of n heads.
        targets: [B, n]; NaN without a judgment.
        binary: [n] bool.
    """
    judged = ~targets.isnan()
    known = torch.where(judged, targets, torch.zeros_like(targets)).to(outputs)
    low, high = SCALE
    entropy = binary_cross_entropy_with_logits(outputs, known, reduction="none")
    square = (outputs - (known - low) / (high - low)) ** 2
    losses = torch.where(binary, entropy, square)
    return torch.where(judged, losses, torch.zeros_like(losses)).sum(0)
