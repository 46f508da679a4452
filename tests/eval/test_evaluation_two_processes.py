"""An evaluation under `accelerate launch` with two processes: the numbers of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from align.eval.results import read
from align.eval.reward import RewardEvalConfig, run_reward_eval

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(sharp_folders, reward_folders, tmp_path):
    rows = [{"prompt": word, "responses": ["a b", "c"], "ranks": [1, 2]} for word in ("Hi", "Count to three.", "Who?")]
    for name in ("rankings", "prompts"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"reward_model": reward_folders["tiny-llama"], "models": sharp_folders["tiny-gpt2"], "samples": 3}
    given |= {"preferences": str(tmp_path / "rankings.jsonl"), "prompts": str(tmp_path / "prompts.jsonl")}
    given |= {"dtype": "float32", "max_new_tokens": 6, "resamples": 100}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu2.yaml"]
    script = ["--main_process_port", "0", "align/eval/reward.py", *words, "--output", str(tmp_path / "two")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launcher, *script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    alone = run_reward_eval(RewardEvalConfig(**given | {"models": [given["models"]], "output": str(tmp_path / "one")}))
    found = [each for task in ("reward", "best-of-n") for each in read(tmp_path / "two" / f"{task}.json")]
    assert [each.model for each in found] == [each.model for each in alone]
    for ours, theirs in zip(alone, found, strict=True):
        for one, two in zip(ours.figures, theirs.figures, strict=True):
            assert (one.name, one.n, one.scorer) == (two.name, two.n, two.scorer)
            for number, twin in ((one.value, two.value), (one.low, two.low), (one.high, two.high)):
                assert number == (None if twin is None else pytest.approx(twin, rel=1e-5))
    assert done.stdout.count("best-of-n: reward, best of 1") == 1  # one process prints
