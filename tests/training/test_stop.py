import gc
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from align import cli
from align.core.errors import UserError
from align.core.signals import EXIT_STOPPED, Stopped
from align.ppo.extensions import Extension
from align.sft import SFTConfig
from align.training.checkpoint.checkpoint import Checkpoint
from align.training.engine import TrainEngine
from tests.files import ROOT
from tests.launch.compared import compare, metrics

COMMON = "--model tiny-gpt2 --dtype float32 --report_to none --overlong truncate --max_prompt_tokens 64 --learning_rate 1e-3"
PPO = "--validation_prompts data/prompts_validation.jsonl --total_updates 6 --rollout_batch_size 4 "
PPO += "--num_ppo_epochs 2 --max_new_tokens 4 "
PPO += f"--missing_eos_score none --kl_target 1 --eval_steps 3 --extensions {__name__}:Fading"
SFT = "--train_data data/demonstrations_heldout.jsonl --batch_size 6 --max_response_tokens 16 --num_train_epochs 1"


class Fading(Extension):
    """Divides scores by their number so far: a state that changes before the first step of an update."""

    def __init__(self):
        self.count = 0

    def shape(self, signal, rollout, old):
        self.count += len(signal.scores)
        return replace(signal, scores=signal.scores / self.count)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.fixture
