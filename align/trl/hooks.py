"""TRL's behavior in the PPO loop: penalty for a missing EOS token, learning rates, metrics, events, sample completions."""

import atexit
import inspect
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean, variance
from typing import Any, cast

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerCallback, TrainerState
from transformers.optimization import get_scheduler

from align.core.errors import UserError
from align.core.launch import end_process_group
from align.core.seeds import RngStream
from align.core.tensor_ops import masked_mean
from align.models.roles import Roles
from align.ppo.extensions import Extension, OptimizerStep, TrainingContext
from align.ppo.losses import kl_estimate
from align.ppo.records import Experience, Rollout
from align.ppo.rollout import sample_rollout
from align.ppo.setup import PPOSetup
from align.runtime.distributed import max_across_processes, run_on_main
from align.runtime.progress import console
from align.tokenization.encoded import EncodedPrompt
from align.training.callbacks import TrainerCallbacks
from align.training.engine import TrainEngine
from align.trl.arguments import SAME
from align.trl.config import InvalidArgumentError, PPOConfig

STEP_METRICS = {
    "policy/approxkl_avg": "policy/approx_kl",
    "policy/clipfrac_avg": "policy/clipfrac",
    "loss/policy_avg": "loss/policy",
    "loss/value_avg": "loss/value",
    "val/clipfrac_avg": "value/clipfrac",
    "val/ratio": "ratio/mean",
}
"""TRL's name of a metric of an optimizer step -> this library's name."""
READ_ONCE = (
    *(f"args.{name}" for name in (*SAME, "cliprange_value", "response_length")),
    *("model", "ref_model", "reward_model", "processing_class", "optimizer", "lr_scheduler", "stop_token_id"),
)
"""Attributes of the trainer that are read only when it is created. TRL reads most of them in each update."""
PENALTY = "missing_eos_penalty"
"""Name of the reward component for this setting. As in TRL, tables of completions show scores without it."""
COMPLETION_TEMPERATURE = 0.01
COMPLETION_COLUMNS = ("query", "model response", "score")
SHOWN_COMPLETIONS = 5
"""Number of rows in a printed table."""


@dataclass
class OnlineTrainerState(TrainerState):
    """State for callbacks, including the number of sampled responses.

    Args:
        episode: number of responses sampled so far.
    """

    episode: int = 0


