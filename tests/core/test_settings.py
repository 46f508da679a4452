"""Settings from YAML and the command line: which wins, spellings, lists, wrong names and values, broken files."""

from dataclasses import asdict
from pathlib import Path

import pytest

from align.core.errors import UserError, without_secrets
from align.core.launch import one_line_errors
from align.core.settings import dump
from align.core.settings_parser import parse
from align.ppo.config import PPOConfig
from align.sft import SFTConfig
from tests.core.reading import STAGES, read, refused

ROOT = Path(__file__).parents[2]


@pytest.fixture
def from_yaml(tmp_path):
    """Parse the text of a YAML file."""

    def run(text, *words, stage=SFTConfig):
        path = tmp_path / "a.yaml"
        path.write_text(text)
        return read(stage, "--config", str(path), *words)

    return run


@pytest.mark.parametrize("stage", STAGES)
def test_without_words_all_defaults_hold(stage):
    defaults = stage(reward_functions=["a:f"]) if stage is PPOConfig else stage()
    assert asdict(read(stage)) == asdict(defaults)


def test_the_file_may_come_before_or_after_and_the_command_line_still_wins(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 1\nnum_train_epochs: 7\n")
    for words in (["--config", str(tmp_path / "a.yaml"), "--seed", "2"], ["--seed", "2", f"--config={tmp_path / 'a.yaml'}"]):
        config = read(SFTConfig, *words)
        assert (config.seed, config.num_train_epochs) == (2, 7)


@pytest.mark.parametrize(
    ("texts", "value"), [(("true", "yes", "on", "1"), True), (("false", "no", "0"), False)], ids=["true", "false"]
)
def test_booleans(from_yaml, texts, value):
    assert all(from_yaml(f"resume_from_checkpoint: {text}\n").resume_from_checkpoint is value for text in texts)
    assert read(SFTConfig, f"--resume_from_checkpoint={str(value).title()}").resume_from_checkpoint is value
    assert read(SFTConfig, "--resume_from_checkpoint", str(value).lower()).resume_from_checkpoint is value
    assert read(SFTConfig, "--resume_from_checkpoint").resume_from_checkpoint
    assert all(from_yaml(f"prefix_lm: {text}\n").prefix_lm is value for text in texts)


def test_a_run_resumes_from_its_last_checkpoint_or_from_a_path(from_yaml):
    assert read(SFTConfig, "--resume_from_checkpoint", "auto").resume_from_checkpoint is True
    assert read(SFTConfig, "--resume_from_checkpoint", "runs/a").resume_from_checkpoint == "runs/a"
    assert from_yaml("resume_from_checkpoint: runs/a\n").resume_from_checkpoint == "runs/a"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("report_to: none", ["none"]),
        ("report_to: [wandb, trackio]", ["wandb", "trackio"]),
        ("report_to:\n  - wandb\n", ["wandb"]),
        ("report_to:", ["tensorboard"]),
    ],
)
def test_lists_in_yaml(from_yaml, text, value):
    assert from_yaml(text).report_to == value


def test_lists_on_the_command_line():
    assert read(SFTConfig, "--report_to", "wandb", "tensorboard", "--seed", "1").report_to == ["wandb", "tensorboard"]
    words = ["--reward_functions", "a.b:f=0.5", "c:g=-2"]
    assert parse(PPOConfig, words).reward_functions == ["a.b:f=0.5", "c:g=-2"]
    assert parse(PPOConfig, ["--reward_functions=a.b:f=0.5"]).reward_functions == ["a.b:f=0.5"]


def test_an_empty_list_in_a_later_file_wins(tmp_path):
    (tmp_path / "a.yaml").write_text("report_to: [wandb]\nseed: 1\n")
    (tmp_path / "b.yaml").write_text("report_to: []\n")
    one, two = (["--config", str(tmp_path / name)] for name in ("a.yaml", "b.yaml"))
    assert read(SFTConfig, *one, *two).report_to == []
    assert read(SFTConfig, *two, *one).report_to == ["wandb"]
    assert read(SFTConfig, *one, *two, "--report_to", "trackio").report_to == ["trackio"]


@pytest.mark.parametrize("number", ["-1e-5", "-.1E-4", "-0.00001", "-1e-05"])
def test_negative_numbers_with_an_exponent(from_yaml, number):
    assert from_yaml(f"missing_eos_score: {number}", stage=PPOConfig).missing_eos_score == -1e-5
    for words in (["--missing_eos_score", number], ["--missing-eos-score", number], [f"--missing_eos_score={number}"]):
        assert read(PPOConfig, *words, "--seed", "3").missing_eos_score == -1e-5


