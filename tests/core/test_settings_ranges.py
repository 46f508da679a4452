"""Settings: the range of every number, a dump that reads back to the same, a help text for every field."""

import math
from dataclasses import asdict, fields

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.errors import UserError
from align.core.settings import dump
from align.core.settings_parser import parse
from align.dpo.train import DPOConfig
from align.ppo import run_ppo
from align.ppo.config import PPOConfig
from align.reward.config import RewardConfig
from align.sft.train import SFTConfig

QUICK = settings(deadline=None, max_examples=40)
STAGES = [SFTConfig, RewardConfig, PPOConfig, DPOConfig]


def make(stage, **values):
    """A config with what its stage cannot do without."""
    needed = {"reward_functions": ["a:f"]} if stage is PPOConfig else {}
    return stage(**(needed | values))


def refused(call, *parts):
    """The call ends in one line with all `parts` in it."""
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


# ---------------------------------------------------------------------------------------------------- ranges

ALL = [
    ("learning_rate", [0, -1e-5, math.nan], [1e-9]),
    ("warmup", [-0.1, 1.0, math.nan], [0.0, 0.99]),
    *((name, [-0.1, 1.0], [0.0, 0.95]) for name in ("adam_beta1", "adam_beta2")),
    ("micro_batch_tokens", [0, -1], [1]),
    ("save_every", [-1], [0]),
    ("max_grad_norm", [-0.1], [0.0]),
    ("weight_decay", [-0.1], [0.0]),
    ("log_to", [["tensorbord"], ["wandb", "x"]], [["none"], ["wandb", "trackio"]]),
]
RANGES = {
    SFTConfig: [
        *((name, [0, -1], [1]) for name in ("epochs", "batch_size", "max_prompt_tokens", "max_response_tokens")),
        ("prompt_loss_weight", [-0.1], [0.0, 0.5]),
        ("evaluate_every", [-1], [0]),
    ],
    RewardConfig: [
        *((name, [0, -1], [1]) for name in ("epochs", "batch_size", "max_prompt_tokens", "max_response_tokens")),
        *((name, [-0.01], [0.0]) for name in ("centering_weight", "lm_loss_weight")),
        ("tie_probability", [0.0, 1.0], [0.01]),
        ("evaluate_every", [-1], [0]),
    ],
    DPOConfig: [
        *((name, [0, -1], [1]) for name in ("epochs", "batch_size", "max_prompt_tokens", "max_response_tokens")),
        ("beta", [0.0, -0.1, math.nan], [0.01]),
        ("label_smoothing", [-0.1, 0.5], [0.0, 0.49]),
        ("evaluate_every", [-1], [0]),
    ],
    PPOConfig: [
        *((name, [0, -1], [1]) for name in ("updates", "epochs", "minibatches", "max_new_tokens", "max_prompt_tokens")),
        ("rollout_size", [0, -64], [1]),
        ("temperature", [0.0, -1.0], [0.7]),
        ("kl_horizon", [0], [1]),
        ("max_kl", [0.0], [0.1]),
        ("evaluate_every", [0], [1]),
        *((name, [-0.1, math.nan], [0.0]) for name in ("kl_beta", "kl_target", "clip", "value_clip", "value_weight")),
        ("ptx_weight", [-1.0], [0.0]),
        *((name, [-0.1, 1.1], [0.0, 1.0]) for name in ("gamma", "lam")),
        ("length_adjustment", [-0.1, 1.1], [0.0]),
        ("samples_per_prompt", [0, 3, 128], [1, 4, 64]),
        ("minibatches", [65], [64]),
        ("value_learning_rate", [-1e-6], [0.0]),
        *((name, [-1], [0, 2]) for name in ("score_clip", "reference_refresh")),
        *((name, [-0.1], [0.0, 0.3]) for name in ("uncertainty_weight", "clip_high", "entropy_weight")),
        ("ema_decay", [-0.1, 1.0], [0.0, 0.992]),
        ("critic_warmup", [-1, 100], [0, 99]),
    ],
}
CASES = [(stage, *case) for stage in STAGES for case in ALL + RANGES[stage]]


