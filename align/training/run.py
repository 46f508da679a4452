"""A run: processes, memory, log, updates and stops; `run_folder` has its files."""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

import torch

from align.core.errors import UserError, counted, without_secrets
from align.core.files import append_line
from align.core.settings import ModelConfig, OptimizationConfig, RunConfig, dump
from align.core.signals import Stopped, StopRequest
from align.models.checkpoint import UPDATE_ROW, make_repo, push_model, update_in_card
from align.runtime.distributed import (
    compute_dtype,
    launch_line,
    limit_collectives,
    make_accelerator,
    run_on_all,
    run_on_main,
    sum_across_processes,
    watch_other_processes,
    zero_stage,
)
from align.runtime.process import freed_memory_kept
from align.runtime.progress import ProgressDisplay, console
from align.tokenization import set_template_date
from align.training.cost import cost_metrics, hours_in
from align.training.loaded_models import LoadedModels
from align.training.memory import GIB, Memory
from align.training.process_state import preserved_process_state
from align.training.run_folder import (
    RunFolder,
    environment,
    find_start,
    input_digests,
    naming_disk_errors,
    release_lock,
)

if TYPE_CHECKING:
    from align.training.callbacks import TrainerCallbacks

NEXT = {
    "sft": "align chat {model}, or train a reward model: align reward --model {model} --train_data RANKINGS",
    "reward": "align ppo --model SFT_MODEL --reward_model {model}, or a report: align report {run}",
    "ppo": "align chat {model}, or a report with curves and samples: align report {run}",
    "dpo": "align chat {model}, or a report with curves: align report {run}",
    "rules": "align sample or align ppo with this rule model (docs/rules.md)",
    "attributes": "align sample or align ppo with this attribute model (docs/rules.md)",
    "distill": "align chat {model}",
}
"""The usual next commands after each stage."""
LARGEST_SAVING_SHARE = 0.05
"""Maximum fraction of the run time for time-based checkpoints, so that large models save less often."""