@pytest.mark.parametrize("word", ["none", "None", "null"])
def test_optional_numbers_can_be_none(from_yaml, word):
    assert from_yaml(f"missing_eos_score: {word}", stage=PPOConfig).missing_eos_score is None
    assert read(PPOConfig, "--missing_eos_score", word).missing_eos_score is None
    assert read(PPOConfig, "--missing_eos_penalty", "0.5").missing_eos_penalty == 0.5
    refused(lambda: read(PPOConfig, "--missing_eos_penalty", "x"), "missing_eos_penalty: invalid float value: 'x'")


def test_texts_that_look_like_something_else(from_yaml):
    config = from_yaml('model: "a b=c"\nvalidation_data: ""\noutput_dir: 2024-01-01\n')
    assert (config.model, config.validation_data, config.output_dir) == ("a b=c", "", "2024-01-01")


@pytest.mark.parametrize("text", ["007", "1_000", "0x10", "1e3", "1:30", "yes", "Off", "2024-13-45", ".5", "-1"])
def test_texts_stay_as_they_were_written(from_yaml, text):
    assert from_yaml(f"model: {text}").model == text
    assert from_yaml(f"model: '{text}'").model == text
    assert from_yaml(f"report_to: [none]\nmodel: {text}  # a name\n").model == text


def test_a_number_means_its_digits(from_yaml):
    assert from_yaml("seed: 010").seed == 10  # YAML 1.1 would read it as octal, and 1:30 as 90
    refused(lambda: from_yaml("seed: 1:30"), "invalid int value: '1:30'")


