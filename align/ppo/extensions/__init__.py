"""Optional parts of PPO, one file each: `Extension` has the hooks, and `Extensions` calls those of the loop.

The loop calls `Extensions` at its four lines marked `# extensions`. `prepare` calls `load` and `start` before the loop,
`Rewards` has `score` as a function, and `Evaluator` calls `evaluate` and `after_evaluation`. A setting switches an extension
on; its module is imported only then.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from align.core.errors import UserError, nearest_name
from align.core.plugins import call_own_code, import_function, import_object
from align.models.loading import LoadedModel
from align.models.roles import Roles
from align.ppo.records import Experience, RoleOutputs, Rollout
from align.ppo.scoring_models import RewardAdapter
from align.runtime.distributed import run_on_all
from align.tokenization.encoded import EncodedPrompt
from align.training.engine import TrainEngine
from align.training.run import Run


@dataclass(frozen=True)
class TrainingContext:
    """The run that an extension belongs to, and values of PPO's settings."""

    run: Run
    """Its `config`, `model_config` and `optimization` have the settings that all stages share."""
    policy: LoadedModel
    training_prompts: Sequence[EncodedPrompt]
    prompts: Sequence[EncodedPrompt]
    """All prompts that responses will be sampled for: those of training and of evaluations."""
    total_updates: int
    critic_warmup: int
    samples_per_prompt: int
    max_prompt_tokens: int
    max_new_tokens: int
    missing_eos_penalty: float | None
    missing_eos_score: float | None


@dataclass
class PolicyEvaluation:
    """Responses to the fixed prompts and their scores, which extensions may change before metrics are computed."""

    update: int
    """0: before the first one."""
    rollout: Rollout
    scores: Tensor
    """[B] rewards, before the penalty for a missing EOS."""
    selection_scores: Tensor | None = None
    """[B] by which the policy to keep is selected; None: `scores`."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[B] each: further columns of samples.jsonl."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics, which are logged as `validation/<name>`."""


