"""Every stage on a quantized base, with lean optimizers: trained, resumed to the bit, used and evaluated."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from align import cli
from align.core.errors import UserError
from align.core.settings import OptimizationConfig
from align.models.folders import load_weights
from align.training.optimizer import build_optimizer, complete_groups
from tests.files import ROOT, metrics_of, read_rows, write_rows

SMALL = [
    *("--report_to", "none", "--overlong", "truncate", "--max_prompt_tokens", "48", "--learning_rate", "1e-3"),
    *("--dtype", "float32", "--lora_r", "2", "--save_total_limit", "0", "--save_steps", "1"),
]
STAGES = {
    "sft": "--train_data demonstrations.jsonl --batch_size 4 --max_response_tokens 24",
    "reward": "--train_data rankings.jsonl --batch_size 4 --demonstrations demonstrations.jsonl --max_response_tokens 24",
    "dpo": "--train_data rankings.jsonl --batch_size 4 --max_response_tokens 24",
    "ppo": "--prompts prompts.jsonl --total_updates 3 --rollout_batch_size 4 --num_ppo_epochs 2 --max_new_tokens 6 "
    "--missing_eos_score none",
}
QUANTIZED = {"4": ["--load_in_4bit", "true"], "8": ["--load_in_8bit", "true"]}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Some rows of the project's data in the working directory."""
    for name, count in (("demonstrations", 12), ("rankings", 12), ("prompts", 12)):
        write_rows(tmp_path / f"{name}.jsonl", read_rows(ROOT / "data" / f"{name}.jsonl")[:count])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(stage, model, folder, *more):
    cli.main([stage, "--model", str(model), "--output_dir", str(folder), *SMALL, *STAGES[stage].split(), *more])
    return folder / "model"


def require_resumed(stage, model, whole, *more):
    """A run that goes on from the first checkpoint of another one ends at the same bits."""
    resumed = whole.with_name(whole.name + "-resumed")
    first = sorted((whole / "checkpoints").iterdir())[0]
    shutil.copytree(whole, resumed)
    for later in sorted((resumed / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later)
    shutil.rmtree(resumed / "model")
    run(stage, model, resumed, *more, "--resume_from_checkpoint", str(resumed / "checkpoints" / first.name))
    states = [load_file(folder / "model" / "adapter_model.safetensors") for folder in (whole, resumed)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("model", "bits"),
    [("tiny-llama", "4"), pytest.param("tiny-t5", "8"), pytest.param("tiny-gpt2", "4", marks=pytest.mark.slow)],
)
def test_every_stage_trains_resumes_and_answers_on_a_quantized_base(model, bits, data, capsys):
    how = QUANTIZED[bits]
    policy = run("sft", model, data / "sft", *how)
    require_resumed("sft", model, data / "sft", *how)
    reward = run("reward", model, data / "reward", *how)
    dpo = run("dpo", policy, data / "dpo", *how)
    more = [*how, "--reward_model", str(reward), "--critic", "separate"]
    capsys.readouterr()
    ppo = run("ppo", policy, data / "ppo", *more)
    printed = capsys.readouterr().err
    assert "warning: adapter" not in printed, "policy, reward model and base are in the format of their training"
    assert "NaN" not in printed
    require_resumed("ppo", policy, data / "ppo", *more)
    rows = metrics_of(data / "ppo")
    assert rows[0]["kl/k1"] == pytest.approx(0, abs=1e-5), "the reference is the initial policy, on the same base"
    for folder in (policy, dpo, ppo):
        output = data / f"{folder.parent.name}.jsonl"
        words = ["--prompts", "prompts.jsonl", "--output", str(output), "--max_new_tokens", "4", "--dtype", "float32"]
        words += ["--reward_model", str(reward), "--overlong", "truncate", "--max_prompt_tokens", "48", "--temperature", "0"]
        cli.main(["sample", str(folder), *words, *how])
        other = data / f"merged-{output.name}"
        cli.main(["sample", str(folder), *[str(other) if word == str(output) else word for word in words]])
        quantized, merged = read_rows(output), read_rows(other)
        assert [row["responses"] for row in quantized] == [row["responses"] for row in merged]
        for first, second in zip(quantized, merged, strict=True):
            assert first["rewards"] == pytest.approx(second["rewards"], abs=1e-3)


def test_a_separate_reward_model_is_quantized_like_the_policy(data, monkeypatch):
    reward = run("reward", "tiny-gpt2", data / "reward")
    formats = []

    def recorded(source, dtype, quantization=""):
        formats.append(quantization)
        return load_weights(source, dtype, quantization)

    monkeypatch.setattr("align.models.loading.load_weights", recorded)
    run("ppo", "tiny-llama", data / "ppo", "--load_in_4bit", "true", "--reward_model", str(reward))
    assert formats == ["nf4-double"] * 2, "the policy, and the reward model of another architecture"
    adapter = data / "ppo" / "model" / "adapter_config.json"
    assert json.loads(adapter.read_text())["r"] == 2


def test_an_evaluation_takes_a_quantized_model(data):
    reward = run("reward", "tiny-llama", data / "reward", "--load_in_8bit", "true")
    words = ["--models", "tiny-llama", "--output", str(data / "eval"), "--dtype", "float32", "--prompts", "prompts.jsonl"]
    words += ["--samples", "2", "--max_new_tokens", "4", "--overlong", "truncate", "--max_prompt_tokens", "48"]
    words += ["--preferences", "rankings.jsonl", "--reward_model", str(reward), "--load_in_8bit", "true"]
    cli.main(["eval", "reward", *words])
    assert list((data / "eval").rglob("*.json*"))


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit"])
def test_a_run_with_a_lean_optimizer_resumes_to_the_same_bits(optimizer, data):
    more = ["--optimizer", optimizer, "--lora_r", "64"]  # matrices of 4,096 numbers have moments in 8 bits
    run("sft", "tiny-llama", data / "sft", *more)
    require_resumed("sft", "tiny-llama", data / "sft", *more)
    losses = [row["loss"] for row in metrics_of(data / "sft") if "loss" in row]
    assert losses[-1] < losses[0]


def test_lean_optimizers_step_by_hand():
    """The first step of Adam moves each number by the rate; so does each step of Lion, by the sign of its gradient."""
    for optimizer in ("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit"):
        weight = torch.nn.Parameter(torch.zeros(64, 64))
        config = OptimizationConfig(optimizer=optimizer, learning_rate=0.01)
        made = build_optimizer(config, {"weight": weight}, complete_groups(0.01, ["weight"], []))
        weight.grad = torch.linspace(-1, 1, 4096).view(64, 64) + 0.0001
        made.step()
        torch.testing.assert_close(weight.detach(), -0.01 * weight.grad.sign(), atol=2e-4, rtol=0)
        state = made.state[weight]["state1"]
        assert state.dtype == (torch.float32 if optimizer.endswith("32bit") else torch.uint8)


def test_a_full_run_on_a_quantized_model_is_refused_in_one_line(data, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("sft", "tiny-llama", data / "sft", "--load_in_4bit", "true", "--lora_r", "0")
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in lines if "lora_r" in line]) == 1
    assert not any("Traceback" in line for line in lines)
    assert not (data / "sft").exists()


def test_a_lean_optimizer_without_bitsandbytes_is_refused(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(UserError, match="bitsandbytes is not installed"):
        build_optimizer(OptimizationConfig(optimizer="adamw_8bit"), {"w": weight}, complete_groups(1.0, ["w"], []))
