"""Settings that are refused: unknown names, values of a wrong type, broken files; secrets are not shown."""

import runpy
import sys
from pathlib import Path

import pytest

from align.core.errors import UserError, without_secrets
from align.core.launch import one_line_errors
from align.core.settings import dump
from align.core.settings_parser import parse
from align.ppo.config import PPOConfig
from align.sft.train import SFTConfig
from tests.core.reading import read, refused

ROOT = Path(__file__).parents[2]

# ---------------------------------------------------------------------------------------------------- wrong names


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("lerning_rate", "learning_rate"), ("epoch", "epochs"), ("batchsize", "batch_size"), ("warm_up", "warmup")],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(from_yaml, wrong, near):
    refused(lambda: from_yaml(f"seed: 1\n{wrong}: 1\n"), "a.yaml", f"unknown key '{wrong}'; did you mean {near}?")
    refused(lambda: read(SFTConfig, f"--{wrong}", "1"), f"unknown option --{wrong}; did you mean --{near}?")
    refused(lambda: read(SFTConfig, f"--{wrong.replace('_', '-')}=1"), f"did you mean --{near}?")


def test_an_unknown_key_that_is_like_nothing(from_yaml):
    refused(lambda: from_yaml("zzzzqqqq: 1"), "unknown key 'zzzzqqqq'; --help lists the valid names")
    refused(lambda: read(SFTConfig, "--zzzzqqqq"), "unknown option --zzzzqqqq; --help lists")
    refused(lambda: from_yaml("1: 1"), "unknown key '1'")


def test_a_key_of_another_stage_is_unknown(from_yaml):
    refused(lambda: from_yaml("kl_beta: 0.1"), "unknown key 'kl_beta'")
    assert from_yaml("kl_beta: 0.1", stage=PPOConfig).kl_beta == 0.1


def test_a_beginning_of_a_name_is_not_the_name():
    refused(lambda: read(SFTConfig, "--learn", "1"), "unknown option --learn")


@pytest.mark.parametrize("words", [["stray"], ["--seed", "1", "2"], ["-x"]])
def test_words_that_belong_to_nothing(words):
    refused(lambda: read(SFTConfig, *words))


def test_a_list_where_one_value_belongs(from_yaml):
    refused(lambda: from_yaml("model: x\nseed: [1, 2]"), "a.yaml:2: key 'seed' must be one value, not a list")


def test_a_key_that_is_there_twice(from_yaml):
    refused(lambda: from_yaml("seed: 1\nepochs: 2\nseed: 1\n"), "a.yaml:3: key 'seed' occurs twice; remove one")


# ---------------------------------------------------------------------------------------------------- wrong values

WRONG = [
    ("seed", "1.5", "invalid int value: '1.5'"),
    ("seed", "many", "invalid int value: 'many'"),
    ("seed", "true", "seed"),
    ("learning_rate", "fast", "invalid float value: 'fast'"),
    ("resume", "maybe", "maybe"),
    ("optimizer", "adamm", "'adamw'"),
    ("schedule", "cosin", "'cosine'"),
    ("overlong", "cut", "'truncate'"),
    ("dtype", "float16", "'bfloat16'"),
]


@pytest.mark.parametrize(("key", "value", "word"), WRONG)
def test_wrong_types_and_choices(from_yaml, key, value, word):
    refused(lambda: from_yaml(f"{key}: {value}"), key, word)
    refused(lambda: read(SFTConfig, f"--{key}", value), key)


def test_a_wrong_value_names_its_file(from_yaml):
    refused(lambda: from_yaml("seed: many"), "a.yaml")


def test_an_option_without_its_value():
    refused(lambda: read(SFTConfig, "--seed"), "seed", "expected one argument")
    refused(lambda: read(SFTConfig, "--seed", "--epochs", "2"), "seed")
    refused(lambda: read(SFTConfig, "--config"), "--config needs the path")


def test_a_mapping_is_not_a_value(from_yaml):
    refused(lambda: from_yaml("seed: {a: 1}"), "a.yaml", "'seed'", "mapping")
    for text in ("[{a: 1}]", "[[wandb]]", "!own wandb", "[!own wandb]"):
        refused(lambda: from_yaml(f"log_to: {text}"), "a.yaml:1: key 'log_to'")  # noqa: B023 called at once


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
    (tmp_path / "b.yaml").write_bytes(b"model: \xff")
    refused(lambda: read(SFTConfig, "--config", str(tmp_path / "b.yaml")), "b.yaml: not valid YAML")


# ---------------------------------------------------------------------------------------------------- the command


def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lerning_rate", "1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "align" / "sft" / "train.py"), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: unknown option --lerning_rate; did you mean --learning_rate?\n"


def test_a_password_in_an_address_is_not_saved():
    text = dump(PPOConfig(vllm_url="http://me:hunter2@gpu:8000/v1", reward_functions=["a:b"]))
    assert "hunter2" not in text
    assert "http://me:***@gpu:8000/v1" in text


def test_a_file_with_a_character_that_yaml_forbids_is_refused_in_one_line(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"model: a\nseed: \x15 1\n")
    with pytest.raises(UserError) as caught:
        parse(SFTConfig, ["--config", str(path)])
    assert len(str(caught.value).splitlines()) == 1


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
