"""`make soak` still runs: its variants' settings are ones that stages have, and runs are killed and resumed."""

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest

from align.cli import stage_configs
from align.core.settings_parser import parse
from benchmarks import forked_runs
from benchmarks.forked_runs import Killed
from benchmarks.kill_resume import COMMON, LAUNCHED, PREPARED, VARIANTS

ROOT = Path(__file__).parents[2]
NAMED = dict.fromkeys(PREPARED, "model")


@pytest.mark.parametrize("name", VARIANTS)
def test_settings_are_those_of_a_stage(name):
    stage, options = VARIANTS[name]
    config = parse(stage_configs()[stage], [*COMMON.split(), *options.format_map(NAMED).split(), "--output_dir", "run"])
    assert config.save_every == 2


def test_a_launched_variant_is_one_of_the_others():
    assert {settled for settled, _ in LAUNCHED.values()} <= set(VARIANTS)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("variant", ["ppo-rules", "sft-two"])
def test_runs_are_killed_and_end_alike(variant, tmp_path):
    """The one needs a model that is trained before, the other a launcher. What forks has to be a program of its own."""
    words = ["--kills", "2", "--count", "0", "--only", variant, "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "benchmarks.soak", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"| `{variant}` | 2 |" in (tmp_path / "tallies.md").read_text()
    (tally,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert (tally["variant"], tally["kills"], tally["different"]) == (variant, 2, [])
    assert tally["same"] == tally["runs"] >= 2


def forked(*lives):
    """Processes that wait so many seconds and exit with a code."""

    def live(seconds, code):
        time.sleep(seconds)
        sys.exit(code)

    processes = [multiprocessing.get_context("fork").Process(target=live, args=life) for life in lives]
    for process in processes:
        process.start()
    return processes


@pytest.mark.parametrize(
    ("lives", "killed", "code"),
    [
        ([(0, 0), (0.2, 0)], Killed(), 0),
        ([(60, 0), (60, 0)], Killed(seconds=0.1, alone=False), -9),
        ([(0.3, 1), (60, 0)], Killed(1, seconds=0.1), -9),  # the other one notices, and ends by itself
        ([(0, 0)], Killed(seconds=30), 0),  # it ended sooner
        ([(0.1, 1), (0.2, 0)], Killed(), 1),  # a failure that nobody asked for
    ],
)
def test_the_code_of_all_is_that_of_a_kill_or_of_a_failure(lives, killed, code):
    assert forked_runs._end(forked(*lives), killed) == code


def test_a_process_that_waits_for_a_killed_one_for_ever_is_ended_and_told(monkeypatch):
    monkeypatch.setattr(forked_runs, "LOST_SECONDS", 0.2)
    processes = forked((60, 0), (60, 0))
    with pytest.raises(SystemExit, match=r"1 processes did not end in 0 s after another one: \[-9, -9\]"):
        forked_runs._end(processes, Killed(1, seconds=0.1))
    assert not any(process.is_alive() for process in processes)
