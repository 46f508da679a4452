"""The base class of extensions, and the arguments of its hooks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from align.models.loading import LoadedModel
from align.models.roles import Roles
from align.ppo.records import Experience, RoleOutputs, Rollout, TrainingSignal
from align.ppo.rewards import MissingEos
from align.ppo.scoring_models import RewardAdapter
from align.tokenization.encoded import EncodedPrompt
from align.training.engine import TrainEngine
from align.training.run import Run


@dataclass(frozen=True, kw_only=True)
class TrainingContext:
    """The run of an extension, and values of PPO settings."""

    run: Run
    """Its `config`, `model_config` and `optimization` have the settings that all stages share."""
    policy: LoadedModel
    training_prompts: Sequence[EncodedPrompt]
    prompts: Sequence[EncodedPrompt]
    """All prompts for sampling, in training and evaluation."""
    total_updates: int
    critic_warmup: int
    samples_per_prompt: int
    max_prompt_tokens: int
    max_new_tokens: int
    missing_eos: MissingEos


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """An optimizer step whose PPO gradients are complete."""

    update: int
    epoch: int
    minibatch: int
    """Step number within the epoch."""
    responses: int
    metrics: Mapping[str, float]
    """Metrics of the minibatch, such as `policy/approx_kl`."""


@dataclass(kw_only=True)
class PolicyEvaluation:
    """Responses to the validation prompts and their scores, which extensions may change before metrics are computed."""

    update: int
    """0 for the initial policy."""
    rollout: Rollout
    scores: Tensor
    """[B] rewards, before `missing_eos`."""
    missing_eos: MissingEos
    kl: float
    """KL to the reference, in nats per response."""
    kl_per_token: float
    selection_scores: Tensor | None = None
    """[B] scores for selecting the policy to keep. If None, `scores`."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """Further columns [B] of samples.jsonl."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics, logged as `validation/<name>`."""
    messages: list[str] = field(default_factory=list)
    """Lines to print."""

    @property
    def final_scores(self) -> Tensor:
        """[B] `scores` after `missing_eos`."""
        return self.missing_eos.apply(self.scores, self.rollout.ended_mask)


class Extension:
    """An optional part of PPO. By default, hooks do nothing; override the required ones.

    Every process calls every hook, and results must be identical.

    Attributes:
        name: name of its setting or entry point, or module:Class. Checkpoints store its state under this name.
        modules: frozen models in memory, set by `load`.
        adapters: reward models that it added to the policy's base, set by `load`.
        gives_scores: whether `score` or `shape` is a reward. Such a run needs no other.
        selects_by: name of the scores by which it selects the policy to keep, or empty. Its hooks are called last.
        should_stop: whether to stop before the next update. If true on one process, all processes stop.
        card: lines of the model card by title.
    """

    name: str = ""
    modules: Sequence[nn.Module] = ()
    adapters: Sequence[RewardAdapter] = ()
    gives_scores: bool = False
    selects_by: str = ""
    should_stop: bool = False
    card: Mapping[str, str] = MappingProxyType({})

    def load(self, context: TrainingContext) -> None:
        """Load data and models, before memory is checked and the training engine is built."""

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        """Receive the engine and the roles, before a checkpoint is loaded."""

    def score(self, rollout: Rollout) -> dict[str, Tensor]:
        """Return extra rewards [B] by name, which are added to the others. Called in training and in evaluations."""
        return {}

    def shape(self, signal: TrainingSignal, rollout: Rollout, old: RoleOutputs) -> TrainingSignal:
        """Return the training signal with changed scores, token rewards or token weights. Not called in evaluations.

        Use `dataclasses.replace(signal, scores=...)`. `missing_eos` is applied to the scores afterward, not to token
        rewards.

        Args:
            signal: the sums of all rewards, or the output of an earlier extension. Add entries to `signal.components` to
                log them as `reward/<name>`.
            old: log-probs of policy and reference, and values, before the update.
        """
        return signal

    def extra_loss(self, step: OptimizerStep) -> dict[str, float]:
        """Add gradients to an optimizer step with `engine.backward` and `engine.reduce_gradients`; return metrics."""
        return {}

    def after_update(self, update: int, experience: Experience) -> None:
        """Act after the last optimizer step of an update."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the update; called before `after_update`."""
        return {}

    def flops(self, lengths: Sequence[tuple[int, Sequence[int]]]) -> float:
        """Return the FLOPs that the extension added to an update.

        Args:
            lengths: number of tokens of each prompt, and of the responses that share it.
        """
        return 0.0

    def evaluate(self, evaluation: PolicyEvaluation) -> None:
        """Change or add to an evaluation, before its metrics are computed."""

    def state_dict(self) -> Any:
        """Return the state for a checkpoint: JSON values, or a dict of JSON values and tensors, equal on every process.

        Before `after_update`, replace tensors of the state instead of changing them in place: a stop may save the
        state from the beginning of the update.
        """
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Restore the state returned by `state_dict`. Tensors are on the CPU."""

    @property
    def has_state(self) -> bool:
        """Whether checkpoints contain its state."""
        return type(self).state_dict is not Extension.state_dict