def signals_itself(tmp_path, monkeypatch):
    """`signals_itself(call, signal)`: a reward function whose call of that number gets the signal, once."""
    code = """
        import json, os, pathlib

        def reward(prompts, responses):
            path = pathlib.Path(__file__).with_name("when.json")
            when = json.loads(path.read_text())
            path.write_text(json.dumps([when[0] - 1, when[1]]))
            if when[0] == 0:
                os.kill(os.getpid(), when[1])
            return [len(response) % 5 for response in responses]
    """
    (tmp_path / "telling_rewards.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    yield lambda call, number: (tmp_path / "when.json").write_text(json.dumps([call, number]))
    sys.modules.pop("telling_rewards", None)


@pytest.mark.parametrize("fails", [True, False])
def test_a_signal_at_the_end_of_a_failed_update_hides_no_error(fails, make_run, monkeypatch):
    """A launcher sends it to what is left of a run that lost a process: the error is told, and nothing beside it."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    run = make_run(SFTConfig, "sft")

    @contextmanager
    def stopped_meanwhile():
        try:
            yield
        finally:
            raise Stopped("stopped by SIGTERM")

    monkeypatch.setattr(run.stop, "listening", lambda announce: stopped_meanwhile())

    def train():
        for _ in run.updates(1, 2, Checkpoint(run, TrainEngine(run, nn.Linear(1, 1), 2), {})):
            if fails:
                raise ValueError

    with pytest.raises(ValueError if fails else Stopped):
        train()
    gc.collect()
    assert not unraisable


def ppo(folder: Path, *more: str) -> list[str]:
    rewards = ["--reward_functions", "telling_rewards:reward"]
    return ["ppo", *COMMON.split(), *PPO.split(), *rewards, "--output_dir", str(folder), *more]


def stops(words: list[str], capsys) -> list[str]:
    """Run a command that is asked to stop; gives the lines that it printed."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    printed = capsys.readouterr().err
    assert ended.value.code == EXIT_STOPPED
    assert "Traceback" not in printed
    return printed.splitlines()


# Calls of the reward: 0 is the evaluation before the first update, 4 that after the third.
@pytest.mark.parametrize(
    ("call", "number", "after"),
    [(2, signal.SIGTERM, 1), (3, signal.SIGUSR1, 2), (4, signal.SIGINT, 3)],
    ids=["while update 2 scores", "while update 3 scores", "in the evaluation after update 3"],
)
def test_ppo_saves_what_is_complete_and_goes_on_to_the_same_bits(call, number, after, signals_itself, tmp_path, capsys):
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    signals_itself(call, number)
    line = f"stopped by {signal.Signals(number).name} after update {after}; --resume_from_checkpoint auto continues it"
    assert stops(ppo(stopped), capsys)[-1] == line
    assert [path.name for path in stopped.glob("checkpoints/*")] == [f"update-{after:06d}"]
    cli.main(ppo(stopped, "--resume_from_checkpoint", "auto"))
    assert "resumed from" in capsys.readouterr().err
    signals_itself(-1, 0)
    cli.main(ppo(whole, "--resume_from_checkpoint", "auto"))  # nothing to resume: it starts
    assert compare(stopped, whole).largest == 0


def test_a_signal_in_the_last_update_or_before_the_first_leaves_nothing_to_resume(signals_itself, tmp_path, capsys):
    signals_itself(7, signal.SIGTERM)
    cli.main(ppo(tmp_path / "run", "--total_updates", "5", "--eval_steps", "5"))
    assert (tmp_path / "run" / "model").exists()
    signals_itself(0, signal.SIGTERM)
    assert stops(ppo(tmp_path / "second"), capsys)[-1] == "stopped by SIGTERM"
    assert not (tmp_path / "second" / "checkpoints").exists()


def test_fine_tuning_stops_in_a_process_of_its_own_while_it_trains(tmp_path):
    words = [sys.executable, "align/sft/train.py", *COMMON.split(), *SFT.split(), "--num_train_epochs", "500"]
    process = subprocess.Popen(
        [*words, "--output_dir", str(tmp_path / "run")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (lines.exists() and '"update": 2,' in lines.read_text()):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=240)[1]
    assert process.returncode == EXIT_STOPPED, printed
    assert "Traceback" not in printed
    done = metrics(tmp_path / "run")[-1]["update"]
    assert [path.name for path in tmp_path.glob("run/checkpoints/*")] == [f"update-{done:06d}"]
    assert printed.splitlines()[-1] == f"stopped by SIGTERM after update {done}; --resume_from_checkpoint auto continues it"


LONG_CALL = """
import hashlib, os, signal
from align.core import signals
signals.GRACE_SECONDS = 0.1
with signals.StopRequest().listening():
    os.kill(os.getpid(), signal.SIGTERM)
    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)
"""
NO_LIMIT = """
import os, signal, time
from align.core import signals
signals.GRACE_SECONDS = 0.1
with signals.StopRequest().listening(lambda number: print("announced", signal.Signals(number).name, flush=True)) as _:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(2)
    print("still running", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""
SLOW_DISK = """
import os, signal, sys, time
from align.core import signals
from align.sft import SFTConfig
from align.training.run import Run
signals.WARNING_SECONDS = 1.0
every = int(sys.argv[2])
run = Run(SFTConfig(output_dir=sys.argv[1], dtype="float32", report_to=["none"], save_steps=every), "sft")

class Slow:
    def states(self):
        return {}

    def save(self, update, states=None):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(60)

for update in run.updates(1, 2, Slow()):
    if not every:
        os.kill(os.getpid(), signal.SIGUSR1)
"""
WRITTEN = "stopped by SIGUSR1 while saving a checkpoint, which took longer than 1 s"


@pytest.mark.parametrize(
    ("code", "words", "line"),
    [
        (LONG_CALL, [], "stopped by SIGTERM during an update, without saving"),
        (SLOW_DISK, ["1"], WRITTEN),  # by save_steps
        (SLOW_DISK, ["0"], WRITTEN),  # by the request to stop
    ],
)
def test_a_process_that_reaches_no_safe_place_in_time_ends_and_says_where_it_was(code, words, line, tmp_path):
    """Even inside one long call that no signal interrupts, or a save to a slow disk."""
    program = [sys.executable, "-c", code, str(tmp_path / "run"), *words]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == EXIT_STOPPED, done.stderr
    assert done.stderr.splitlines()[-1].startswith(line)


def test_ctrl_c_is_announced_at_once_and_has_no_time_limit_and_a_second_one_interrupts():
    done = subprocess.run(
        [sys.executable, "-c", NO_LIMIT], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.split("\n")[:2] == ["announced SIGINT", "still running"], done.stderr
    assert "KeyboardInterrupt" in done.stderr


LONG_UPDATES = """
import sys, time
from align.core.launch import run_stage
from align.sft import SFTConfig, run_sft
from align.training.engine import TrainEngine
step = TrainEngine.step
def slow_step(self, *values, **named):
    metrics = step(self, *values, **named)
    time.sleep(4)
    return metrics
TrainEngine.step = slow_step
run_stage(SFTConfig, run_sft)
"""


def start_long_updates(folder: Path, *more: str) -> "subprocess.Popen[str]":
    words = [*COMMON.split(), *SFT.split(), "--num_train_epochs", "500", "--output_dir", str(folder), *more]
    program = [sys.executable, "-c", LONG_UPDATES, *words]
    return subprocess.Popen(program, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, text: str, process: "subprocess.Popen[str]") -> None:
    while process.poll() is None and not (path.exists() and text in path.read_text()):
        time.sleep(0.01)


def test_ctrl_c_says_at_once_when_the_run_stops_and_then_saves(tmp_path):
    run = tmp_path / "run"
    process = start_long_updates(run)
    wait_for(run / "metrics.jsonl", '"update": 1,', process)
    time.sleep(0.5)  # within the second update, whose length is known
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    line = next((line for line in process.stderr if "SIGINT" in line), "")
    assert not list(run.glob("checkpoints/*")), "the line came before the checkpoint"
    assert re.match(r"SIGINT: stopping after this update, about \d+ s; press Ctrl-C again to stop now", line)
    printed = process.communicate(timeout=240)[1]
    assert process.returncode == EXIT_STOPPED, printed
    assert "stopped by SIGINT after update 2; --resume_from_checkpoint auto continues it" in printed
    assert [path.name for path in run.glob("checkpoints/*")] == ["update-000002"]


def test_a_killed_run_without_save_steps_loses_the_updates_since_its_last_checkpoint_by_time(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    process = start_long_updates(run, "--save_minutes", "0.0001")
    wait_for(run / "metrics.jsonl", '"update": 2,', process)
    process.kill()
    process.communicate(timeout=240)
    assert [path.name for path in run.glob("checkpoints/update-*")] == ["update-000001"]
    monkeypatch.chdir(ROOT)
    cli.main(["sft", *COMMON.split(), *SFT.split(), "--output_dir", str(run), "--resume_from_checkpoint", "auto"])
    assert f"resumed from {run}/checkpoints/update-000001" in capsys.readouterr().err
    updates = [row["update"] for row in metrics(run)]
    assert updates == list(range(len(updates)))


class Disk:
    """A checkpoint on a disk that is full."""

    def __init__(self) -> None:
        self.tries = 0

    def states(self):
        return {}

    def save(self, update, states=None):
        self.tries += 1
        raise UserError(f"update-{update}: cannot be written (No space left on device)")


@pytest.mark.parametrize("by_time", [True, False])
def test_a_full_disk_ends_no_run_that_saves_by_time_alone(by_time, make_run, capsys):
    run, disk = make_run(SFTConfig, "sft", save_minutes=1e-9, save_steps=0 if by_time else 1), Disk()
    try:
        assert list(run.updates(1, 4, disk)) == [1, 2, 3, 4]
    except UserError:
        assert not by_time
    assert disk.tries == (3 if by_time else 1)
    assert capsys.readouterr().err.count("No space left on device") == disk.tries * by_time
