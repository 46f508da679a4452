import subprocess
import sys
from pathlib import Path

import pytest

from align import cli
from align.core.errors import UserError
from align.ppo import PPOConfig, PPOTrainer
from align.ppo.toy_rewards import share_of_e
from align.sft import SFTConfig, SFTTrainer
from align.training.run_folder import refuse_other_run, release_lock, take_lock
from tests.bad_input.conftest import TINY, snapshot, write_rows
from tests.files import ROOT
from tests.settings import run_settings

HOLD = "import sys, pathlib; from align.training.run_folder import take_lock; take_lock(pathlib.Path(sys.argv[1]))\n"
HOLD += "print('held', flush=True); sys.stdin.read()"


def hold(folder: Path) -> subprocess.Popen:
    """Another process that writes a run to a folder, until it is killed."""
    words = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_folder_that_another_process_holds(tmp_path):
    refuse_other_run(tmp_path)
    assert not list(tmp_path.iterdir()), "looking writes nothing"
    holder = hold(tmp_path)
    for refuse in (refuse_other_run, take_lock):
        with pytest.raises(UserError, match=f"process {holder.pid} on .* is writing a run there"):
            refuse(tmp_path)
    holder.kill()
    holder.communicate()
    for _ in range(2):  # it may take its own folder again
        refuse_other_run(tmp_path)
        take_lock(tmp_path)
    release_lock(tmp_path)
    again = hold(tmp_path)
    again.kill()
    again.communicate()


@pytest.mark.parametrize("validation", [False, True])
def test_the_rollouts_of_a_run_that_is_going_on_are_not_removed(validation, tmp_path):
    folder, prompts = tmp_path / "run", [f"Is {i} odd?" for i in range(4)]
    sizes = {"total_updates": 1, "rollout_batch_size": 4, "max_new_tokens": 4}
    config = PPOConfig(dtype="float32", report_to=["none"], output_dir=str(folder), **sizes)
    second = PPOTrainer("tiny-gpt2", [share_of_e], prompts, config, prompts if validation else "")
    first = hold(folder)
    try:
        rollouts = folder / "rollouts"
        rollouts.mkdir()
        for update in range(1, 4):
            (rollouts / f"update-{update:06d}.parquet").write_bytes(b"the first one's")
        before = snapshot(folder)
        with pytest.raises(UserError, match=f"process {first.pid} on .* is writing a run there"):
            second.train()
        assert snapshot(folder) == before
    finally:
        first.kill()
        first.communicate()


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_finished_meanwhile_is_not_replaced(resume, tmp_path):
    folder, rows = tmp_path / "run", [{"prompt": f"Is {i} odd?", "completion": "Yes."} for i in range(4)]
    settings = run_settings(folder, model="tiny-gpt2")
    second = SFTTrainer("tiny-gpt2", rows, SFTConfig(**settings, resume_from_checkpoint=resume))
    data = write_rows(tmp_path / "demos.jsonl", *rows)
    cli.main(["sft", *TINY, "--train_data", str(data), "--output_dir", str(folder), "--save_steps", "1"])
    before = snapshot(folder)
    with pytest.raises(
        UserError,
        match="another run has written there since this one started; set resume_from_checkpoint auto to continue it",
    ):
        second.train()
    assert snapshot(folder) == before
    third = SFTTrainer("tiny-gpt2", rows, SFTConfig(**settings, resume_from_checkpoint=True))
    third.train()  # the folder is free again
