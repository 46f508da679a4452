"""Several heads on one trunk, in memory and on disk."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from align.core.errors import UserError, first_line
from align.core.files import read_json
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.backbone import Backbone
from align.models.checkpoint import save_model
from align.models.loading import LoadedModel, load
from align.models.roles import Float32Linear
from align.reward.checkpoint import ATTRIBUTE, HEAD, require_reward_model, save_reward_model
from align.runtime.distributed import compute_dtype

HeadKind = Literal["binary", "scale", "ranking"]
PREFERENCE = "preference"
"""The head that rankings train."""
GATE = "gate."
"""Prefix of the names of a gate's weights."""
GATE_WIDTH = 64
"""Width of the layer between a prompt's state and the weights of attributes. ArmoRM's gate has three layers of 1024 for 19
attributes (`GatingNetwork` in its published code); here both attributes and rankings are fewer."""


@dataclass(frozen=True)
class Head:
    """The meaning of one output: a yes or no, a rating from 1 to 7, or a reward that rankings train."""

    name: str
    kind: HeadKind


class Gate(nn.Module):
    """How much each attribute counts in responses to a prompt (ArmoRM, Wang et al. 2024, arXiv 2406.12845, section 3).

    A small network turns the prompt's state into weights that are positive and sum to 1. In ArmoRM, more of an attribute is
    always better; here its worth is learned too, so that `unsafe` can count against a response.

    Args:
        width: size of the prompt's state.
        attributes: number of attributes that are weighed.
    """

    def __init__(self, width: int, attributes: int) -> None:
        super().__init__()
        self.inner, self.outer = Float32Linear(width, GATE_WIDTH), Float32Linear(GATE_WIDTH, attributes)
        self.worth = nn.Parameter(torch.ones(attributes))

    def weights(self, prompt: Tensor) -> Tensor:
        """[R, n] of prompts' states [R, H], in float32."""
        return torch.softmax(self.outer(torch.relu(self.inner(prompt))), -1)

    def forward(self, prompt: Tensor, scores: Tensor) -> Tensor:
        """Rewards [R].

        Args:
            prompt: [R, H] states of prompts.
            scores: [R, n] of attributes, from 0 to 1.
        """
        return (self.weights(prompt) * self.worth.float() * scores).sum(-1)


class AttributeModel(nn.Module):
    """A backbone with several heads on the summary of a prompt and its response, which is a reward model's input too.

    Args:
        heads: the meaning of each output.
        adapter: the adapter to compute with; None: the bare backbone.
        gated: whether the last head, that of rankings, weighs the others by the prompt and does not read the response.
    """

    def __init__(self, backbone: Backbone, heads: list[Head], adapter: str | None = None, gated: bool = False) -> None:
        super().__init__()
        self.backbone, self.heads, self.adapter_name = backbone, heads, adapter
        self.binary = [head.kind == "binary" for head in heads if head.kind != "ranking"]
        self.linear = Float32Linear(backbone.summary_size, len(heads) - gated)
        nn.init.normal_(self.linear.weight, std=(backbone.summary_size + 1) ** -0.5)
        nn.init.zeros_(self.linear.bias)
        self.gate = Gate(backbone.hidden_size, len(heads) - 1) if gated else None

    def forward(self, prompt: Padded, response: Padded, prompt_index: Tensor | None = None) -> Tensor:
        """Outputs [R, n] of n heads for R responses, as they are learned: see `align.attributes.model`."""
        with self.backbone.adapter(self.adapter_name):
            if self.gate is None:
                return cast(Tensor, self.linear(self.backbone.summary(prompt, response, prompt_index)))
            hidden = self.backbone.hidden(prompt, response, prompt_index)
        rows = torch.arange(len(response.lengths), device=hidden.device)
        outputs = self.linear(hidden[rows, response.lengths])
        # Rankings train the gate alone, so that the attributes keep the meaning that labelers gave them.
        judged = outputs.detach()
        scores = torch.where(torch.tensor(self.binary, device=judged.device), torch.sigmoid(judged), judged)
        return torch.cat([outputs, self.gate(hidden[:, 0].detach(), scores)[:, None]], dim=1)


