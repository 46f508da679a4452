"""Kill a run anywhere, start it again: metrics and model are those of a run that nobody killed, to the bit.

The run that is killed is a process that is forked from this one. The one that nobody killed runs here, and so do the
resumed ones; that of PPO, which has the most state, in an interpreter of its own too.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from align import cli
from tests.files import ROOT, read_rows, write_rows
from tests.forked import forked
from tests.launch.compared import compare

SMALL = [
    *("--report_to", "none", "--overlong", "truncate", "--max_prompt_tokens", "64", "--learning_rate", "1e-3"),
    *("--save_steps", "2"),
]
STAGES = {
    "sft": "--train_data data/demonstrations.jsonl --validation_data data/demonstrations_heldout.jsonl --batch_size 40 "
    "--max_response_tokens 32 --eval_steps 5 --layer_lr_decay 0.5 --unfreeze_steps 2",
    "reward": "--train_data data/rankings_heldout.jsonl --validation_data data/rankings_heldout.jsonl --batch_size 4 "
    "--demonstrations data/demonstrations_heldout.jsonl --max_response_tokens 32 --eval_steps 5",
    "rules": "--train_data data/rule_judgments.jsonl --validation_split 0.8 --batch_size 8 --max_response_tokens 32 "
    "--eval_steps 5 --held_out_rules no-opinions-or-feelings --rules forms/rules/plain-style.yaml "
    "forms/rules/sparrow-dialogue.yaml",
    "attributes": "--train_data data/attributes_heldout.jsonl --rankings data/rankings_heldout.jsonl --mixing_cap 40 "
    "--validation_split 0.2 --batch_size 8 --max_response_tokens 32 --eval_steps 5 --heads rating hallucination",
    "attributes generative": "--form generative --train_data data/attributes_heldout.jsonl --generator_filter rating>=3 "
    "--validation_split 0.2 --batch_size 6 --max_response_tokens 32 --eval_steps 5 --heads rating hallucination",
    "dpo": "--train_data data/rankings_heldout.jsonl --validation_data data/rankings_heldout.jsonl --batch_size 4 "
    "--max_response_tokens 32 --eval_steps 5",
    "distill": "--train_data data/demonstrations.jsonl --validation_data data/demonstrations_heldout.jsonl --batch_size 6 "
    "--max_response_tokens 24 --eval_steps 5",
    "ppo": "--validation_prompts data/prompts_validation.jsonl --reward_functions align.ppo.toy_rewards:share_of_e "
    "--total_updates 9 --rollout_batch_size 8 --num_mini_batches 2 --num_ppo_epochs 2 --max_new_tokens 8 "
    "--missing_eos_score none "
    "--kl_target 1 --eval_steps 5 --critic_warmup 1 --value_learning_rate 2e-3 "
    "--ema_decay 0.9 "
    "--samples_per_prompt 2 --length_adjustment 0.5 "
    "--ent_coef 0.01 --kl_in loss --kl_estimator k3 --ptx.data data/demonstrations.jsonl "
    "--ptx.coef 0.1",
}

DOUBLED = ("dpo", "rules", "attributes", "distill", "attributes generative")
"""Their checkpoints hold nothing that those of other stages do not."""


def options(stage: str, folder: Path, *more: str) -> list[str]:
    return ["--model", "tiny-llama", "--output_dir", str(folder), *SMALL, *STAGES[stage].split(), *more]


CASES = [pytest.param(name, False, marks=[pytest.mark.slow] * (name in DOUBLED), id=name) for name in STAGES]
CASES.append(pytest.param("ppo", True, marks=pytest.mark.slow, id="ppo afresh"))


@pytest.mark.parametrize(("stage", "afresh"), CASES)
def test_a_killed_run_goes_on_to_the_same_bits(
    stage: str, afresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    monkeypatch.chdir(ROOT)
    more: list[str] = []
    if stage == "ppo":  # with rules, whose statistics are in the checkpoint, and a judge, whose scores are
        for name, stage_of in (("rules", "rules"), ("judge", "reward")):  # from a few rows, untrained as they are
            words = options(stage_of, tmp_path / name, "--num_train_epochs", "1")
            source = words[words.index("--train_data") + 1]
            few = write_rows(tmp_path / f"{name}.jsonl", read_rows(Path(source))[:24])
            cli.main([stage_of, *[few if word == source else word for word in words]])
        more = ["--rules.model", str(tmp_path / "rules" / "model")]
        more += ["--selection.reward_model", str(tmp_path / "judge" / "model")]
    process = forked(cli.main, [stage.split()[0], *options(stage, killed, *more)])
    deadline = time.monotonic() + 120
    while not any(killed.glob("checkpoints/update-*/trainer.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()  # wherever it is now: in an update, in an evaluation, or while it writes
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the run ended before it could be killed: give it more updates"
    resumed = options(stage, killed, *more, "--resume_from_checkpoint", "true")
    if afresh:
        done = subprocess.run(
            [sys.executable, "align/ppo/train.py", *resumed], stderr=subprocess.PIPE, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "resumed from" in done.stderr
    else:
        cli.main([stage.split()[0], *resumed])
        assert "resumed from" in capsys.readouterr().err
    cli.main([stage.split()[0], *options(stage, whole, *more)])

    assert compare(killed, whole).largest == 0
    last = [sorted(folder.glob("checkpoints/update-*"))[-1] for folder in (killed, whole)]
    assert last[0].name == last[1].name
    states = [load_file(folder / "state.safetensors") for folder in last]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert {path.name for path in killed.rglob(".*")} == {".lock"}, "what the kill left half written is gone"
    if stage == "ppo":
        assert (killed / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
        rollouts = [{path.name: path.read_bytes() for path in (folder / "rollouts").iterdir()} for folder in (killed, whole)]
        assert rollouts[0] == rollouts[1]
        assert len(rollouts[1]) == 9
