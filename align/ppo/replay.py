"""Samples a response of a PPO run again, to the bit, from the state that the run had before that update."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from align.errors import UserError
from align.files import read_json
from align.ppo.config import PPOConfig
from align.ppo.rollout_files import RolloutRow, RolloutWriter, read_rollout, rollout_path, rows_of
from align.ppo.trainer import PPOTrainer, make_trainer
from align.runtime.environment import environment
from align.settings_parser import parse
from align.training.checkpoint_files import checkpoints_by_update


class Replay(NamedTuple):
    """A response that was sampled again."""

    row: RolloutRow
    recorded: RolloutRow | None
    """The row that the run wrote; None if it wrote none."""
    difference: str
    """The first difference; "" if there is none, or nothing was written."""


@contextmanager
def trainer_of_run(run: Path) -> Iterator[PPOTrainer]:
    """The trainer that a run's settings make, in a folder of its own: nothing is written into the run's.

    Raises:
        UserError: if the folder holds no run of PPO, or what it was made from is gone.
    """
    path = run / "config.yaml"
    if not path.exists():
        raise UserError(f"{run}: no run of align ppo in it (there is no config.yaml)")
    with tempfile.TemporaryDirectory() as folder:
        words = ["--config", str(path), "--output_dir", folder, "--log_to", "none", "--resume", "false"]
        yield make_trainer(parse(PPOConfig, words))


def replay(trainer: PPOTrainer, run: Path, update: int, row: int, learn_again: int = 0) -> Replay:
    """Sample an update's rollout again and compare one of its rows with what the run wrote.

    The whole rollout is sampled and scored, in the batches of the run: the last bits of a number depend on its batch.

    Args:
        trainer: made from the run's settings; it must not have trained.
        run: the run's folder.
        update: from 1.
        row: its place in the rollout, from 0.
        learn_again: updates that may be learned again, from the last state before that is kept.

    Raises:
        UserError: if there is no such row, or the state before that update is not kept.
    """
    config = trainer.config
    if not 1 <= update <= config.updates or not 0 <= row < config.rollout_size:
        raise UserError(
            f"{run}: no update {update}, row {row}; the run has updates 1 to {config.updates} and rows 0 to "
            f"{config.rollout_size - 1}"
        )
    if config.engine != "transformers":
        raise UserError(f"{run}: engine {config.engine} sampled it, whose random numbers are its own: it cannot be replayed")
    recorded = _recorded(trainer, run, update, row)
    start, checkpoint = _state_before(run, update, learn_again)
    trainer.run.checkpoint = checkpoint
    algorithm = trainer.algorithm
    algorithm.restore()
    algorithm.rollouts = RolloutWriter(trainer.run, algorithm.loaded.tokenization, config.updates, keep=0, rows=0)
    for earlier in range(start + 1, update):
        trainer.run.say(f"learning update {earlier} again")
        algorithm.run_update(earlier)
    experience, rewards, parts, _ = algorithm.collect(update)
    (again,) = rows_of(update, experience, rewards, parts, algorithm.loaded.tokenization, [row])
    difference = ""
    if recorded is not None and (what := describe_difference(recorded, again)):
        difference = f"{run}: update {update}, row {row} differs from the recording: {what}{_changed_environment(run)}"
    return Replay(again, recorded, difference)


def _recorded(trainer: PPOTrainer, run: Path, update: int, row: int) -> RolloutRow | None:
    """The row that the run wrote, if it wrote it.

    Raises:
        UserError: if it ran on another number of processes than this does.
    """
    path = rollout_path(run, update)
    if not path.exists():
        return None
    written, processes = read_rollout(path), trainer.run.accelerator.num_processes
    if written.processes != processes:
        raise UserError(
            f"{run}: it ran on {written.processes} processes, and this is {processes}; the last bits depend on that: start "
            f"it with accelerate launch --num_processes {written.processes} -m align.cli replay"
        )
    return next((each for each in written.rows if each.row == row), None)


def _state_before(run: Path, update: int, learn_again: int) -> tuple[int, Path | None]:
    """The last state before an update: after which update it was written, and its folder (None: the start of the run).

    Raises:
        UserError: if more than `learn_again` updates lie between.
    """
    kept: dict[int, Path | None] = {0: None, **checkpoints_by_update(run)}
    start = max(done for done in kept if done < update)
    missing = update - 1 - start
    if missing > learn_again:
        raise UserError(
            f"{run}: the policy before update {update} is not kept (kept: before update "
            f"{', '.join(str(done + 1) for done in sorted(kept))}); save_every 1 and keep_checkpoints 0 keep every one, and "
            f"--learn_again {missing} learns the {missing} updates between again"
        )
    return start, kept[start]


def describe_difference(before: RolloutRow, after: RolloutRow) -> str:
    """The first thing in which two rows differ, in words; "" if they are equal to the bit."""
    for number, (old, new) in enumerate(zip(before.tokens, after.tokens, strict=False)):
        if before.ids[number] != after.ids[number]:
            return f"token {number} was {old!r} and is {new!r}"
    for item in fields(RolloutRow):
        old, new = getattr(before, item.name), getattr(after, item.name)
        if old == new:
            continue
        if isinstance(old, list) and len(old) == len(new):
            index = next(number for number, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
            return f"{item.name} at token {index} was {old[index]!r} and is {new[index]!r}"
        return f"{item.name} was {old!r} and is {new!r}"
    return ""


def _changed_environment(run: Path) -> str:
    """What has changed since the run in versions and machine, as the end of a sentence."""
    try:
        before = _flatten(read_json(run / "environment.json"))
    except UserError:
        return ""
    now = _flatten(environment())
    changed = [f"{name} {value} (now {now.get(name)})" for name, value in before.items() if now.get(name) != value]
    return f"; the run had {', '.join(changed)}" if changed else "; were its models, data or settings changed since?"


def _flatten(values: dict[str, object]) -> dict[str, object]:
    packages = values.get("packages")
    return {**values, **(packages if isinstance(packages, dict) else {}), "packages": None}
