"""Reference refresh: every N updates the reference becomes a copy of the policy."""

from collections.abc import Mapping

import torch
from torch import Tensor

from align.models.adapters import adapter_parameters
from align.models.roles import REFERENCE_ADAPTER, Roles
from align.ppo.extensions import Extension, TrainingContext
from align.ppo.records import Experience
from align.training.engine import TrainEngine


class ReferenceRefresh(Extension):
    """Copies the policy's weights over the reference's after each `every` updates."""

    updates_reference = True

    def __init__(self, every: int) -> None:
        self.every, self.moved = every, False

    def load(self, context: TrainingContext) -> None:
        self.policy = context.policy

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        model, reference = self.policy.backbone.model, roles.reference_model
        if reference is None:  # with LoRA the reference is another adapter on the policy's base
            assert self.policy.adapter is not None
            self.weights = adapter_parameters(model, REFERENCE_ADAPTER)
            trained = adapter_parameters(model, self.policy.adapter).values()
            self.sources: dict[str, Tensor] = dict(zip(self.weights, trained, strict=True))
        else:
            self.weights = {name.removeprefix("backbone.model."): weight for name, weight in reference.named_parameters()}
            weights = dict(model.named_parameters())
            self.sources = {name: weights[name] for name in self.weights}

    def after_update(self, update: int, experience: Experience) -> None:
        if update % self.every == 0:
            self._copy(self.sources)

    @torch.no_grad()
    def _copy(self, sources: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(sources[name])
        self.moved = True

    def state_dict(self) -> dict[str, Tensor]:
        """Return the reference's weights; none while it is the initial policy."""
        return {name: weight.detach() for name, weight in self.weights.items()} if self.moved else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            self._copy(state)
