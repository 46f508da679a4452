from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from align import cli
from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.extras.plan import (
    DEVICES,
    USABLE,
    Device,
    PlanConfig,
    StageWork,
    allocate,
    device_name,
    layouts,
    memory_table,
    placements,
    plan_stages,
)
from align.model_registry.registry import resolve_model
from align.models.loading import load, load_on_meta
from align.sft import SFTConfig
from align.training.run_folder import read_metrics
from tests.files import ROOT, write_rows
from tests.models.encoders import write_encoder
from tests.settings import run_settings


@pytest.mark.parametrize(
    ("flops", "parameters", "tokens"),
    [
        (1.92e19, 400e6, 8.0e9),
        (1.21e20, 1e9, 20.2e9),
        (1.23e22, 10e9, 205.1e9),
        (5.76e23, 67e9, 1.5e12),
        (3.85e24, 175e9, 3.7e12),
        (9.90e24, 280e9, 5.9e12),
        (1.27e26, 1e12, 21.2e12),
    ],
)
def test_the_table_of_chinchilla(flops, parameters, tokens):
    found = allocate(flops)
    assert found[0] == pytest.approx(parameters, rel=0.015)
    assert found[1] == pytest.approx(tokens, rel=0.06)  # the table has two digits
    assert 6 * found[0] * found[1] == pytest.approx(flops)


def test_memory_by_hand_for_each_way():
    trained = [torch.empty(1000, 300, dtype=torch.bfloat16, device="meta")]
    work = StageWork("sft", SFTConfig(), {}, 1_200_000, trained)  # a policy and its reference
    # 300,000 weights: 2 bytes each, and 4 for the master, 8 for Adam, 4 for the gradient.
    assert {way.name: way.needed for way in layouts(work, "A100-80", 4)} == {
        "whole": 18 * 300_000 + 600_000,
        "ZeRO-1": (2 + 12 / 4 + 4) * 300_000 + 600_000,
        "ZeRO-2": (2 + 12 / 4 + 4 / 4) * 300_000 + 600_000,
        "ZeRO-3": 18 / 4 * 300_000 + 150_000,
        "ZeRO-3 offload": (2 + 4) / 4 * 300_000 + 150_000,
    }


def test_the_launchers_of_the_ways_are_files():
    files = {path.name for path in (ROOT / "configs" / "accelerate").iterdir()}
    for gpu, devices in (("H100", 1), ("H100", 8), ("H100", 16), ("cpu", 1), ("cpu", 2)):
        assert {launcher for _, launcher, _ in placements(gpu, devices)} <= files


def test_the_simplest_way_that_fits_is_taken(monkeypatch):
    trained = [torch.empty(1000, dtype=torch.bfloat16, device="meta")]
    stage = StageWork("sft", SFTConfig(), {}, 2000, trained)

    def advice(bytes_per_weight):
        monkeypatch.setitem(DEVICES, "H100", Device(1.0, bytes_per_weight * 1000 / USABLE, 1.0))
        return memory_table([stage], "H100", 8).splitlines()[-1]

    found = [advice(size) for size in (20, 10, 6, 2.5, 1)]
    names = ["ddp", "zero1", "zero2", "zero3", "zero3-offload"]
    assert found == [f"sft: use configs/accelerate/{name}.yaml with num_processes 8" for name in names]
    assert advice(0.1) == "sft: no configuration fits; use more devices, LoRA or a smaller model"


