import io
import re
import subprocess
import sys
from datetime import timedelta

import pytest

from align import cli
from align.data.readers import write_records
from align.data.records import Prompt
from align.runtime import progress
from align.runtime.progress import LINE_INTERVAL, ProgressDisplay
from tests.files import ROOT

TINY = ["--dtype", "float32", "--report_to", "none"]


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets; returns the function that moves it."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def move(seconds):
        now[0] += seconds

    return move


def test_the_first_the_last_and_one_step_in_each_interval_get_a_line(clock, capsys):
    with ProgressDisplay("  ppo", total=8, completed=1) as display:
        for step in range(2, 9):
            display.set_text(f"reward {step / 10}")
            clock(LINE_INTERVAL / 4)
            display.advance()
    # The first of 7 steps took 2.5 s, so 6 x 2.5 = 15 s are left; 4 steps later 10 s have passed.
    assert capsys.readouterr().err.splitlines() == [
        "ppo 2/8: reward 0.2, 0:00:15 left",
        "ppo 6/8: reward 0.6, 0:00:05 left",
        "ppo 8/8: reward 0.8",
    ]


@pytest.mark.parametrize("seconds", [10, 31, 400])
def test_a_terminal_shows_the_remaining_time_of_long_steps_too(seconds, clock, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(
        progress, "console", progress.LineConsole(file=shown, force_terminal=True, color_system=None, width=120)
    )
    with ProgressDisplay("ppo", total=4) as display:
        assert display.remaining() == ""
        for _ in range(2):
            clock(seconds)
            display.advance()
        clock(5)
        display.bar.refresh()
    left = str(timedelta(seconds=2 * seconds - 5))
    assert f"left {left}" in shown.getvalue()


def test_a_terminal_breaks_lines_between_words_and_a_log_file_nowhere():
    words = " ".join(f"word{number}" for number in range(40))
    for is_terminal in (True, False):
        shown = io.StringIO()
        progress.LineConsole(file=shown, force_terminal=is_terminal, width=50, markup=False).print(words)
        lines = shown.getvalue().splitlines()
        assert len(lines) > 1 if is_terminal else lines == [words]
        assert [word for line in lines for word in line.split()] == words.split()


def test_hours_and_work_that_was_complete_before_are_printed(clock, capsys):
    with ProgressDisplay("sft", total=100) as display:
        clock(61)
        display.advance()
    with ProgressDisplay("toxicity-a", total=3, completed=3):
        pass
    assert capsys.readouterr().err == "sft 1/100: 1:40:39 left\ntoxicity-a 3/3\n"  # 99 x 61 s = 6039 s


def test_lines_are_printed_as_they_are(capsys):
    """A path in brackets is no markup of rich."""
    progress.console.print("runs/[red]x/samples.jsonl: 12 prompts")
    assert capsys.readouterr().err == "runs/[red]x/samples.jsonl: 12 prompts\n"


def test_a_stopped_display_another_process_and_an_error_print_nothing(clock, capsys):
    with ProgressDisplay("sft", total=2) as display:
        display.stop()
        display.advance(2)
    with ProgressDisplay("sft", total=2, enabled=False) as display:
        display.advance(2)
    with pytest.raises(ZeroDivisionError), ProgressDisplay("sft", total=2, completed=2):
        raise ZeroDivisionError
    assert capsys.readouterr().err == ""


def test_the_log_of_a_ppo_run_has_updates_with_reward_kl_speed_and_remaining_time(tmp_path):
    write_records(tmp_path / "prompts.jsonl", [Prompt.from_row({"prompt": text}) for text in ("Hi", "Who?")])
    words = ["--model", "tiny-gpt2", "--prompts", str(tmp_path / "prompts.jsonl"), "--output_dir", str(tmp_path / "run")]
    words += ["--reward_functions", "align.ppo.toy_rewards:share_of_e", "--total_updates", "3", "--rollout_batch_size", "2"]
    program = [sys.executable, "-m", "align.cli", "ppo", *words, "--max_new_tokens", "4", *TINY]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()  # as a scheduler would store them
    assert "" not in lines, "empty lines"
    updates = [line for line in lines if line.startswith("ppo ")]
    first, last = updates[0], updates[-1]
    numbers = r"reward -?[\d.]+, KL -?[\d.]+, [\d,]+ tokens/s"
    assert re.fullmatch(rf"ppo 1/3: {numbers}, 0:00:\d\d left", first)
    assert re.fullmatch(rf"ppo 3/3: {numbers}", last)


def test_a_training_loss_that_does_not_fall_is_one_line_at_the_end(tmp_path, capsys):
    rows = "".join(f'{{"prompt": "{n}?", "completion": "Yes."}}\n' for n in range(24))
    (tmp_path / "rows.jsonl").write_text(rows)
    words = ["--model", "tiny-gpt2", "--train_data", str(tmp_path / "rows.jsonl"), "--batch_size", "1"]
    words += ["--num_train_epochs", "1"]
    found = {}
    for rate in ("1e-12", "1e-2"):
        cli.main(["sft", *words, "--learning_rate", rate, "--output_dir", str(tmp_path / rate), *TINY])
        found[rate] = capsys.readouterr().err.splitlines()
    learned, flat = found["1e-2"], found["1e-12"]
    assert re.fullmatch(r"sft 24/24: loss [\d.]+, [\d,]+ tokens/s", learned[-3])
    assert learned[-2] == f"model: {tmp_path}/1e-2/model"
    assert learned[-1].startswith(f"next: align chat {tmp_path}/1e-2/model")
    assert flat[-3].startswith("warning: the training loss did not fall: its mean was ")
    assert not [line for line in found["1e-2"] if "did not fall" in line]


def test_the_log_of_evaluations_has_a_line_for_each_task_and_model(tmp_path, capsys):
    words = ["--models", "tiny-gpt2", "tiny-llama", "--output", str(tmp_path), "--limit", "2", "--dtype", "float32"]
    cli.main(["eval", "all", *words, "--toxicity", "", "--table", "false"])
    lines = capsys.readouterr().err.splitlines()
    assert "" not in lines, "empty lines"
    assert lines[0] == "task 1 of 1: truthfulness"
    assert [line.split()[0] for line in lines if line.endswith(" 2/2")] == [
        "truthfulness-choice-tiny-gpt2",
        "truthfulness-choice-tiny-llama",
    ]
