"""examples/trl/ppo.py, a script that was written for TRL, runs on the command line's settings."""

import json
import runpy
from pathlib import Path

import pytest

from tests.launch.launcher import launch

SCRIPT = Path(__file__).parents[2] / "examples" / "trl" / "ppo.py"
FEW = "--dataset_name none --per_device_train_batch_size 4 --total_episodes 8 --response_length 8 --dtype float32"


def run(tmp_path, words):
    return runpy.run_path(str(SCRIPT))["main"]([*FEW.split(), "--output_dir", str(tmp_path / "out"), *words.split()])


def test_the_script_trains_and_saves_a_policy(tmp_path, capsys):
    trainer = run(tmp_path, "--stop_token eos --missing_eos_penalty 1.0 --eval_strategy steps --eval_steps 100")
    assert trainer.state.global_step == 2
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert trainer.stop_token_id == trainer.processing_class.eos_token_id
    shown = capsys.readouterr().err
    assert shown.count("model response") == 3
    assert "What is" in shown


def test_the_page_names_the_only_edit():
    assert "from align.trl import PPOConfig, PPOTrainer\n" in SCRIPT.read_text()
    assert "python examples/trl/ppo.py" in SCRIPT.read_text()
    page = (SCRIPT.parents[2] / "docs" / "migrate-from-trl.md").read_text()
    assert "-from trl.experimental.ppo import PPOConfig, PPOTrainer\n+from align.trl import PPOConfig, PPOTrainer\n" in page


@pytest.mark.slow
def test_the_script_trains_an_adapter(tmp_path):
    run(tmp_path, "--use_peft --lora_r 4 --learning_rate 1e-3")
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_two_processes_reach_the_numbers_of_one(tmp_path):
    """The two processes share a batch of the same size, also under ZeRO-3, for which transformers shards the models."""
    histories, sizes = [], set()
    for settings, processes, rows in (("one-process", 1, 4), ("cpu2", 2, 2), ("zero3", 2, 2)):
        folder = tmp_path / settings
        words = FEW.replace("batch_size 4", f"batch_size {rows}").split()
        words += ["--output_dir", str(folder), "--learning_rate", "1e-4", "--temperature", "1.0"]
        launch([str(SCRIPT), *words], settings, processes)
        histories.append(json.loads((folder / "trainer_state.json").read_text())["log_history"])
        sizes.add((folder / "model.safetensors").stat().st_size)
    names = ["objective/kl", "objective/scores", "loss/value_avg", "val/num_eos_tokens", "lr", "episode"]
    one, *others = ([[row[name] for name in names] for row in rows] for rows in histories)
    assert (len(one), len(sizes)) == (2, 1)
    for two in others:
        assert two == [pytest.approx(row, abs=1e-4) for row in one]