class TrainerHooks(Extension):
    """Applies TRL's score penalty and learning rate, and computes TRL's metrics.

    Args:
        args: settings of the trainer.
        eos_token_id: EOS token. Responses without it are penalized by `args.missing_eos_penalty`.
        optimizer: optimizer over all weights of policy and value model. Default: the engine's optimizer.
        lr_scheduler: scheduler of `optimizer`. Default: the scheduler in the settings.
    """

    name = "trl"
    experience: Experience | None = None

    def __init__(
        self, args: PPOConfig, eos_token_id: int | None, optimizer: Optimizer | None, lr_scheduler: LRScheduler | None
    ) -> None:
        self.args, self.eos_token_id = args, eos_token_id
        self.optimizer: Any = optimizer
        self.lr_scheduler: Any = lr_scheduler
        if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", None) is not optimizer:
            raise InvalidArgumentError("`optimizers`: the scheduler belongs to another optimizer; give both, or neither")
        self.steps: list[dict[str, float]] = []

    def load(self, context: TrainingContext) -> None:
        self.run = context.run

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        own_optimizer = self.optimizer
        if self.optimizer is None:
            self.optimizer = engine.optimizer
            for group in self.optimizer.param_groups:
                group["lr"] = self.args.learning_rate
        if self.lr_scheduler is None:  # advances once per update
            args, total = self.args, cast(int, self.args.num_total_batches)
            kwargs = cast(dict[str, Any] | None, args.lr_scheduler_kwargs or None)
            warmup = args.get_warmup_steps(total)
            self.lr_scheduler = get_scheduler(args.lr_scheduler_type, self.optimizer, warmup, total, kwargs)
        try:
            engine.use_optimizer(own_optimizer)
        except UserError as error:
            raise InvalidArgumentError(str(error)) from error

    def advance_scheduler(self, updates: int = 1) -> None:
        """Advance the scheduler by a number of updates.

        The scheduler's warning about missing optimizer steps is suppressed, because a resumed run has already made these
        steps, and DeepSpeed makes them inside its engine.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for _ in range(updates):
                self.lr_scheduler.step()

    def score(self, rollout: Rollout) -> dict[str, Tensor]:
        if self.args.missing_eos_penalty is None:
            return {}
        missing = torch.tensor([self.eos_token_id not in response for response in rollout.responses])
        return {PENALTY: -self.args.missing_eos_penalty * missing.float()}

    def extra_loss(self, step: OptimizerStep) -> dict[str, float]:
        if step.epoch == step.minibatch == 0:
            self.steps = []
            if self.args.disable_tqdm:
                self.run.progress.stop()
        self.steps.append(dict(step.metrics))
        return {}

    def after_update(self, update: int, experience: Experience) -> None:
        self.experience = experience

    def metrics_of_update(self) -> dict[str, float]:
        """Return the metrics of the last update under TRL's names.

        Rollout metrics are summed over the tokens of a response and averaged over responses. Only `policy/entropy_avg` is
        the mean over response tokens, under the sampling policy. Metrics of optimizer steps are averaged over steps.
        `val/ratio_var` is the unbiased variance of the mean ratio over steps (0 for a single step).
        """
        assert self.experience is not None
        old, mask, kl_coef = self.experience.old, self.experience.mask, self.args.kl_coef
        kl = float((kl_estimate(old.log_probs, old.ref_log_probs, self.args.kl_estimator) * mask).sum(1).mean())
        score = float(self.experience.signal.scores.mean())
        responses = self.experience.rollout.responses
        ratios = [step["ratio/mean"] for step in self.steps]
        return {
            "objective/kl": kl,
            "objective/entropy": float(-(old.log_probs * mask).sum(1).mean()),
            "objective/non_score_reward": -kl_coef * kl,
            "objective/rlhf_reward": score - kl_coef * kl,
            "objective/scores": score,
            "policy/entropy_avg": float(masked_mean(old.entropy, mask)),
            "val/num_eos_tokens": sum(token == self.eos_token_id for ids in responses for token in ids),
            **{name: fmean(step[ours] for step in self.steps) for name, ours in STEP_METRICS.items()},
            "val/ratio_var": variance(ratios) if len(ratios) > 1 else 0.0,
        }


class TRLCallbacks(TrainerCallbacks):
    """Calls the callbacks of a run with TRL's arguments, state and metrics.

    Args:
        callbacks: callback objects or classes.
        trainer: `PPOTrainer` with the settings and metrics. Methods that subclasses may override are called on it.
    """

    state: OnlineTrainerState
    args: PPOConfig

    def __init__(self, callbacks: Sequence[TrainerCallback | type[TrainerCallback]], trainer: Any) -> None:
        super().__init__(callbacks, trainer.args, OnlineTrainerState())
        self.trainer, self.hooks = trainer, trainer.hooks
        self.given: tuple[Any, ...] = ()

    def require_unchanged(self) -> None:
        """Raise InvalidArgumentError if an attribute in `READ_ONCE` has changed since the first call."""
        now: tuple[Any, ...] = attrgetter(*READ_ONCE)(self.trainer)
        self.given = self.given or now
        if changed := [name for name, before, value in zip(READ_ONCE, self.given, now, strict=True) if value != before]:
            raise InvalidArgumentError(
                f"`{changed[0]}` was changed after the trainer was made, which has no effect: make a trainer with the change"
            )

    def begin(self, done: int) -> None:
        assert self.args.total_episodes is not None
        self.state.num_train_epochs = self.args.total_episodes / self.trainer.train_dataset_len
        self.state.episode = self._episodes(done)
        self.started, self.first_episode = time.monotonic(), self.state.episode
        self.hooks.advance_scheduler(done)
        super().begin(done)
        self.require_unchanged()

    def logs(self, metrics: Mapping[str, float]) -> dict[str, float]:
        self.state.episode = self._episodes(self.state.global_step)
        speed = int((self.state.episode - self.first_episode) / max(time.monotonic() - self.started, 1e-6))
        return {
            "eps": run_on_main(lambda: speed, self.accelerator),
            **self.hooks.metrics_of_update(),
            "lr": self.hooks.lr_scheduler.get_last_lr()[0],
            "episode": self.state.episode,
            "epoch": self.state.epoch,
        }

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        self.state.global_step, self.state.epoch = update, update * self.epochs_per_update
        self.trainer.log(self.logs(metrics))

    def step_end(self, update: int) -> tuple[bool, bool]:
        self.hooks.advance_scheduler()
        save, stop = super().step_end(update)
        tables, total = self.args.num_sample_generations, self.args.num_total_batches or 1
        if update < total and not stop:
            self.require_unchanged()
        if tables > 0 and (update - 1) % max(1, total // tables) == 0:
            self.trainer.generate_completions(sampling=True)
        if save and self.args.save_only_model:  # the run writes no checkpoint to resume from
            self.saved()
            return False, stop
        return save, stop

    def saved(self) -> None:
        self.trainer._save_checkpoint(self.trainer.model, trial=None)
        super().saved()

    def end(self) -> None:
        super().end()
        if max_across_processes(int(self.control.should_save), self.accelerator):
            self.saved()

    def _episodes(self, updates: int) -> int:
        assert self.args.batch_size is not None
        return updates * self.args.batch_size


def show_completions(setup: PPOSetup, prompts: Sequence[EncodedPrompt], seed: int, to_wandb: bool) -> None:
    """Print some nearly greedy completions of the current policy with their scores. Call this on all processes.

    Args:
        setup: setup of the run.
        prompts: prompts to complete.
        seed: seed of the run.
        to_wandb: whether to log all completions as a table to the active Weights & Biases run, if there is one.
    """
    tokenizer = setup.policy.tokenization.tokenizer
    sampling = replace(setup.sampling, temperature=COMPLETION_TEMPERATURE)
    key = (seed, RngStream.VALIDATION_SAMPLES)
    rollout = sample_rollout(setup.sampler, setup.policy.tokenization, list(prompts), sampling, key)
    rewards = setup.rewards(rollout)
    scores = rewards.total - rewards.components.get(PENALTY, 0.0)
    if not setup.run.is_main:
        return
    queries = tokenizer.batch_decode([prompt.ids for prompt in prompts], skip_special_tokens=True)
    rows = list(zip(queries, tokenizer.batch_decode(rollout.responses), scores.tolist(), strict=True))
    table = Table(*COMPLETION_COLUMNS, show_lines=True)
    for query, response, score in rows[:SHOWN_COMPLETIONS]:
        table.add_row(Text(query), Text(response), f"{score:.4g}")  # `Text` prevents parsing as markup
    console.print(table)
    if to_wandb:
        import wandb

        if wandb.run is not None:
            wandb.log({"completions": wandb.Table(columns=list(COMPLETION_COLUMNS), data=[list(row) for row in rows])})


def require_own_loop(trainer: type[Any], base: type[Any]) -> None:
    """Raise UserError if a subclass overrides `train` without calling `base`, as modified copies of TRL's loop do."""
    train: Any = inspect.unwrap(trainer.train)
    names = train.__code__.co_names if inspect.isfunction(train) else ()
    if trainer.train is not base.train and not {"super", base.__name__} & {*names}:
        raise UserError(
            f"{trainer.__name__}.train replaces the training loop, whose parts have other names here; call super().train(), "
            "or change the loop by an extension (docs/howto/own-extension.md)"
        )


def end_processes_at_exit() -> None:
    """Destroy the process group when a script exits without an error. Under ZeRO-3, the process would otherwise abort."""
    atexit.unregister(_end_processes)
    atexit.register(_end_processes)


def _end_processes() -> None:
    if getattr(sys, "last_value", None) is None:
        end_process_group()
