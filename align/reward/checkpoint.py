"""The reward model on disk: weights that transformers, PEFT and TRL load as a classifier with one label, and its mean.

`reward.json` holds what those classes have no place for: the mean reward over demonstrations, which is subtracted, and
how the model was made. `reward_head.safetensors` holds the head for every kind of backbone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from align.config import ModelConfig
from align.distributed import compute_dtype
from align.errors import UserError
from align.files import new_folder, read_json, write_json
from align.models.checkpoint import finish_folder, save_adapter
from align.models.heads import ScalarHead
from align.models.loading import Loaded, load
from align.models.roles import RewardModel

HEAD, FACTS = "reward_head.safetensors", "reward.json"


@dataclass(frozen=True)
class LoadedReward:
    """A reward model from disk; `mean` is to be subtracted from what it says."""

    model: RewardModel
    loaded: Loaded
    mean: float


def save_reward_model(
    folder: Path,
    loaded: Loaded,
    state: Mapping[str, Tensor],
    head: Tensor,
    facts: Mapping[str, Any],
    card: Mapping[str, Any],
) -> None:
    """Save a reward model, whole or not at all.

    Args:
        state: whole weights by their names in `loaded.backbone.model`.
        head: [1, H] weight of the reward head.
        facts: for reward.json; `mean` at least.
    """
    with new_folder(folder) as temporary:
        if loaded.adapter is not None:
            save_adapter(temporary, loaded, loaded.adapter, state, *loaded.backbone.classifier_adapter(head))
        else:
            loaded.backbone.save_classifier(temporary, state, head)
        save_file({"weight": head.detach().float().cpu().contiguous()}, temporary / HEAD)
        write_json(temporary / FACTS, dict(facts))
        finish_folder(temporary, loaded, card)


def is_reward_model(folder: str) -> bool:
    """Whether a folder holds a reward model of this package."""
    return (Path(folder) / FACTS).exists()


def load_head(folder: str, hidden_size: int) -> tuple[ScalarHead, float]:
    """The head and the mean of a reward model.

    Raises:
        UserError: if the folder is not a reward model, or of another width.
    """
    if not is_reward_model(folder):
        raise UserError(f"{folder}: not a reward model of this package ({FACTS} is missing); train one with `align reward`")
    weight = load_file(Path(folder) / HEAD)["weight"]
    if weight.shape[1] != hidden_size:
        raise UserError(f"{folder}: its head reads {weight.shape[1]} numbers, the model gives {hidden_size}")
    head = ScalarHead(hidden_size, bias=False)
    with torch.no_grad():
        head.linear.weight.copy_(weight)
    return head, float(read_json(Path(folder) / FACTS)["mean"])


def load_reward_model(folder: str, dtype: str = "auto", chat_template: str = "auto") -> LoadedReward:
    """Load a reward model to score with: adapters merged, nothing trainable.

    Raises:
        UserError: if the folder is not a reward model.
    """
    if not is_reward_model(folder):
        load_head(folder, 0)
    loaded = load(ModelConfig(model=folder, chat_template=chat_template), compute_dtype(dtype))
    head, mean = load_head(folder, loaded.backbone.hidden_size)
    model = RewardModel(loaded.backbone, head, None).eval().requires_grad_(False)
    return LoadedReward(model, loaded, mean)
