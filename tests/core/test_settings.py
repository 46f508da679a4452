"""Settings from YAML and the command line: which wins, spellings, types, lists, texts that look like something else."""

from dataclasses import asdict

import pytest

from align.core.settings_parser import parse
from align.ppo.config import PPOConfig
from align.sft.train import SFTConfig
from tests.core.reading import STAGES, read, refused

# ---------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("stage", STAGES)
def test_without_words_all_defaults_hold(stage):
    defaults = stage(reward_functions=["a:f"]) if stage is PPOConfig else stage()
    assert asdict(read(stage)) == asdict(defaults)


def test_defaults_are_not_shared_between_configs():
    one, two = SFTConfig(), SFTConfig()
    one.log_to.append("wandb")
    assert two.log_to == SFTConfig().log_to == ["tensorboard"]


def test_the_command_line_wins_over_the_file(from_yaml):
    config = from_yaml("seed: 3\nlearning_rate: 3e-6\nmodel: tiny-gpt2\n", "--seed", "4")
    assert (config.seed, config.learning_rate, config.model) == (4, 3e-6, "tiny-gpt2")


@pytest.mark.parametrize("words", [["--seed", "5"], ["--seed=5"]])
def test_both_ways_to_give_a_value(words):
    assert read(SFTConfig, *words).seed == 5


@pytest.mark.parametrize("words", [["--learning_rate", "1e-3"], ["--learning-rate", "1e-3"], ["--learning-rate=1e-3"]])
def test_dashes_and_underscores_are_the_same(words):
    assert read(SFTConfig, *words).learning_rate == 1e-3


def test_the_file_may_come_before_or_after_and_the_command_line_still_wins(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 1\nepochs: 7\n")
    for words in (["--config", str(tmp_path / "a.yaml"), "--seed", "2"], ["--seed", "2", f"--config={tmp_path / 'a.yaml'}"]):
        config = read(SFTConfig, *words)
        assert (config.seed, config.epochs) == (2, 7)


def test_a_later_file_wins_over_an_earlier_one(tmp_path):
    for name, text in (("a", "seed: 1\nepochs: 7\n"), ("b", "seed: 2\n")):
        (tmp_path / f"{name}.yaml").write_text(text)
    config = read(SFTConfig, "--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml"))
    assert (config.seed, config.epochs) == (2, 7)


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("false", False), ("yes", True), ("no", False), ("on", True), ("1", True), ("0", False)],
)
def test_booleans_in_yaml(from_yaml, text, value):
    assert from_yaml(f"resume: {text}\n").resume is value


@pytest.mark.parametrize(
    ("words", "value"), [(["--resume"], True), (["--resume", "false"], False), (["--resume=True"], True)]
)
def test_booleans_on_the_command_line(words, value):
    assert read(SFTConfig, *words).resume is value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("log_to: none", ["none"]),
        ("log_to: [wandb, trackio]", ["wandb", "trackio"]),
        ("log_to:\n  - wandb\n", ["wandb"]),
        ("log_to:", ["tensorboard"]),
    ],
)
def test_lists_in_yaml(from_yaml, text, value):
    assert from_yaml(text).log_to == value


def test_lists_on_the_command_line():
    assert read(SFTConfig, "--log_to", "wandb", "tensorboard", "--seed", "1").log_to == ["wandb", "tensorboard"]
    words = ["--reward_functions", "a.b:f=0.5", "c:g=-2"]
    assert parse(PPOConfig, words).reward_functions == ["a.b:f=0.5", "c:g=-2"]
    assert parse(PPOConfig, ["--reward_functions=a.b:f=0.5"]).reward_functions == ["a.b:f=0.5"]


def test_an_empty_list_in_yaml(from_yaml):
    assert from_yaml("log_to: []").log_to == []


def test_an_empty_list_in_a_later_file_wins(tmp_path):
    (tmp_path / "a.yaml").write_text("log_to: [wandb]\nseed: 1\n")
    (tmp_path / "b.yaml").write_text("log_to: []\n")
    one, two = (["--config", str(tmp_path / name)] for name in ("a.yaml", "b.yaml"))
    assert read(SFTConfig, *one, *two).log_to == []
    assert read(SFTConfig, *two, *one).log_to == ["wandb"]
    assert read(SFTConfig, *one, *two, "--log_to", "trackio").log_to == ["trackio"]


def test_negative_numbers(from_yaml):
    assert read(PPOConfig, "--missing_eos_score", "-2.5").missing_eos_score == -2.5
    assert from_yaml("missing_eos_score: -2.5", stage=PPOConfig).missing_eos_score == -2.5


@pytest.mark.parametrize("number", ["-1e-5", "-.1E-4", "-0.00001", "-1e-05"])
def test_negative_numbers_with_an_exponent(from_yaml, number):
    assert from_yaml(f"missing_eos_score: {number}", stage=PPOConfig).missing_eos_score == -1e-5
    for words in (["--missing_eos_score", number], ["--missing-eos-score", number], [f"--missing_eos_score={number}"]):
        assert read(PPOConfig, *words, "--seed", "3").missing_eos_score == -1e-5


def test_texts_that_look_like_something_else(from_yaml):
    config = from_yaml('model: "a b=c"\nvalidation_data: ""\noutput_dir: 2024-01-01\n')
    assert (config.model, config.validation_data, config.output_dir) == ("a b=c", "", "2024-01-01")


@pytest.mark.parametrize("text", ["007", "1_000", "0x10", "1e3", "1:30", "yes", "Off", "2024-13-45", ".5", "-1"])
def test_texts_stay_as_they_were_written(from_yaml, text):
    assert from_yaml(f"model: {text}").model == text
    assert from_yaml(f"model: '{text}'").model == text
    assert from_yaml(f"log_to: [none]\nmodel: {text}  # a name\n").model == text


def test_a_number_means_its_digits(from_yaml):
    assert from_yaml("seed: 010").seed == 10  # YAML 1.1 would read it as octal, and 1:30 as 90
    refused(lambda: from_yaml("seed: 1:30"), "invalid int value: '1:30'")


@pytest.mark.parametrize("stage", STAGES)
def test_every_option_is_known_with_hyphens_too(stage):
    """Whatever the spelling, the value arrives: each default is given on the command line, but for one that is empty."""
    defaults = asdict(read(stage))
    for spell in (str, lambda name: name.replace("_", "-"), lambda name: name.replace("_", "-", 1)):
        for name, value in defaults.items():
            values = value if isinstance(value, list) else [value]
            if not values:
                continue  # an empty list cannot be given
            assert asdict(read(stage, f"--{spell(name)}", *map(str, values))) == defaults
