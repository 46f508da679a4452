"""docs/migrate-from-trl.md names what exists and leaves none of TRL's out; the example runs on its settings."""

import json
import re
import runpy
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import align.ppo.config
from align.trl import PPOConfig, PPOTrainer
from align.trl.arguments import SET_BY_TRAINER, defaults_of
from align.trl.hooks import STEP_METRICS
from tests.launch.launcher import launch
from tests.trl.test_config import OWN
from tests.trl.test_trainer import METRICS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "migrate-from-trl.md").read_text(encoding="utf-8")
VALUE = r"`(\w+)` \(`?(-?[\w.]+)`?\)"


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title):
    """The cells of the rows of a section's table, without the head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_setting_of_trl_is_in_the_table():
    named = {name for row in rows("Settings") for name in re.findall(r"`(\w+)`", row[0])}
    assert OWN.keys() - SET_BY_TRAINER <= named
    assert named - defaults_of(PPOConfig).keys() == {"linear", "None", "True", "False", "k1"}


def test_defaults_in_the_table_are_those_of_the_code():
    for column, settings in ((0, PPOConfig), (1, align.ppo.config.PPOConfig)):
        known = defaults_of(settings)
        found = [pair for row in rows("Settings") for pair in re.findall(VALUE, row[column])]
        assert len(found) > 12
        for name, value in found:
            given = True if (name, column) == ("bf16", 0) else known[name]
            assert value == str(given) or float(value) == given, name


@pytest.mark.parametrize("title", ["From LLaMA-Factory's PPO", "From TRL 0.4 to 0.11"])
def test_settings_in_the_other_tables_exist(title):
    known = defaults_of(align.ppo.config.PPOConfig)
    theirs = {"batch_size", "mini_batch_size", "steps"}
    named = {name for row in rows(title) for name in re.findall(r"`(\w+)`", row[1])}
    assert len(named) > 5
    assert named - theirs - known.keys() == set()


def test_every_metric_of_trl_is_in_the_table():
    named = {name for row in rows("Metrics") for name in re.findall(r"`([\w/]+)`", row[0])}
    assert METRICS - {"step", "epoch"} <= named
    ours = {name for row in rows("Metrics") for name in re.findall(r"`(\w+/\w+)`", row[1])}
    assert [
        name for name in sorted(ours | set(STEP_METRICS.values())) if name not in (DOCS / "metrics.md").read_text()
    ] == []


def test_members_of_the_trainer_exist(make_trainer):
    text = section("Arguments of the trainer")
    listed = re.findall(r"`([\w.]+)`", text[text.index("Attributes:") :])
    trainer = make_trainer()
    for name in listed:
        owner = trainer
        for part in name.split("."):
            assert hasattr(owner, part), name
            owner = getattr(owner, part)
    assert {name for name in vars(PPOTrainer) if not name.startswith("_")} <= {*listed, *dir(object)} | {
        "is_world_process_zero",
        "is_local_process_zero",
    }


# examples/trl/ppo.py, a script that was written for TRL

SCRIPT = DOCS.parent / "examples" / "trl" / "ppo.py"
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
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token_id < saved.get_input_embeddings().num_embeddings


def test_the_page_names_the_only_edit():
    assert "from align.trl import PPOConfig, PPOTrainer\n" in SCRIPT.read_text()
    assert "python examples/trl/ppo.py" in SCRIPT.read_text()
    assert "-from trl.experimental.ppo import PPOConfig, PPOTrainer\n+from align.trl import PPOConfig, PPOTrainer\n" in PAGE


@pytest.mark.slow
def test_the_script_trains_an_adapter(tmp_path):
    run(tmp_path, "--use_peft --lora_r 4 --learning_rate 1e-3")
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_two_processes_reach_the_numbers_of_one(tmp_path, monkeypatch):
    """The two processes share a batch of the same size, also under ZeRO-3, for which transformers shards the models.

    DeepSpeed compiles an operator first, where a killed process left torch's lock.
    """
    (killed := tmp_path / "operators" / "deepspeed_shm_comm").mkdir(parents=True)
    (killed / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(killed.parent))
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