class Extension:
    """An optional part of PPO; all hooks do nothing.

    Attributes:
        name: of its setting, or module:Class for a user's own; the name of its state in checkpoints.
        modules: frozen models that it keeps in memory, set by `load`.
        adapters: reward models that it has put on the policy's base, set by `load`.
        updates_reference: whether it changes the reference during training.
        gives_scores: whether `score`, `transform_scores` or `token_rewards` is a reward. Such a run needs no other.
        corrects_sampling: whether `token_weights` correct for a sampling engine that differs from the policy.
        selects_by: the name of the scores by which it selects the policy to keep; empty: it does not.
        card: lines of the model card by their titles.
    """

    name: str = ""
    modules: Sequence[nn.Module] = ()
    adapters: Sequence[RewardAdapter] = ()
    updates_reference: bool = False
    gives_scores: bool = False
    corrects_sampling: bool = False
    selects_by: str = ""
    card: Mapping[str, str] = MappingProxyType({})

    @property
    def has_state(self) -> bool:
        """Whether checkpoints contain a state of it."""
        return type(self).state_dict is not Extension.state_dict

    @property
    def should_stop(self) -> bool:
        """Whether training ends before the next update; true on one process ends it on all."""
        return False

    def load(self, context: TrainingContext) -> None:
        """Load data and models, before memory is checked and the training engine is built."""

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        """Receive the engine and the roles, before a checkpoint is loaded."""

    def resume(self, update: int) -> None:
        """Prepare the folder of the run, which is locked now, for the updates after `update` (0: for all)."""

    def score(self, rollout: Rollout) -> dict[str, Tensor]:
        """Return further rewards [B] by name, which are added to the others; called for training and in evaluations."""
        return {}

    def transform_scores(self, scores: Tensor, rollout: Rollout, components: dict[str, Tensor]) -> Tensor:
        """Return training scores [B]; not called in evaluations.

        Args:
            scores: [B] sums of all rewards, or the output of an earlier extension.
            components: [B] each, by name, logged as `reward/<name>`; an extension may add to them.
        """
        return scores

    def token_rewards(self, rollout: Rollout, old: RoleOutputs) -> Tensor | None:
        """Return further rewards [B, T] of tokens, which may read the log-probs of policy and reference; None: none.

        They are added to the KL penalty and the score. A missing EOS does not change them, and evaluations leave them out.
        """
        return None

    def token_weights(self, rollout: Rollout, old: RoleOutputs) -> Tensor | None:
        """Return weights [B, T] of the policy's token losses; None: all are 1."""
        return None

    def on_experience(self, update: int, experience: Experience) -> None:
        """Read the experience of an update before the policy is trained on it."""

    def extra_loss(self, step_key: tuple[int, int, int], count: int) -> dict[str, float]:
        """Add gradients to an optimizer step, by a loop over `engine.micro_batches`; return metrics.

        Args:
            step_key: update, epoch and minibatch.
            count: responses of the minibatch.
        """
        return {}

    def metrics(self) -> dict[str, float]:
        """Return metrics of the update, before `after_update`."""
        return {}

    def flops(self, lengths: Sequence[tuple[int, Sequence[int]]]) -> float:
        """Return the FLOPs that the extension added to an update.

        Args:
            lengths: tokens of each prompt that was read, and of the responses to it.
        """
        return 0.0

    def after_update(self, update: int, experience: Experience) -> None:
        """Act after the last optimizer step of an update."""

    def evaluate(self, evaluation: PolicyEvaluation) -> None:
        """Change or add to an evaluation, before its metrics are computed."""

    def after_evaluation(self, update: int, metrics: dict[str, float]) -> str:
        """Read the metrics of an evaluation, without their prefix; return a line to print, or ""."""
        return ""

    def state_dict(self) -> Any:
        """Return the state for a checkpoint: JSON values, or a dict of JSON values and tensors, equal on every process.

        Before `after_update`, replace a tensor of the state instead of changing it in place: a stop may save the
        state of the beginning of the update.
        """
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned; tensors are on the CPU."""


class Extensions(list[Extension]):
    """The extensions of a run, in the order in which their hooks are called. Each method calls hooks of all of them."""

    def score(self, rollout: Rollout, rewards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rewards [B] of every `score`. Raise a UserError if one has the name of another, or of `rewards`."""
        found: dict[str, Tensor] = {}
        for each in self:
            more = each.score(rollout)
            for name, values in more.items():
                _require_shape(each, f"score '{name}'", values, torch.Size([len(rollout)]))
            if same := sorted((rewards.keys() | found.keys()) & more.keys()):
                raise UserError(f"extension '{each.name}': there is a reward '{same[0]}' already; give its own another name")
            found |= more
        return found

    def updates(self, updates: Iterable[int], done: int, accelerator: Accelerator | None = None) -> Iterator[int]:
        """Call `resume` after the last finished update `done`, then yield updates until `should_stop` of one is true.

        All processes end if one of them stops.

        Args:
            accelerator: the processes; None: this one alone.
        """
        for each in self:
            each.resume(done)
        stopping = [each for each in self if type(each).should_stop is not Extension.should_stop]

        def wants_to_stop() -> bool:
            return any(call_own_code(f"extension '{each.name}'", getattr, each, "should_stop") for each in stopping)

        for update in updates:
            if stopping and any(run_on_all(wants_to_stop, accelerator) if accelerator else [wants_to_stop()]):
                return
            yield update

    def training_signal(
        self, scores: Tensor, rollout: Rollout, old: RoleOutputs, components: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return training scores [B], and the sum of token rewards and the product of token weights [B, T] (None: none)."""
        for each in self:
            given = scores.shape
            scores = each.transform_scores(scores, rollout, components)
            _require_shape(each, "transform_scores", scores, given)
            for name, values in components.items():
                _require_shape(each, f"component '{name}'", values, given)
        rewards = [
            _require_shape(each, "token_rewards", found, old.log_probs.shape)
            for each in self
            if (found := each.token_rewards(rollout, old)) is not None
        ]
        weights = [
            _require_shape(each, "token_weights", found, old.log_probs.shape)
            for each in self
            if (found := each.token_weights(rollout, old)) is not None
        ]
        token_rewards = torch.stack(rewards).sum(0) if rewards else None
        return scores, token_rewards, torch.stack(weights).prod(0) if weights else None

    @contextmanager
    def learning(
        self, update: int, experience: Experience, lengths: Sequence[tuple[int, Sequence[int]]]
    ) -> Iterator[dict[str, float]]:
        """Call `on_experience`; after the optimizer steps inside, `flops`, `metrics` and `after_update`.

        Yields:
            A dict, which in the end has the sum of `flops` under that name, and the metrics.
        """
        for each in self:
            each.on_experience(update, experience)
        found = {"flops": 0.0}
        yield found
        for each in self:
            found["flops"] += each.flops(lengths)
            found |= each.metrics()
            each.after_update(update, experience)

    def extra_loss(self, step_key: tuple[int, int, int], count: int) -> dict[str, float]:
        """Add the gradients of all extensions to an optimizer step; return their metrics."""
        return {name: value for each in self for name, value in each.extra_loss(step_key, count).items()}


EXTENSIONS = {
    "rubrics": "align.extras.rules.rubrics:RubricRewards",
    "attributes": "align.extras.attributes.attribute_rewards:AttributeRewards",
    "rules": "align.extras.rules.rule_terms:RuleRewards",
    "length_adjustment": "align.ppo.extensions.length_adjustment:LengthAdjustment",
    "hold_length": "align.ppo.extensions.length_adjustment:HoldLength",
    "vllm.importance_cap": "align.ppo.extensions.importance_weights:ImportanceWeights",
    "ptx": "align.ppo.extensions.ptx:PtxLoss",
    "reference_refresh": "align.ppo.extensions.reference_refresh:ReferenceRefresh",
    "selection": "align.ppo.extensions.selection:RewardModelSelection",
}
"""The extension that each setting switches on, in the order in which hooks are called. It takes the setting's value.

`block.setting` is a setting in a block.
"""
RECORDER = "align.ppo.extensions.rollout_files:RolloutFiles"
"""The extension that every run has."""


def configured_extensions(settings: Mapping[str, Any], **objects: Any) -> Extensions:
    """Make the configured extensions in the order in which their hooks are called; the user's own come last.

    Args:
        settings: of PPO, by name.
        objects: for an extension of this name, an object in memory beside its setting.

    Raises:
        UserError: for an invalid setting, or an extension that cannot be imported.
    """
    found = Extensions()
    for name, path in EXTENSIONS.items():
        block, _, own_name = name.rpartition(".")
        if value := getattr(settings[block], own_name) if block else settings[name]:
            found.append(import_object(path)(value, *([objects[name]] if name in objects else [])))
            found[-1].name = name
    found.append(import_object(RECORDER)())
    found[-1].name = "rollouts"
    for path in settings["extensions"]:
        found.append(_own_extension(path))
    return found


def _own_extension(path: str) -> Extension:
    """Make the user's extension `module:Class`. Raise a UserError for another class, or for a misspelled hook."""
    own_class = import_function(path, "extension", "module:Class")
    if not (isinstance(own_class, type) and issubclass(own_class, Extension)):
        raise UserError(f"extension '{path}': must be a subclass of align.ppo.extensions.Extension")
    try:
        inspect.signature(own_class).bind()
    except TypeError as error:
        raise UserError(f"extension '{path}': {error}; it is made without arguments") from error
    hooks = {name for name in vars(Extension) if not name.startswith("_")}
    for name, _ in inspect.getmembers(own_class, inspect.isfunction):
        meant = nearest_name(name, hooks, 0.85)
        if meant and name not in hooks and not name.startswith("_"):
            raise UserError(f"extension '{path}': has no hook {name}; rename it to {meant}, or to _{name} if it is no hook")
    own: Extension = call_own_code(f"extension '{path}'", own_class)
    own.name = path
    for name in hooks:
        if inspect.isroutine(getattr(own_class, name)) and getattr(own_class, name) is not getattr(Extension, name):
            setattr(own, name, partial(call_own_code, f"extension '{path}': {name}", getattr(own, name), collective=True))
    return own


def _require_shape(extension: Extension, what: str, values: object, shape: torch.Size) -> Tensor:
    """Return values of an extension. Raise a UserError if they are no tensor of this shape."""
    if not isinstance(values, Tensor) or values.shape != shape:
        found = f"one of {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise UserError(f"extension '{extension.name}': {what} must be a tensor of shape {list(shape)}, not {found}")
    return values