def test_shapes_and_shared_prompts_are_those_of_the_loaded_model(sharpen, tmp_path):
    encoder = write_encoder("bert", tmp_path, sharpen)
    for name, rank, shares in (("tiny-llama", 4, True), ("tiny-gpt2", 0, True), ("tiny-t5", 0, True), (encoder, 0, False)):
        config = ModelConfig(model=name, lora_r=rank, dtype="float32")
        shapes, real = (make(config, torch.float32, allow_reward_model=True) for make in (load_on_meta, load))
        assert shapes.backbone.device.type == "meta"
        for some, other in zip(shapes.backbone.parameters(), real.backbone.parameters(), strict=True):
            assert (some.shape, some.dtype, some.requires_grad) == (other.shape, other.dtype, other.requires_grad)
        assert shapes.backbone.shares_prompts is real.backbone.shares_prompts is shares


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of fine-tuning and one of PPO on tiny-llama."""
    from align.ppo import PPOConfig, run_ppo
    from align.sft import run_sft

    root = tmp_path_factory.mktemp("plan")
    rows = [{"prompt": "Count" + "." * n, "completion": "one " * (1 + n)} for n in range(6)]
    data = write_rows(root / "demonstrations.jsonl", rows)
    shared = run_settings(model="tiny-llama")
    run_sft(SFTConfig(**shared, train_data=str(data), batch_size=2, num_train_epochs=2, output_dir=str(root / "sft")))
    ppo = {"total_updates": 3, "rollout_batch_size": 6, "samples_per_prompt": 2, "num_ppo_epochs": 2, "max_new_tokens": 8}
    ppo |= {"reward_functions": ["align.ppo.toy_rewards:share_of_e"], "missing_eos_score": None, "prompts": str(data)}
    run_ppo(PPOConfig(**shared, **ppo, output_dir=str(root / "ppo")))
    return root


def counted(folder):
    return sum(line.get("flops", 0) for line in read_metrics(folder))


def planned(runs, stage, **changes):
    """The work of a run with some other settings, written into a file of its own."""
    settings = yaml.safe_load((runs / stage / "config.yaml").read_text(encoding="utf-8")) | changes
    path = runs / f"{stage}.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return plan_stages(PlanConfig(**{stage: str(path)}, gpu="cpu"))[0]


def test_a_plan_of_fine_tuning_has_the_flops_that_the_run_counted(runs):
    found = planned(runs, "sft")
    assert found.flops["learning"] == pytest.approx(counted(runs / "sft"))
    # Hours are FLOPs at a share of the peak, and more of the same takes longer in proportion.
    more, devices = planned(runs, "sft", num_train_epochs=6), ("A100-80", 1, 0.4)
    assert more.hours(*devices)["learning"] == pytest.approx(3 * found.hours(*devices)["learning"])


def test_a_plan_of_another_ppo_run_is_within_a_quarter_of_what_it_counts(runs):
    from align.ppo import PPOConfig, run_ppo

    changes = {"total_updates": 4, "rollout_batch_size": 4, "samples_per_prompt": 1, "num_ppo_epochs": 3}
    changes["output_dir"] = str(runs / "other")
    found = planned(runs, "ppo", **changes)
    settings = yaml.safe_load((runs / "ppo.yaml").read_text(encoding="utf-8"))
    run_ppo(PPOConfig(**settings))
    assert sum(found.flops.values()) == pytest.approx(counted(runs / "other"), rel=0.25)
    assert set(found.flops) == {"sampling", "scoring", "learning"}
    # Three epochs of a forward and a backward pass cost more than two forward passes, those more than sampling.
    assert found.flops["learning"] > found.flops["scoring"] > found.flops["sampling"]


def test_the_weights_of_all_roles_are_counted(runs, capsys):
    found = planned(runs, "ppo", reward_model="runs/not/yet")
    assert found.weights == 3 * 431_360  # policy, reference and reward model
    critic = planned(runs, "ppo", reward_model="runs/not/yet", critic="separate", vf_coef=0.1)
    assert critic.weights == 4 * 431_360
    assert sum(weight.numel() for weight in critic.trained) == 2 * 431_360 / 4
    assert 0 < critic.flops["learning"] - found.flops["learning"] < found.flops["learning"]
    cli.main(["plan", "--ppo", str(runs / "ppo.yaml"), "--gpus", "2", "--gpu", "A100-80"])
    said = capsys.readouterr().out
    assert "ppo: use configs/accelerate/ddp.yaml with num_processes 2" in said
    assert "ppo    sampling" in said


def test_a_reward_model_that_exists_has_its_own_shape(runs, tmp_path):
    source = resolve_model("tiny-llama")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "ignore_mismatched_sizes": True}
    reward = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32, **sizes)
    reward.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path)
    found, same_size = (planned(runs, "ppo", reward_model=name) for name in (str(tmp_path), "runs/not/yet"))
    assert found.weights == 2 * 431_360 + 4 * reward.num_parameters()  # policy, reference and reward model
    assert sum(weight.numel() for weight in found.trained) == 431_360 / 4
    assert found.flops["scoring"] < same_size.flops["scoring"]
    assert found.flops["learning"] == same_size.flops["learning"]


def test_a_split_takes_prompts_from_learning(runs):
    whole, split = planned(runs, "sft"), planned(runs, "sft", validation_split=0.5)
    assert split.flops["learning"] < whole.flops["learning"]


def test_sampling_is_as_slow_as_memory(runs):
    (work,) = plan_stages(PlanConfig(ppo=str(runs / "ppo" / "config.yaml")))
    # tiny-llama in float32: 431,360 bytes for each of 8 tokens of 3 rollouts, which arithmetic would do sooner.
    floor = 3 * 8 * 431_360 / DEVICES["A100-80"].bandwidth
    assert work.hours("A100-80", 1, 0.4)["sampling"] * 3600 == pytest.approx(floor)


def test_mistakes_are_one_line(command_error):
    for words, said in (
        ([], "nothing to plan"),
        (["--flops", "1e20", "--gpu", "B9"], "gpu is 'B9'"),
    ):
        assert said in command_error(cli.main, ["plan", *words])


@pytest.mark.parametrize(
    ("name", "gigabytes", "device"),
    [
        ("NVIDIA A100-SXM4-40GB", 40, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 80, "A100-80"),
        ("NVIDIA H100 80GB HBM3", 80, "H100"),
    ],
)
def test_the_default_device_is_that_of_this_machine(name, gigabytes, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_name(PlanConfig().gpu) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    found = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert device_name(PlanConfig().gpu) == device
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 9090")
    with pytest.raises(UserError, match=r"unknown device .*RTX 9090; use one of A100-40"):
        device_name("auto")