def in_label_units(outputs: Tensor, heads: list[Head]) -> Tensor:
    """Outputs [R, n] in labelers' units: a probability, a rating from 1 to 7, or unchanged for a ranking."""
    low, high = SCALE
    columns = {
        "binary": torch.sigmoid(outputs),
        "scale": (low + (high - low) * outputs).clamp(low, high),
        "ranking": outputs,
    }
    return torch.stack([columns[head.kind][:, number] for number, head in enumerate(heads)], dim=1)


def save_attribute_model(
    folder: Path, loaded: LoadedModel, weights: Mapping[str, Tensor], state: Mapping[str, Tensor], heads: list[Head],
    card: Mapping[str, Any],
) -> None:  # fmt: skip
    """Save an attribute model, whole or not at all. Transformers' classifier sees its first head only.

    Args:
        weights: of the backbone's model.
        state: of the whole `AttributeModel`.
    """
    weight, gate = state["linear.weight"], {name: value for name, value in state.items() if name.startswith(GATE)}
    facts = _facts(heads, "heads") | {"gate": bool(gate)}
    more = {"heads": weight, "biases": state["linear.bias"], **gate}
    save_reward_model(folder, loaded, weights, weight[:1], facts, card, ATTRIBUTE, more)


def save_generative_model(
    folder: Path, loaded: LoadedModel, weights: Mapping[str, Tensor], heads: list[Head], card: Mapping[str, Any]
) -> None:
    """Save a model of the generative form, whole or not at all: a language model with the names of what it rates."""
    save_model(folder, loaded, weights, card, {ATTRIBUTE.facts: _facts(heads, "generative")})


def _facts(heads: list[Head], form: str) -> dict[str, Any]:
    rows = [{"name": head.name, "kind": head.kind} for head in heads]
    return {"form": form, "heads": rows, "mean": 0.0}


def load_attribute_model(folder: str, dtype: str = "auto") -> tuple[AttributeModel, LoadedModel]:
    """Load an attribute model of the head form to score with: adapters merged, nothing trainable.

    Raises:
        UserError: if it is not one, or its files are broken.
    """
    require_reward_model(folder, ATTRIBUTE)
    loaded = load(ModelConfig(model=folder), compute_dtype(dtype), allow_reward_model=True)
    gated = bool(read_json(Path(folder) / ATTRIBUTE.facts).get("gate"))
    model = AttributeModel(loaded.backbone, heads_of(folder), gated=gated)
    try:
        stored = load_file(Path(folder) / HEAD)
        model.linear.load_state_dict({"weight": stored["heads"], "bias": stored["biases"]})
        if model.gate is not None:
            model.gate.load_state_dict({name: stored[f"{GATE}{name}"] for name in model.gate.state_dict()})
    except Exception as error:  # safetensors raises a type of its own
        raise UserError(f"{folder}: its {HEAD} is broken ({first_line(error)}); train it again") from error
    return model.eval().requires_grad_(False), loaded


def heads_of(folder: str) -> list[Head]:
    """The heads of an attribute model on disk.

    Raises:
        UserError: if the folder is not one.
    """
    require_reward_model(folder, ATTRIBUTE)
    return [Head(row["name"], row["kind"]) for row in read_json(Path(folder) / ATTRIBUTE.facts)["heads"]]


def form_of(folder: str) -> str:
    """`heads` or `generative`. Raises: UserError if the folder is no attribute model."""
    require_reward_model(folder, ATTRIBUTE)
    return str(read_json(Path(folder) / ATTRIBUTE.facts).get("form", "heads"))


SCALE = (1.0, 7.0)
"""The lowest and the highest rating."""


def head_losses(outputs: Tensor, targets: Tensor, binary: Tensor) -> Tensor:
    """The loss [n] of each head, summed over the responses that were judged by it.

    For a yes or no it is the cross-entropy, with the share of labelers who chose yes as a soft target; for a rating, taken
    as (rating - 1) / 6, the squared error.

    Args:
        outputs: [R, n] of n heads.
        targets: [R, n], NaN where nobody judged, which adds nothing.
        binary: [n] bool.
    """
    judged = ~targets.isnan()
    known = torch.where(judged, targets, torch.zeros_like(targets)).to(outputs)
    low, high = SCALE
    entropy = binary_cross_entropy_with_logits(outputs, known, reduction="none")
    square = (outputs - (known - low) / (high - low)) ** 2
    losses = torch.where(binary, entropy, square)
    return torch.where(judged, losses, torch.zeros_like(losses)).sum(0)