@pytest.mark.parametrize("stage", STAGES)
def test_every_option_is_known_with_hyphens_too(stage):
    """Whatever the spelling, the values arrive: all defaults are given on the command line, but for those that are empty."""
    defaults = asdict(read(stage))
    groups = {name: value for name, value in defaults.items() if isinstance(value, dict)}
    flat = {name: value for name, value in defaults.items() if name not in groups}
    flat |= {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}
    given = {name: value if isinstance(value, list) else [value] for name, value in flat.items() if value not in ([], None)}
    for spell in (str, lambda name: name.replace("_", "-"), lambda name: name.replace("_", "-", 1)):
        words = [word for name, values in given.items() for word in (f"--{spell(name)}", *map(str, values))]
        assert asdict(read(stage, *words)) == defaults


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("lerning_rate", "learning_rate"),
        ("num_train_epoch", "num_train_epochs"),
        ("batchsize", "batch_size"),
        ("warm_up", "warmup_ratio"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(from_yaml, wrong, near):
    refused(lambda: from_yaml(f"seed: 1\n{wrong}: 1\n"), "a.yaml", f"unknown key '{wrong}'; did you mean {near}?")
    refused(lambda: read(SFTConfig, f"--{wrong}", "1"), f"unknown option --{wrong}; did you mean --{near}?")
    refused(lambda: read(SFTConfig, f"--{wrong.replace('_', '-')}=1"), f"did you mean --{near}?")


def test_an_unknown_key_that_is_like_nothing(from_yaml):
    refused(lambda: from_yaml("zzzzqqqq: 1"), "unknown key 'zzzzqqqq'; --help-all lists the valid names")
    refused(lambda: read(SFTConfig, "--zzzzqqqq"), "unknown option --zzzzqqqq; --help-all lists")
    refused(lambda: from_yaml("1: 1"), "unknown key '1'")


def test_a_key_of_another_stage_and_a_beginning_of_a_name_are_unknown(from_yaml):
    refused(lambda: from_yaml("gamma: 0.1"), "unknown key 'gamma'")
    assert from_yaml("gamma: 0.1", stage=PPOConfig).gamma == 0.1
    refused(lambda: read(SFTConfig, "--learn", "1"), "unknown option --learn")


def test_words_that_belong_to_nothing():
    refused(lambda: read(SFTConfig, "stray"), "unexpected word 'stray'; settings are given as --name value")
    refused(lambda: read(SFTConfig, "--seed", "1", "2"), "unexpected word '2' after --seed, which takes one value")
    refused(lambda: read(SFTConfig, "-x"))


def test_a_list_where_one_value_belongs(from_yaml):
    refused(lambda: from_yaml("model: x\nseed: [1, 2]"), "a.yaml:2: key 'seed' must be one value, not a list")


def test_a_key_that_is_there_twice(from_yaml):
    refused(lambda: from_yaml("seed: 1\nnum_train_epochs: 2\nseed: 1\n"), "a.yaml:3: key 'seed' occurs twice; remove one")


WRONG = [
    ("seed", "1.5", "invalid int value: '1.5'"),
    ("seed", "many", "invalid int value: 'many'"),
    ("seed", "true", "seed"),
    ("learning_rate", "fast", "invalid float value: 'fast'"),
    ("optimizer", "adamm", "'adamw'"),
    ("lr_scheduler_type", "cosin", "'cosine'"),
    ("overlong", "cut", "'truncate'"),
    ("dtype", "float16", "'bfloat16'"),
]


@pytest.mark.parametrize(("key", "value", "word"), WRONG)
def test_wrong_types_and_choices(from_yaml, tmp_path, key, value, word):
    message = refused(lambda: from_yaml(f"model: x\n\n{key}: {value}"), word)
    assert message.startswith(f"{tmp_path}/a.yaml:3: {key}: ")
    refused(lambda: read(SFTConfig, f"--{key}", value), key)


def test_an_option_without_its_value():
    refused(lambda: read(SFTConfig, "--seed"), "seed", "expected one argument")
    refused(lambda: read(SFTConfig, "--seed", "--num_train_epochs", "2"), "seed")
    refused(lambda: read(SFTConfig, "--config"), "--config needs the path")


def test_a_mapping_is_not_a_value(from_yaml):
    refused(lambda: from_yaml("seed: {a: 1}"), "a.yaml", "'seed'", "mapping")
    for text in ("[{a: 1}]", "[[wandb]]", "!own wandb", "[!own wandb]"):
        refused(lambda: from_yaml(f"report_to: {text}"), "a.yaml:1: key 'report_to'")  # noqa: B023 called at once


@pytest.mark.parametrize("text", ["", "- seed", "seed", "3"])
def test_a_file_without_keys(from_yaml, text):
    refused(lambda: from_yaml(text), "a.yaml: must contain `key: value` lines")


@pytest.mark.parametrize(
    ("text", "line"), [("seed: 1\nmodel: 'open\n", 3), ("seed: 1\nmodel: a: b\n", 2), ("seed: 1\n\n\tmodel: x\n", 3)]
)
def test_broken_yaml_names_its_line(from_yaml, text, line):
    message = refused(lambda: from_yaml(text), "not valid YAML")
    # An open quote is noticed at the end of the file; PyYAML counts a last line break as the start of a line.
    assert f"a.yaml:{line}: " in message or (line == 3 and "a.yaml:2: " in message and "open" in text)


def test_a_file_that_is_not_there_not_a_file_or_not_text(tmp_path):
    refused(lambda: read(SFTConfig, "--config", str(tmp_path / "none.yaml")), "none.yaml: No such file or directory")
    refused(lambda: read(SFTConfig, "--config", str(tmp_path)), "Is a directory")
    for data in (b"model: \xff", b"model: a\nseed: \x15 1\n"):
        (tmp_path / "b.yaml").write_bytes(data)
        refused(lambda: read(SFTConfig, "--config", str(tmp_path / "b.yaml")), "b.yaml:", "not valid YAML")


def test_a_password_in_an_address_is_not_saved():
    text = dump(PPOConfig(vllm={"url": "http://me:hunter2@gpu:8000/v1"}, reward_functions=["a:b"]))
    assert "hunter2" not in text
    assert "http://me:***@gpu:8000/v1" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:hunter2@gpu:8000/v1", "http://me:***@gpu:8000/v1"),
        ("http://:hunter2@gpu", "http://:***@gpu"),
        ("at http://me:hunt@er2@gpu/v1, or", "at http://me:***@gpu/v1, or"),
        ("https://hunter2@host/v1", "https://***@host/v1"),
        ("https://host/v1?api_key=hunter2&n=3", "https://host/v1?api_key=***&n=3"),
        ("'https://host/v1?n=3&X-Token=hunter2'", "'https://host/v1?n=3&X-Token=***'"),
        ("https://host:8000/v1?n=3 by a@b.c", "https://host:8000/v1?n=3 by a@b.c"),
        ("data/prompts.jsonl", "data/prompts.jsonl"),
    ],
)
def test_secrets_in_addresses_are_not_shown(text, shown):
    assert without_secrets(text) == shown


def test_no_secret_is_in_the_line_of_an_error(capsys):
    with pytest.raises(SystemExit), one_line_errors():
        raise UserError("vLLM server http://me:hunter2@gpu:8000: not up")
    assert capsys.readouterr().err == "error: vLLM server http://me:***@gpu:8000: not up\n"
