"""A run: processes, memory, log, updates and stops; `run_folder` has its files."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from align.core.errors import UserError, counted, without_secrets
from align.core.files import append_line
from align.core.settings import ModelConfig, OptimizationConfig, RunConfig, dump
from align.core.signals import Stopped, StopRequest
from align.models.checkpoint import UPDATE_ROW, make_repo, push_model, update_in_card
from align.runtime.distributed import (
    compute_dtype,
    limit_collectives,
    make_accelerator,
    run_on_all,
    run_on_main,
    sum_across_processes,
    watch_other_processes,
)
from align.runtime.flops import peak_flops
from align.runtime.progress import ProgressDisplay, console
from align.tokenization import set_template_date
from align.training.memory import GIB, Memory
from align.training.run_folder import RunFolder, environment, find_start, naming_disk_errors, release_lock

if TYPE_CHECKING:
    from align.training.callbacks import TrainerCallbacks
    from align.training.checkpoint import Checkpoint


class Run:
    """One run of a stage. Its folder is written when the first result is: an error before that leaves no files.

    Args:
        config: the stage's settings, which the folder keeps; they have the three groups of the attributes.
        stage: `sft`, `reward`, `rules`, `attributes`, `ppo`, `dpo` or `distill`.

    Raises:
        UserError: if the folder holds a finished or interrupted run and `resume_from_checkpoint` is off, or a run of another
            model, or if another process is writing one there.
    """

    def __init__(self, config: Any, stage: str) -> None:
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
        watch_other_processes(self.accelerator)
        run_on_all(lambda: files.require_usable(self.trackers), self.accelerator)  # machines may differ
        self.memory = Memory(self.accelerator, config, config)
        self.is_main = self.accelerator.is_main_process
        if torch.backends.mps.is_available():
            self.print("Apple's GPU (MPS) has no float64, which sums need here: this run is on the CPU")
        self.results = run_on_main(files.results, self.accelerator)
        self.checkpoint, self.continues_own, self.template_date = find_start(
            self.folder, self.results, config.resume_from_checkpoint, dump(config), self.accelerator, self.print
        )
        set_template_date(self.template_date)
        if config.push_to_hub and not config.dry_run:
            run_on_main(lambda: make_repo(config.push_to_hub), self.accelerator)
        self.accelerator.wait_for_everyone()  # every process has looked before one of them writes
        self.opened, self.update = False, 0
        self.length_setting = "total_updates" if hasattr(config, "total_updates") else "num_train_epochs"
        self.stop = StopRequest()
        self.callbacks: TrainerCallbacks | None = None
        self._update_start: tuple[Checkpoint, int, dict[str, Any]] | None = None
        """The state at the beginning of an update: a stop saves it as long as the update has changed no weight."""
        torch.manual_seed(config.seed)  # for new heads and adapters alone; training draws from `align.core.seeds`
        self.started, self.tokens_per_second = time.monotonic(), 0.0

    def open(self) -> None:
        """Lock the folder and write the files that precede all results. All processes call this before they write there.

        Raise a UserError, on every process, if another run writes to the folder, or wrote there after this one had looked.
        """
        if self.opened:
            return
        facts = environment() | {"template_date": self.template_date}
        previous, limit = (self.checkpoint, self.continues_own), self.config.save_total_limit
        for line in run_on_main(
            lambda: self.files.begin(self.results, dump(self.config), facts, *previous, limit), self.accelerator
        ):
            self.print(line)
        self.opened = True
        if self.trackers:
            with naming_disk_errors(self.folder):
                self.accelerator.init_trackers(self.stage)

    def print(self, message: str) -> None:
        """Print a line on the terminal, on the main process only."""
        if self.is_main and message:
            console.print(without_secrets(message))

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Write one line of metrics.jsonl and send it to the trackers. docs/metrics.md defines each name."""
        self.open()
        metrics = {**metrics, "memory/peak": self.memory.peak() / GIB}
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

    def card(self, title: str, data: str, metrics: Mapping[str, float], **more: str) -> dict[str, str]:
        """Return the contents of a saved model's card."""
        card = {"title": title, "stage": self.stage, "data": data, UPDATE_ROW: str(self.update)} | more
        return card | {name: f"{value:.4g}" for name, value in metrics.items()}

    def stale_update(self, done: int) -> int:
        """Return the update of the model in the folder if the run resumes from an earlier one, `done`; else 0.

        A killed run may have saved it after its checkpoint. Only a run with the same settings and code makes it again.
        """
        kept = run_on_main(lambda: update_in_card(self.folder / "model"), self.accelerator) if self.continues_own else 0
        return kept if kept > done else 0

    def speed(self, tokens: float, flops: float, seconds: float) -> dict[str, float]:
        """Tokens per second, and model FLOPs utilization (MFU): the share of all devices' peak."""
        accelerator = self.accelerator
        peak = peak_flops(accelerator.device, self.dtype) * accelerator.num_processes
        self.tokens_per_second = tokens / seconds
        return {"speed/tokens_per_second": self.tokens_per_second, "speed/mfu": flops / seconds / peak}

    def record(self, name: str, rows: list[dict[str, Any]], update: int) -> None:
        """Append rows (samples, for example) to `name`.jsonl in the run folder, each with its update."""
        self.open()
        if self.is_main:
            self.files.write_rows(name, rows, update)

    def updates(self, first: int, total: int, checkpoint: "Checkpoint") -> Iterator[int]:
        """Count updates from `first` to `total` (both included), with a progress bar, or lines in a log file.

        The checkpoint is saved after every `save_steps` updates, where a callback asks for it, and before a stop. Raise
        `Stopped` if a process was asked to stop: after an update, or within one that has changed no weight.
        """
        self.open()
        limit_collectives()  # all engines have been made
        self.saved = self.update = first - 1
        if first > total:
            what = f"finished: {first - 1} of {total} updates"
            self.print(f"{what}; raise {self.length_setting} to continue, or choose another output_dir")
        in_update = False
        try:
            display = ProgressDisplay(f"{self.stage:>6}", total, first - 1, enabled=self.is_main)
            with display as self.progress, self.stop.listening():
                for update in range(first, total + 1):
                    self.update, self._update_start = update, (checkpoint, update, checkpoint.states())
                    in_update = True
                    yield update
                    in_update = False
                    self.memory.release_excess_memory()
                    self.progress.advance()
                    save, stop = self.callbacks.step_end(update) if self.callbacks else (False, False)
                    if save or (self.config.save_steps and update % self.config.save_steps == 0):
                        with self.stop.saving():
                            self._save(checkpoint, update)
                    if stop:
                        return
                    if update < total and self._asked_to_stop():
                        self._save_and_stop(checkpoint, update)
        except Stopped:
            if not in_update:
                raise
            # The update failed. Its error is reported, also if a launcher has asked this process to stop meanwhile.

    def weights_changed(self) -> None:
        """Note that the update has changed a weight: a stop waits for its end from here on."""
        self._update_start = None

    def raise_if_stop_requested(self, before_saving: Callable[[], None] = lambda: None) -> None:
        """Save the state at the beginning of the update and raise `Stopped`, if any process was asked to stop.

        An update that has changed a weight continues. All processes must call this. `before_saving` releases its tensors.
        """
        if self._update_start and self._asked_to_stop():
            before_saving()
            checkpoint, update, states = self._update_start
            self._save_and_stop(checkpoint, update - 1, states)

    def _save(self, checkpoint: "Checkpoint", update: int, states: dict[str, Any] | None = None) -> None:
        checkpoint.save(update, states)
        self.saved = update
        if self.callbacks:
            self.callbacks.saved()

    def _save_and_stop(self, checkpoint: "Checkpoint", update: int, states: dict[str, Any] | None = None) -> NoReturn:
        with self.stop.saving():
            if update != self.saved:
                self._save(checkpoint, update, states)
        by = self.stop.signal or "a signal"
        raise Stopped(f"stopped by {by} after update {update}; --resume_from_checkpoint auto continues it", everywhere=True)

    def _asked_to_stop(self) -> bool:
        """Whether any process was asked to stop; the same on all of them."""
        asked = torch.tensor(float(bool(self.stop.signal)), device=self.accelerator.device)
        return bool(sum_across_processes(asked, self.accelerator) > 0)

    def set_progress(self, text: str) -> None:
        """Show a few metrics of the last logged update next to the progress bar, and its speed."""
        self.progress.set_text(f"{text}, {self.tokens_per_second:,.0f} tokens/s")

    def close(self) -> None:
        """Finish callbacks and trackers, push the model and release the folder. The process group stays open."""
        if self.callbacks and self.opened:
            self.callbacks.end()
        self.accelerator.wait_for_everyone()
        with naming_disk_errors(self.folder / self.stage):
            for tracker in self.accelerator.trackers if self.opened and self.trackers else ():
                tracker.finish()
        repo, folder = self.config.push_to_hub, self.folder / "model"
        if self.is_main and self.opened and repo and folder.exists():
            try:
                self.print(f"pushed to {push_model(folder, repo)}")
            except UserError as error:
                self.print(f"warning: {error}; the model is in {folder}; repeat with: align model push {folder} {repo}")
        release_lock(self.folder)

    def end_dry_run(self, updates: int, done: int) -> Path:
        """Print the plan of a run of `updates`, `done` before its checkpoint, and close it; return its model's folder."""
        config, folder = self.config, self.folder
        saves = f"a checkpoint every {config.save_steps}" if config.save_steps else "no checkpoints (save_steps 0)"
        start = f", from {self.checkpoint}" if self.checkpoint else ""
        left = f"; {counted(max(0, updates - done), 'update')} left" if self.checkpoint else ""
        self.print(
            f"dry run: {counted(updates, 'update')}{start}; {saves}{left}; the model would be in {folder / 'model'}; "
            "nothing was written"
        )
        self.close()
        return folder / "model"