class Savable(Protocol):
    """What `Run.updates` saves: a `Checkpoint`."""

    def states(self) -> dict[str, Any]:
        """Return the current states of all objects in the checkpoint except the engine."""

    def save(self, update: int, states: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint after an update."""


class Run:
    """One run of a stage. Its folder is written with the first result; an earlier error leaves no files.

    Train inside `with run:`. On exit, also after an error or Ctrl-C, it removes everything that it installed (signal
    handlers, threads, the lock of the folder, the progress bar, trackers).

    Args:
        config: settings of the stage, which the folder stores; they have the three groups of the attributes.
        stage: `sft`, `reward`, `rules`, `attributes`, `ppo`, `dpo` or `distill`.
        callbacks: transformers callbacks, or None.

    Raises:
        UserError: if the folder holds a finished or interrupted run and `resume_from_checkpoint` is off, or a run of another
            model, or if another process is writing one there.
    """

    def __init__(self, config: Any, stage: str, callbacks: "TrainerCallbacks | None" = None) -> None:
        self.config: RunConfig = config
        self.model_config: ModelConfig = config
        self.optimization: OptimizationConfig = config
        self.stage, self.dtype = stage, compute_dtype(config.dtype)
        files = RunFolder(Path(config.output_dir))
        self.files, self.folder = files, files.path
        self.trackers = [name for name in config.report_to if name != "none"]
        self.accelerator = make_accelerator(
            self.dtype,
            config.max_grad_norm,
            config.collective_timeout,
            log_with=self.trackers or None,
            project_dir=str(self.folder),
        )
        self.is_main = self.accelerator.is_main_process
        self.print(launch_line(self.accelerator))
        watch_other_processes(self.accelerator)
        run_on_all(lambda: files.require_usable(self.trackers), self.accelerator)  # machines may differ
        self.memory, self.models = Memory(self.accelerator, config, config), LoadedModels(self.accelerator)
        if torch.backends.mps.is_available():
            self.print("Apple's GPU (MPS) has no float64, which sums need here: this run is on the CPU")
        self.results = run_on_main(files.results, self.accelerator)
        self.checkpoint, self.continues_own, self.template_date = find_start(
            self.folder, self.results, config.resume_from_checkpoint, dump(config), self.accelerator, self.print
        )
        set_template_date(self.template_date)
        if config.push_to_hub and not config.dry_run:
            run_on_main(lambda: make_repo(config.push_to_hub), self.accelerator)
        self.accelerator.wait_for_everyone()  # every process looks before any process writes
        spent = run_on_main(lambda: hours_in(files.metrics), self.accelerator)
        self.device_hours_before = spent if self.continues_own else 0.0
        self.opened, self.update = False, 0
        self.stop, self.callbacks = StopRequest(), callbacks
        self._update_start: tuple[Savable, int, dict[str, Any]] | None = None
        """The state at the beginning of an update: a stop saves it as long as the update has changed no weight."""
        torch.manual_seed(config.seed)  # only for new heads and adapters; training draws from `align.core.seeds`
        self.started = time.monotonic()
        self.part_started = self.started  # the time of earlier parts of a resumed run does not shift this
        self.saved_at, self.saving_seconds = self.started, 0.0
        """Completion time and duration of the last checkpoint."""
        self.update_began, self.seconds_per_update = self.started, 0.0
        self._installed, self._listening = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        installed = self._installed
        installed.enter_context(preserved_process_state(self.accelerator.state.__dict__))
        set_template_date(self.template_date)
        torch.manual_seed(self.config.seed)
        if zero_stage(self.accelerator) < 3:
            installed.enter_context(freed_memory_kept())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            with suppress(*([Stopped] if kind else [])):  # a launcher kills the other processes of a failed run
                self.release()

    def release(self) -> None:
        """Restore the process as it was before the run; the folder is free for another run."""
        with ExitStack() as undone:
            undone.enter_context(self._installed)
            if self.opened:
                undone.callback(release_lock, self.folder)
                undone.enter_context(suppress(OSError))
                undone.callback(self._finish_trackers)
            undone.enter_context(self._listening)

    def open(self) -> None:
        """Lock the folder and write the files that precede all results. All processes call this before they write there.

        Raise a UserError, on every process, if another run writes to the folder, or wrote to it after this run checked.
        """
        if self.opened:
            return
        previous, limit = (self.checkpoint, self.continues_own), self.config.save_total_limit

        def begin() -> list[str]:
            facts = {"template_date": self.template_date, "inputs": input_digests(asdict(self.config))}
            return self.files.begin(self.results, dump(self.config), environment() | facts, *previous, limit)

        try:
            lines = run_on_main(begin, self.accelerator)
        except BaseException:
            release_lock(self.folder)
            raise
        self.opened = True
        for line in lines:
            self.print(line)
        if self.is_main and self.checkpoint and self.continues_own:
            self.started -= self.files.seconds()
        if self.trackers:
            with naming_disk_errors(self.folder):
                self.accelerator.init_trackers(self.stage)

    def begin(self, done: int) -> None:
        """Tell the callbacks that training begins after update `done`."""
        if self.callbacks:
            self.callbacks.begin(done)

    def print(self, message: str) -> None:
        """Print a line on the terminal, on the main process only."""
        if self.is_main and message:
            console.print(without_secrets(message))

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Write one line of metrics.jsonl and send it to the trackers. docs/metrics.md defines the names."""
        self.open()
        metrics = {**metrics, **self.cost(), "memory/peak": self.memory.peak() / GIB}
        if self.callbacks:
            self.callbacks.log(update, metrics)
        if not self.is_main:
            return
        row = {"update": update, "seconds": round(time.monotonic() - self.started, 3)}
        row |= {name: float(f"{value:.7g}") for name, value in metrics.items()}
        with naming_disk_errors(self.files.metrics):
            append_line(self.files.metrics, json.dumps(row) + "\n")
        with naming_disk_errors(self.folder / self.stage):
            self.accelerator.log(metrics, step=update)

    def card(self, title: str, data: str, metrics: Mapping[str, float], **rows: str) -> dict[str, str]:
        """Return the contents of a saved model's card."""
        card = {"title": title, "stage": self.stage, "data": data, UPDATE_ROW: str(self.update)} | rows
        return card | {name: f"{value:.4g}" for name, value in {**metrics, **self.cost()}.items()}

    def cost(self) -> dict[str, float]:
        """Return the costs of the run since its first start, as metrics."""
        hours = (time.monotonic() - self.part_started) / 3600 * self.accelerator.num_processes
        return cost_metrics(self.config, self.device_hours_before + hours)

    def stale_update(self, done: int) -> int:
        """Return the update of the model in the folder if the run resumes from an earlier one, `done`; else 0.

        A killed run may have saved it after its checkpoint. Only a run with the same settings and code reproduces it.
        """
        kept = run_on_main(lambda: update_in_card(self.folder / "model"), self.accelerator) if self.continues_own else 0
        return kept if kept > done else 0

    def record(self, name: str, rows: list[dict[str, Any]], update: int) -> None:
        """Append rows (samples, for example) to `name`.jsonl in the run folder, each with its update."""
        self.open()
        if self.is_main:
            self.files.write_rows(name, rows, update)

    def updates(self, first: int, total: int, checkpoint: Savable) -> Iterator[int]:
        """Count updates from `first` to `total` (both included), with a progress bar, or lines in a log file.

        The checkpoint is saved after every `save_steps` updates, if a callback requests it, and before a stop. Raise
        `Stopped` if a process was asked to stop: after an update, or within one that has changed no weight.
        """
        self.open()
        limit_collectives()  # all engines have been made
        self.saved = self.update = first - 1
        if first > total:
            what = f"finished: {first - 1} of {total} updates"
            self.print(f"{what}; raise {self.config.length_setting} to continue, or choose another output_dir")
        in_update = False
        try:
            with self._listening as listening:
                bar = ProgressDisplay(f"{self.stage:>6}", total, first - 1, enabled=self.is_main)
                self.progress = listening.enter_context(bar)
                listening.enter_context(self.stop.listening(self._announce_stop))
                self.saved_at = time.monotonic()
                for update in range(first, total + 1):
                    self.update, self._update_start = update, (checkpoint, update, checkpoint.states())
                    self.update_began, in_update = time.monotonic(), True
                    yield update
                    in_update, self.seconds_per_update = False, time.monotonic() - self.update_began
                    self.memory.release_excess_memory()
                    self.progress.advance()
                    save, stop = self.callbacks.step_end(update) if self.callbacks else (False, False)
                    if save or (self.config.save_steps and update % self.config.save_steps == 0):
                        with self.stop.saving():
                            self._save(checkpoint, update)
                    if stop:
                        return
                    if update < total:
                        self._save_by_time_or_stop(checkpoint, update)
        except Stopped:
            if not in_update:
                raise
            # The update failed. Report its error even if a launcher has asked this process to stop meanwhile.

    def weights_changed(self) -> None:
        """Record that the update has changed a weight. From then on, a stop waits for the end of the update."""
        self._update_start = None

    def raise_if_stop_requested(self, before_saving: Callable[[], None] = lambda: None) -> None:
        """Save the state at the beginning of the update and raise `Stopped`, if any process was asked to stop.

        An update that has changed a weight continues. All processes must call this. `before_saving` releases its tensors.
        """
        if self._update_start and self._asked_to_stop():
            before_saving()
            checkpoint, update, states = self._update_start
            self._save_and_stop(checkpoint, update - 1, states)

    def _save_by_time_or_stop(self, checkpoint: Savable, update: int) -> None:
        """Save if `save_minutes` have passed since the last checkpoint, or before a stop requested on any process."""
        interval = max(60 * self.config.save_minutes, self.saving_seconds / LARGEST_SAVING_SHARE)
        by_time = self.config.save_minutes > 0 and not self.config.save_steps
        is_due = self.is_main and by_time and time.monotonic() - self.saved_at > interval
        asked, due = self._any_process(bool(self.stop.signal), is_due)
        if asked:
            self._save_and_stop(checkpoint, update)
        if due and update != self.saved:
            try:
                with self.stop.saving():
                    self._save(checkpoint, update)
            except UserError as error:  # a full disk must not end a run that needs no disk before its end
                self.saved_at = time.monotonic()
                self.print(f"warning: {error}; the run continues without this checkpoint")

    def _announce_stop(self, number: int) -> None:
        """Print at once when the run will stop."""
        left = self.seconds_per_update - (time.monotonic() - self.update_began)
        about = f", about {left:.0f} s" if left >= 1 else ""
        again = "; press Ctrl-C again to stop now" if number == signal.SIGINT else ""
        self.print(f"{signal.Signals(number).name}: stopping after this update{about}{again}")

    def _save(self, checkpoint: Savable, update: int, states: dict[str, Any] | None = None) -> None:
        began = time.monotonic()
        checkpoint.save(update, states)
        self.saved, self.saved_at = update, time.monotonic()
        self.saving_seconds = self.saved_at - began
        if self.callbacks:
            self.callbacks.saved()

    def _save_and_stop(self, checkpoint: Savable, update: int, states: dict[str, Any] | None = None) -> NoReturn:
        with self.stop.saving():
            if update != self.saved:
                self._save(checkpoint, update, states)
        by = self.stop.signal or "a signal"
        raise Stopped(f"stopped by {by} after update {update}; --resume_from_checkpoint auto continues it", everywhere=True)

    def _asked_to_stop(self) -> bool:
        """Return whether any process was asked to stop. Identical on every process."""
        return self._any_process(bool(self.stop.signal))[0]

    def _any_process(self, *wishes: bool) -> list[bool]:
        """Return for each flag whether it is true on any process. Identical on every process."""
        wanted = torch.tensor([float(wish) for wish in wishes], device=self.accelerator.device)
        return [count > 0 for count in sum_across_processes(wanted, self.accelerator).tolist()]

    def set_progress(self, text: str) -> None:
        """Show a text next to the progress bar, or at the end of the next line of a log file."""
        self.progress.set_text(text)

    def close(self) -> None:
        """Finish callbacks and trackers, push the model and release the process. The process group stays open."""
        if self.callbacks and self.opened:
            self.callbacks.end()
        self.accelerator.wait_for_everyone()
        with naming_disk_errors(self.folder / self.stage):
            self._finish_trackers()
        repo, folder = self.config.push_to_hub, self.folder / "model"
        if self.is_main and self.opened and repo and folder.exists():
            try:
                self.print(f"pushed to {push_model(folder, repo)}")
            except UserError as error:
                self.print(f"warning: {error}; the model is in {folder}; repeat with: align model push {folder} {repo}")
        if self.opened and self.is_main and folder.exists():
            self.print(f"model: {folder}\nnext: {NEXT.get(self.stage, NEXT['sft']).format(model=folder, run=self.folder)}")
        self.release()

    def _finish_trackers(self) -> None:
        trackers, self.trackers = self.trackers, []
        for tracker in self.accelerator.trackers if trackers else ():
            tracker.finish()

    def end_dry_run(self, updates: int, done: int) -> Path:
        """Print the plan of a run of `updates`, `done` before its checkpoint; return its model's folder."""
        config, folder = self.config, self.folder
        saves = "no checkpoints (save_steps and save_minutes are 0)"
        if config.save_steps or config.save_minutes:
            saves = f"a checkpoint every {config.save_steps or f'{config.save_minutes:g} minutes'}"
        start = f", from {self.checkpoint}" if self.checkpoint else ""
        left = f"; {counted(max(0, updates - done), 'update')} left" if self.checkpoint else ""
        self.print(
            f"dry run: {counted(updates, 'update')}{start}; {saves}{left}; the model would be in {folder / 'model'}; "
            "nothing was written"
        )
        return folder / "model"
