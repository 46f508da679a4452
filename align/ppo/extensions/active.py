"""The extensions of a run: `Extensions` calls the hooks of all of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from align.core.errors import UserError
from align.core.plugins import call_own_code
from align.ppo.extensions.extension import Extension, OptimizerStep
from align.ppo.records import SCORE_METRICS, Experience, RoleOutputs, Rollout, TrainingSignal
from align.runtime.distributed import run_on_all


class Extensions(list[Extension]):
    """The extensions of a run, in the order in which their hooks are called. Each method calls a hook of all of them."""

    def until_stop(self, updates: Iterable[int], accelerator: Accelerator | None = None) -> Iterator[int]:
        """Yield updates until `should_stop` of an extension is true on any process (on this process if None)."""

        def wants_to_stop() -> bool:
            return any(call_own_code(f"extension '{item.name}'", getattr, item, "should_stop") for item in self)

        for update in updates:
            if self and any(run_on_all(wants_to_stop, accelerator) if accelerator else [wants_to_stop()]):
                return
            yield update

    def score(self, rollout: Rollout, rewards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rewards [B] of every `score`.

        Raises:
            UserError: if its name is already used by another extension or in `rewards`.
        """
        extra_scores: dict[str, Tensor] = {}
        for extension in self:
            scores = extension.score(rollout)
            for name, values in scores.items():
                _require_shape(extension, f"score '{name}'", values, torch.Size([len(rollout)]))
            if same := sorted((rewards.keys() | extra_scores.keys() | SCORE_METRICS) & scores.keys()):
                raise UserError(f"extension '{extension.name}': reward '{same[0]}' already exists; rename this one")
            extra_scores |= scores
        return extra_scores

    def shape(self, signal: TrainingSignal, rollout: Rollout, old: RoleOutputs) -> TrainingSignal:
        """Return the training signal after the `shape` of all extensions."""
        responses, tokens = signal.scores.shape, old.log_probs.shape
        for extension in self:
            signal = extension.shape(signal, rollout, old)
            if not isinstance(signal, TrainingSignal):
                kind = type(signal).__name__
                raise UserError(f"extension '{extension.name}': shape must return a TrainingSignal, not {kind}")
            _require_shape(extension, "scores", signal.scores, responses)
            if same := sorted(SCORE_METRICS & signal.components.keys()):
                raise UserError(f"extension '{extension.name}': metric reward/{same[0]} exists; rename the component")
            for name, values in signal.components.items():
                _require_shape(extension, f"component '{name}'", values, responses)
            for what, token_values in (("token_rewards", signal.token_rewards), ("token_weights", signal.token_weights)):
                if token_values is not None:
                    _require_shape(extension, what, token_values, tokens)
        return signal

    def extra_loss(self, step: OptimizerStep) -> dict[str, float]:
        """Add the gradients of all extensions to an optimizer step; return their metrics."""
        return {name: value for extension in self for name, value in extension.extra_loss(step).items()}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all extensions for an update."""
        return {name: value for extension in self for name, value in extension.metrics().items()}

    def flops(self, lengths: Sequence[tuple[int, Sequence[int]]]) -> float:
        """Return the FLOPs that all extensions added to an update; `lengths` as for `Extension.flops`."""
        return sum(extension.flops(lengths) for extension in self)

    def after_update(self, update: int, experience: Experience) -> None:
        """Call `after_update` of all extensions."""
        for extension in self:
            extension.after_update(update, experience)


def _require_shape(extension: Extension, what: str, values: object, shape: torch.Size) -> None:
    """Raise a UserError unless values of an extension are a tensor of this shape."""
    if not isinstance(values, Tensor) or values.shape != shape:
        actual = f"one of {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise UserError(f"extension '{extension.name}': {what} must be a tensor of shape {list(shape)}, not {actual}")