@pytest.mark.parametrize(("stage", "name", "bad", "good"), CASES, ids=lambda part: getattr(part, "__name__", str(part)))
def test_ranges(stage, name, bad, good):
    for value in bad:
        refused(lambda value=value: make(stage, **{name: value}), f"{name} is {value!r}, but must be")
    for value in good:
        assert getattr(make(stage, **{name: value}), name) == value


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"advantages": "rloo"}, ["samples_per_prompt is 1", "2 or more for advantages rloo"]),
        ({"length_adjustment": 0.5}, ["samples_per_prompt is 1", "2 or more for length_adjustment"]),
        ({"advantages": "grpo", "samples_per_prompt": 4, "critic": "separate"}, ["critic is 'separate'", "has no critic"]),
        ({"advantages": "reinforce++", "critic_warmup": 2}, ["critic_warmup is 2", "has no critic"]),
        *(
            (
                {"whiten_rewards": True, "advantages": name, "samples_per_prompt": 4},
                ["whiten_rewards is True", f"advantages {name}"],
            )
            for name in ("rloo", "grpo", "reinforce++")
        ),
        ({"reward_model": "a", "reward_models": ["b", "c"]}, ["reward_models is ['b', 'c']", "empty, because"]),
    ],
)
def test_settings_that_exclude_each_other(values, parts):
    refused(lambda: make(PPOConfig, **values), *parts)


def test_ipo_has_no_smoothing():
    refused(lambda: make(DPOConfig, loss="ipo", label_smoothing=0.1), "label_smoothing is 0.1", "0 for ipo")


def test_ppo_needs_a_reward(tmp_path):
    with pytest.raises(UserError, match=r"PPO needs a reward: set reward_model, reward_functions, .*or several of them"):
        run_ppo(PPOConfig(output_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("stage", "name", "value"),
    [
        (SFTConfig, "lora_rank", -1),
        (SFTConfig, "lora_alpha", math.nan),
        (SFTConfig, "adam_epsilon", -1.0),
        (SFTConfig, "learning_rate", math.inf),
        (PPOConfig, "missing_eos_score", math.nan),
    ],
)
def test_values_that_cannot_be_meant(stage, name, value):
    refused(lambda: make(stage, **{name: value}), name)


# ---------------------------------------------------------------------------------------------------- dump, help


@pytest.mark.parametrize("stage", STAGES)
def test_dump_reads_back(stage, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(dump(make(stage)))
    again = parse(stage, ["--config", str(path)])
    assert asdict(again) == asdict(make(stage))
    assert set(yaml.safe_load(path.read_text())) == {item.name for item in fields(stage)}


def test_dump_of_a_run_with_a_reward_model_alone_reads_back(tmp_path):
    path = tmp_path / "a.yaml"
    config = PPOConfig(reward_model="runs/rm")
    path.write_text(dump(config))
    assert asdict(parse(PPOConfig, ["--config", str(path)])) == asdict(config)


WORDS = st.text(st.characters(exclude_categories=["C"]), max_size=20).filter(lambda text: not text.startswith("-"))


@QUICK
@given(
    model=WORDS,
    output_dir=WORDS,
    seed=st.integers(0, 2**32 - 1),
    learning_rate=st.floats(1e-300, 1e300),
    warmup=st.floats(0, 1, exclude_max=True),
    resume=st.booleans(),
    schedule=st.sampled_from(["cosine", "linear", "inverse_sqrt", "constant"]),
    log_to=st.lists(st.sampled_from(["tensorboard", "wandb", "trackio", "none"]), min_size=1, max_size=3),
)
def test_dump_round_trip_of_any_values(tmp_path_factory, **values):
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    config = SFTConfig(**values)
    path.write_text(dump(config), encoding="utf-8")
    assert asdict(parse(SFTConfig, ["--config", str(path)])) == asdict(config)


@pytest.mark.parametrize("stage", STAGES)
def test_help_explains_every_field_with_its_default(stage, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(stage, ["--help"], program="align")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for item in fields(stage):
        assert f"--{item.name}" in shown
        text = " ".join(item.metadata["help"].replace("%%", "%").split())
        plain = shown.replace(" ", "").replace("-", "")  # lines may be broken at a hyphen
        assert text.replace(" ", "").replace("-", "") in plain, item.name
        assert len(text) > 10
