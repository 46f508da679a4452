"""Selection of the policy to keep by a separate reward model, and early stopping when its reward falls."""

from dataclasses import dataclass
from typing import Any

from align.core.errors import UserError
from align.core.settings import Settings, option
from align.models.roles import Roles
from align.ppo.extensions import Extension, PolicyEvaluation, TrainingContext
from align.ppo.metrics import mean_and_error
from align.ppo.reward_functions import WeightedFunction
from align.ppo.rewards import Rewards
from align.ppo.scoring_models import RewardModelLike, load_source, make_scorer
from align.reward.checkpoint import require_reward_model
from align.training.data_order import measured_on
from align.training.engine import TrainEngine


@dataclass(kw_only=True)
class SelectionSettings(Settings):
    """Separate reward model for checkpoint selection."""

    reward_model: str = option("", "Reward model trained on other data or with another seed, such as smollm2-135m-judge.")
    early_stopping_patience: int = option(
        0,
        "Stop after this many consecutive evaluations in which the reward rises while the selection reward is "
        "below its best. 0 disables it.",
        ge=0,
    )


class RewardModelSelection(Extension):
    """Selects the policy to keep by its selection reward, and stops a run if it falls while the reward rises.

    An evaluation counts toward the patience if the selection reward is below its best so far and the reward is above its
    value there (Gao et al. 2022).

    Args:
        reward_model: overrides the reward model in the settings.

    Raises:
        UserError: if neither is given, or it is not a reward model.
    """

    selects_by = "selection reward"

    def __init__(self, settings: SelectionSettings, reward_model: RewardModelLike | WeightedFunction = "") -> None:
        self.reward_model = reward_model or settings.reward_model
        self.patience, self.count = settings.early_stopping_patience, 0
        self.best: dict[str, float] | None = None
        self.card = {"chosen by": settings.reward_model}
        if not self.reward_model:
            raise UserError("selection.reward_model is '', but must be given")
        if isinstance(self.reward_model, str):
            require_reward_model(self.reward_model)

    def load(self, context: TrainingContext) -> None:
        self.context = context
        if len(context.prompts) == len(context.training_prompts):
            raise UserError("selection.reward_model needs validation_prompts, on which it evaluates policies")
        if isinstance(self.reward_model, WeightedFunction):
            return
        model = context.run.model_config
        self.source = load_source(
            self.reward_model, context.policy, model.dtype, "selection", chat_template=model.chat_template
        )
        self.adapters = [self.source.adapter_on_policy] if self.source.adapter_on_policy else []
        self.modules = [self.source.loaded.model] if self.source.loaded else []

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        context = self.context
        if isinstance(self.reward_model, WeightedFunction):
            self.rewards = Rewards([], [self.reward_model], accelerator=context.run.accelerator)
            return
        scorer = make_scorer(self.source, context.run, context.policy, roles, context.prompts, context.max_new_tokens)
        self.rewards = Rewards([scorer], accelerator=context.run.accelerator)

    @property
    def should_stop(self) -> bool:  # type: ignore[override]
        return 0 < self.patience <= self.count

    def evaluate(self, evaluation: PolicyEvaluation) -> None:
        scores = self.rewards(evaluation.rollout).total
        evaluation.selection_scores = evaluation.columns["selection_reward"] = scores
        evaluation.metrics |= mean_and_error("selection_reward", scores)
        self._count(
            {
                "update": evaluation.update,
                "reward": float(evaluation.final_scores.mean()),
                "selection_reward": float(scores.mean()),
                "kl": evaluation.kl,
                "kl_per_token": evaluation.kl_per_token,
            }
        )
        if self.should_stop:
            evaluation.messages.append(self._stop_message())

    def _count(self, point: dict[str, float]) -> None:
        """Record an evaluation. Count consecutive ones with a higher reward but a lower selection reward than the best."""
        self.latest = point
        if self.best is None or point["selection_reward"] >= self.best["selection_reward"]:
            self.best, self.count = point, 0
        else:
            self.count = self.count + 1 if point["reward"] > self.best["reward"] else 0

    def _stop_message(self) -> str:
        assert self.best is not None
        best, last = self.best, self.latest
        points = [
            f"update {point['update']:.0f} (KL {point['kl']:.3g} nats per response, {point['kl_per_token']:.3g} per token)"
            for point in (best, last)
        ]
        return (
            f"stopped: from {points[0]} to {points[1]} the reward rose from {best['reward']:.3g} to {last['reward']:.3g} "
            f"and the selection reward fell from {best['selection_reward']:.3g} to {last['selection_reward']:.3g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the count, the best evaluation, and the data and settings of its scores."""
        return {"count": self.count, "best": self.best, "measure": self._measure()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`, unless the data or settings of scores have changed."""
        if state.get("measure", self._measure()) == self._measure():
            self.count, self.best = state["count"], state["best"]

    def _measure(self) -> dict[str, Any]:
        context = self.context
        prompts = [prompt.ids for prompt in context.prompts[len(context.training_prompts) :]]
        return measured_on("validation_prompts", prompts, model=str(self.card["chosen by"]), tokens=context.max_new_tokens)
