"""The trainer's side of the PPO loop: events, metrics, learning rate, scores without an EOS token, and checkpoints."""

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.optimization import get_scheduler
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState

from align.core.settings import RunConfig
from align.models.roles import Roles
from align.ppo.extensions import Extension, TrainingContext
from align.ppo.records import Experience, Rollout
from align.runtime.distributed import run_on_main
from align.training.engine import TrainEngine
from align.training.optimizer import ParamGroup
from align.trl.config import PPOConfig
from align.trl.metrics import rollout_metrics_of_trl, step_metrics_of_trl


@dataclass
class OnlineTrainerState(TrainerState):
    """The state that callbacks read, with the number of responses that were sampled.

    Args:
        episode: responses of all updates until now.
    """

    episode: int = 0


@dataclass(frozen=True)
class ScheduledGroup(ParamGroup):
    """A learning rate that a scheduler sets once in each update, as TRL does."""

    scheduler: Any = None

    def rate(self, config: RunConfig, step: int, total: int) -> float:
        """Return the scheduler's current rate."""
        return float(self.scheduler.get_last_lr()[0])


class TrainerHooks(Extension):
    """Connects the PPO loop with callbacks.

    Args:
        args: the trainer's settings.
        rows: of the training data; makes epochs of episodes.
        eos_token_id: a response without it is penalized by `args.missing_eos_penalty`.
        save_checkpoint: writes the checkpoint of an update.
        show_samples: prints a table of samples.
    """

    name = "trl"
    optimizer: Any = None
    lr_scheduler: Any = None

    def __init__(
        self,
        args: PPOConfig,
        rows: int,
        eos_token_id: int | None,
        save_checkpoint: Callable[[int], None],
        show_samples: Callable[[], None],
    ) -> None:
        self.args, self.rows, self.eos_token_id = args, rows, eos_token_id
        self.save_checkpoint, self.show_samples = save_checkpoint, show_samples
        self.handler = CallbackHandler([DefaultFlowCallback], None, None, None, None)
        self.control, self.state = TrainerControl(), OnlineTrainerState()
        self.steps: list[dict[str, float]] = []

    def load(self, context: TrainingContext) -> None:
        self.run = context.run

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        args = self.args
        self.engine, self.optimizer = engine, engine.optimizer
        for group in self.optimizer.param_groups:
            group["lr"] = args.learning_rate
        assert args.num_total_batches is not None
        self.lr_scheduler = get_scheduler(
            args.lr_scheduler_type,
            self.optimizer,
            args.get_warmup_steps(args.num_total_batches),
            args.num_total_batches,
            cast(dict[str, Any] | None, args.lr_scheduler_kwargs or None),
        )
        engine.groups = [
            ScheduledGroup(group.name, group.weights, group.peak, scheduler=self.lr_scheduler) for group in engine.groups
        ]

    def begin(self, callbacks: CallbackHandler) -> None:
        """Receive the callbacks, after the models have been prepared and before training starts."""
        self.handler = callbacks
        stateful = [each for each in [*callbacks.callbacks, self.control] if isinstance(each, ExportableState)]
        self.state = OnlineTrainerState(
            is_local_process_zero=self.run.accelerator.is_local_main_process,
            is_world_process_zero=self.run.is_main,
            stateful_callbacks=cast(list[TrainerCallback], stateful),
        )

    def resume(self, update: int) -> None:
        args, state = self.args, self.state
        assert args.num_total_batches is not None
        assert args.total_episodes is not None
        state.max_steps = args.num_total_batches
        state.num_train_epochs = args.total_episodes / self.rows  # type: ignore[assignment]  # a fraction, as in TRL
        state.compute_steps(args, state.max_steps)  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():  # a resumed run has made these optimizer steps before
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for _ in range(update):
                self.lr_scheduler.step()
        self.started, self.first_episode = time.monotonic(), state.episode
        self.control = self.handler.on_train_begin(args, state, self.control)

    @property
    def should_stop(self) -> bool:
        return bool(self.control.should_training_stop)

    def transform_scores(self, scores: Tensor, rollout: Rollout, parts: dict[str, Tensor]) -> Tensor:
        if self.args.missing_eos_penalty is None:
            return scores
        ended = torch.tensor([self.eos_token_id in response for response in rollout.responses])
        return torch.where(ended, scores, scores - self.args.missing_eos_penalty)

    def on_experience(self, update: int, experience: Experience) -> None:
        self.steps = []
        if self.args.disable_tqdm:
            self.run.progress.stop()

    def extra_loss(self, step_key: tuple[int, int, int], count: int) -> dict[str, float]:
        self.steps.append(dict(self.engine.sums))
        return {}

    def after_update(self, update: int, experience: Experience) -> None:
        args, state = self.args, self.state
        assert args.batch_size is not None
        state.global_step = update
        state.episode = update * args.batch_size
        state.epoch = state.episode / self.rows
        self.log(self._metrics(experience))
        self.lr_scheduler.step()
        self.control = self.handler.on_step_end(args, state, self.control)
        self._save_if_asked(update)
        total, tables = args.num_total_batches or 1, args.num_sample_generations
        if tables > 0 and (update - 1) % max(1, total // tables) == 0:
            self.show_samples()
        # Callbacks may decide by what only one process sees. All processes follow the first one.
        self.control.should_training_stop = run_on_main(lambda: self.control.should_training_stop, self.run.accelerator)

    def finish(self) -> None:
        """Fire the last event, and save if a callback asks for it."""
        self.control = self.handler.on_train_end(self.args, self.state, self.control)
        self._save_if_asked(self.state.global_step)

    def log(self, logs: dict[str, float]) -> None:
        """Add metrics to the history of the state, and pass them to the callbacks."""
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.handler.on_log(self.args, self.state, self.control, logs)

    def _metrics(self, experience: Experience) -> dict[str, float]:
        args, seconds = self.args, time.monotonic() - self.started
        speed = int((self.state.episode - self.first_episode) / max(seconds, 1e-6))
        return {
            "eps": run_on_main(lambda: speed, self.run.accelerator),
            **rollout_metrics_of_trl(experience, args.kl_coef, args.kl_estimator, self.eos_token_id),
            **step_metrics_of_trl(self.steps),
            "lr": self.lr_scheduler.get_last_lr()[0],
            "episode": self.state.episode,
        }

    def _save_if_asked(self, update: int) -> None:
        if run_on_main(lambda: self.control.should_save, self.run.accelerator):
            self.save_checkpoint(update)
            self.control = self.handler.on_save(self.args, self.state, self.control)

    def state_dict(self) -> dict[str, Any]:
        state = asdict(self.state)
        return {name: state[name] for name in ("global_step", "episode", "epoch", "log_history")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known = {item.name for item in fields(OnlineTrainerState)}
        for name, value in state.items():
            if name in known:
                setattr(self.state, name, value)
