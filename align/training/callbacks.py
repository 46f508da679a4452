"""The callbacks of transformers (`TrainerCallback`) in a run of this package; imported only where there are any.

A step is an update. `on_log` follows each line of metrics, `on_step_end` each update, `on_save` each checkpoint, and
`on_train_end` the final model. `control.should_save` saves a checkpoint after the update, and `should_training_stop` ends
training there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.optim.lr_scheduler import LRScheduler
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState

from align.core.errors import UserError
from align.core.files import write_json
from align.core.settings import OptimizationConfig, RunConfig
from align.runtime.distributed import computes_on_cpu, max_across_processes

STATE_FILE = "trainer_state.json"
FIRED = ("on_train_begin", "on_log", "on_step_end", "on_save", "on_train_end")
"""Events that runs fire; transformers has more."""


class _History(list[dict[str, float]]):
    """Lines of metrics. Copies share them because they never change, and a run copies its state in every update."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_History":
        return _History(self)


class TrainerCallbacks:
    """The callbacks of a run, with their shared state and control.

    Checkpoints hold the metric history and the states of the callbacks. They are also written to `trainer_state.json` in the
    run folder after each checkpoint and at the end of training, for other programs.

    Args:
        callbacks: objects or classes. transformers' `DefaultFlowCallback` is inserted before them.
        args: arguments that callbacks receive. Default: built from the run's settings.
        state: state that callbacks receive. Default: a new state.
        lr_scheduler: scheduler that callbacks receive.
    """

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]],
        args: TrainingArguments | None = None,
        state: TrainerState | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> None:
        handled = list(callbacks)
        if not any(callback is DefaultFlowCallback or isinstance(callback, DefaultFlowCallback) for callback in handled):
            handled.insert(0, DefaultFlowCallback)
        self.handler: Any = CallbackHandler(handled, None, None, None, lr_scheduler)
        self.args, self.state, self.control = args, state or TrainerState(), TrainerControl()

    def attach(
        self,
        config: RunConfig,
        optimization: OptimizationConfig,
        accelerator: Accelerator,
        objects: Mapping[str, Any],
        total: int,
        epochs_per_update: float,
    ) -> None:
        """Bind the callbacks to a run of `total` updates, before `Run` calls the methods below.

        They get the `objects` `model`, `processing_class`, `optimizer` and `lr_scheduler`. An update is
        `epochs_per_update` passes over the prompts.
        """
        self.accelerator, self.epochs_per_update = accelerator, epochs_per_update
        self.path = Path(config.output_dir) / STATE_FILE
        self.args = self.args or TrainingArguments(
            output_dir=config.output_dir,
            max_steps=total,
            seed=config.seed,
            learning_rate=optimization.learning_rate,
            weight_decay=optimization.weight_decay,
            adam_beta1=optimization.adam_beta1,
            adam_beta2=optimization.adam_beta2,
            adam_epsilon=optimization.adam_epsilon,
            max_grad_norm=optimization.max_grad_norm,
            logging_steps=1,
            save_strategy="steps" if config.save_steps else "no",
            save_steps=config.save_steps or 500,
            report_to="none",
            disable_tqdm=True,
            use_cpu=computes_on_cpu(),
            accelerator_config={"use_configured_state": True},  # otherwise they would reset the run's accelerator
        )
        for name, value in objects.items():
            setattr(self.handler, name, value)
        self.state.max_steps = total
        self.state.compute_steps(self.args, total)
        self.state.is_world_process_zero = accelerator.is_main_process
        self.state.is_local_process_zero = accelerator.is_local_main_process

    def begin(self, done: int) -> None:
        """Fire `on_train_begin`, after `load_state_dict` in a run that continues after update `done`."""
        self.state.global_step, self.state.epoch = done, done * self.epochs_per_update
        self.control = self.handler.on_train_begin(self.args, self.state, self.control)

    def logs(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics as callbacks receive them; a subclass may rename them."""
        return dict(metrics)

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the state's history and fire `on_log`."""
        self.state.global_step, self.state.epoch = update, update * self.epochs_per_update
        logs = self.logs(metrics)
        self.state.log_history.append({**logs, "epoch": self.state.epoch, "step": update})
        self.control = self.handler.on_log(self.args, self.state, self.control, logs)

    def step_end(self, update: int) -> tuple[bool, bool]:
        """Fire `on_step_end`. Return whether to save and whether to stop, which any process can request for all."""
        self.state.global_step, self.state.epoch = update, update * self.epochs_per_update
        self.control = self.handler.on_step_end(self.args, self.state, self.control)
        wishes = (self.control.should_save, self.control.should_training_stop)
        save, stop = (bool(max_across_processes(int(wish), self.accelerator)) for wish in wishes)
        self.control.should_save = False
        return save, stop

    def saved(self) -> None:
        """Write the state and fire `on_save`."""
        self._write_state()
        self.control = self.handler.on_save(self.args, self.state, self.control)

    def end(self) -> None:
        """Fire `on_train_end` and write the state."""
        self.control = self.handler.on_train_end(self.args, self.state, self.control)
        self._write_state()

    def _stateful(self) -> list[Any]:
        return [part for part in (*self.handler.callbacks, self.control) if isinstance(part, ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        """Return the metric history and the states of callbacks by class name."""
        return {"log_history": _History(self.state.log_history), "callbacks": self._states()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the history, and the attributes of the callbacks that have a state."""
        self.state.log_history = list(state["log_history"])
        for part in self._stateful():
            saved = state["callbacks"].get(type(part).__name__)
            if saved and part is not self.control:
                for name, value in saved.pop(0)["attributes"].items():
                    setattr(part, name, value)

    def _states(self) -> dict[str, list[Any]]:
        states: dict[str, list[Any]] = {}
        for part in self._stateful():
            states.setdefault(type(part).__name__, []).append(part.state())
        return states

    def _write_state(self) -> None:
        states = self._states()
        # As transformers writes them: a list only if a class has several objects.
        single = {name: saved[0] if len(saved) == 1 else saved for name, saved in states.items()}
        self.state.stateful_callbacks = single  # type: ignore[assignment]
        if self.accelerator.is_main_process:
            write_json(self.path, asdict(self.state))


def require_callbacks(callbacks: Any) -> None:
    """Reject anything but a list of callbacks, and an `EarlyStoppingCallback`, which needs evaluations of `Trainer`.

    Raises:
        UserError: if the callbacks are invalid; names the wrong object.
    """
    if not isinstance(callbacks, Sequence):
        raise UserError(f"callbacks: must be a list, not {type(callbacks).__name__}; give callbacks=[...]")
    for callback in callbacks:
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            raise UserError(f"callbacks: {kind.__name__} is no TrainerCallback of transformers; derive it from that class")
        if issubclass(kind, EarlyStoppingCallback):
            raise UserError(
                f"callbacks: {kind.__name__} needs on_evaluate, which is never called; set "
                "selection.early_stopping_patience instead"
            )


def unfired_methods(callbacks: Sequence[TrainerCallback]) -> list[str]:
    """Return the methods that custom callbacks define for events that `TrainerCallbacks` never fires."""
    kinds = [type(callback) for callback in callbacks if not type(callback).__module__.startswith("transformers.")]
    return [
        f"{kind.__name__}.{name}"
        for kind in dict.fromkeys(kinds)
        for name, inherited in vars(TrainerCallback).items()
        if name.startswith("on_") and name not in FIRED and getattr(kind, name) is not inherited
    ]
