from dataclasses import asdict, replace

import pytest
import yaml

from align.core.errors import UserError, without_secrets
from align.core.launch import one_line_errors
from align.core.settings import dump
from align.core.settings_parser import parse
from align.ppo.config import PPOConfig
from align.sft import SFTConfig
from tests.core.reading import STAGES, MixSettings, WithAbsentBlock, WithBlock, read, refused


@pytest.fixture
def from_yaml(tmp_path):
    """`from_yaml("seed: 1", "--lora_r", "4", stage=PPOConfig)`: settings of a file with this text, and of words after it."""

    def parsed(text, *words, stage=SFTConfig):
        path = tmp_path / "a.yaml"
        path.write_text(text)
        return read(stage, "--config", str(path), *words)

    return parsed


def test_the_command_line_wins_over_files_and_later_files_over_earlier_ones(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 1\nnum_train_epochs: 7\nreport_to: [wandb]\n")
    (tmp_path / "b.yaml").write_text("report_to: []\n")
    one, two = (["--config", str(tmp_path / name)] for name in ("a.yaml", "b.yaml"))
    for words in ([*one, "--seed", "2"], ["--seed", "2", f"--config={tmp_path / 'a.yaml'}"]):
        config = read(SFTConfig, *words)
        assert (config.seed, config.num_train_epochs) == (2, 7)
    assert read(SFTConfig, *one, *two).report_to == []
    assert read(SFTConfig, *two, *one).report_to == ["wandb"]
    assert read(SFTConfig, *one, *two, "--report_to", "trackio").report_to == ["trackio"]


@pytest.mark.parametrize(
    ("texts", "value"),
    [(("true", "True", "yes", "on", "1", "auto"), True), (("false", "False", "no", "0"), False), (("runs/a",), "runs/a")],
)
def test_a_run_resumes_from_its_last_checkpoint_or_from_a_path(from_yaml, texts, value):
    for text in texts:
        assert from_yaml(f"resume_from_checkpoint: {text}\n").resume_from_checkpoint == value
        assert read(SFTConfig, f"--resume_from_checkpoint={text}").resume_from_checkpoint == value
        assert read(SFTConfig, "--resume_from_checkpoint", text).resume_from_checkpoint == value
        if text != "auto" and isinstance(value, bool):
            assert from_yaml(f"prefix_lm: {text}\n").prefix_lm is value
    assert read(SFTConfig, "--resume_from_checkpoint").resume_from_checkpoint is True


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("report_to: none", ["none"]),
        ("report_to: [wandb, trackio]", ["wandb", "trackio"]),
        ("report_to:\n  - wandb\n", ["wandb"]),
    ],
)
def test_lists(from_yaml, text, value):
    assert from_yaml(text).report_to == value
    assert read(SFTConfig, "--report_to", *value, "--seed", "1").report_to == value
    assert parse(PPOConfig, ["--reward_functions", "a.b:f=0.5", "c:g=-2"]).reward_functions == ["a.b:f=0.5", "c:g=-2"]
    assert parse(PPOConfig, ["--reward_functions=a.b:f=0.5"]).reward_functions == ["a.b:f=0.5"]


@pytest.mark.parametrize(
    ("word", "value"),
    [*((word, -1e-5) for word in ("-1e-5", "-.1E-4", "-0.00001")), *((word, None) for word in ("none", "None", "null"))],
)
def test_negative_and_optional_numbers(from_yaml, word, value):
    assert from_yaml(f"missing_eos_score: {word}", stage=PPOConfig).missing_eos_score == value
    for words in (["--missing_eos_score", word], ["--missing-eos-score", word], [f"--missing_eos_score={word}"]):
        assert read(PPOConfig, *words, "--seed", "3").missing_eos_score == value


@pytest.mark.parametrize("text", ["007", "1_000", "0x10", "1e3", "1:30", "yes", "2024-13-45", "2024-01-01", ".5", "-1"])
def test_texts_stay_as_they_were_written(from_yaml, text):
    assert from_yaml(f"model: {text}").model == text
    assert from_yaml(f"model: '{text}'").model == text
    assert from_yaml(f"report_to: [none]\nmodel: {text}  # a name\n").model == text
    assert from_yaml('model: "a b=c"\nvalidation_data: ""\n').validation_data == ""


def test_a_number_means_its_digits(from_yaml):
    assert from_yaml("seed: 010").seed == 10  # YAML 1.1 would read it as octal, and 1:30 as 90
    refused(lambda: from_yaml("seed: 1:30"), "invalid int value: '1:30'")


@pytest.mark.parametrize("stage", STAGES)
def test_every_option_is_known_with_hyphens_too(stage):
    """Whatever the spelling, the values arrive: all defaults are given on the command line, but for those that are empty."""
    defaults = asdict(read(stage))
    assert defaults == asdict(stage(reward_functions=["a:f"]) if stage is PPOConfig else stage())
    groups = {name: value for name, value in defaults.items() if isinstance(value, dict)}
    flat = {name: value for name, value in defaults.items() if name not in groups}
    flat |= {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}
    given = {name: value if isinstance(value, list) else [value] for name, value in flat.items() if value not in ([], None)}
    for spell in (str, lambda name: name.replace("_", "-"), lambda name: name.replace("_", "-", 1)):
        words = [word for name, values in given.items() for word in (f"--{spell(name)}", *map(str, values))]
        assert asdict(read(stage, *words)) == defaults


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: 1\nlerning_rate: 1\n", ":2: unknown key 'lerning_rate'; did you mean learning_rate?"),
        ("warm_up: 1", ":1: unknown key 'warm_up'; did you mean warmup_ratio?"),
        ("seed: 1\ntrain_data:\n", ":2: key 'train_data'"),
        *((text, ":1: key '" + text[:5]) for text in ("model: null", "model: ~", "model:\nseed: 1")),
        ("report_to:", ":1: key 'report_to'"),
        ("zzzzqqqq: 1", "unknown key 'zzzzqqqq'; see --help-all"),
        ("1: 1", "unknown key '1'"),
        ("gamma: 0.1", "unknown key 'gamma'"),  # of another stage
        ("model: x\nseed: [1, 2]", ":2: key 'seed' must be one value, not a list"),
        ("seed: 1\nnum_train_epochs: 2\nseed: 1\n", ":3: duplicate key 'seed'"),
        ("model: x\n\nseed: 1.5", ":3: seed: invalid int value: '1.5'"),
        ("seed: true", ":1: seed: "),
        ("prefix_lm: maybe", ":1: prefix_lm: must be true or false, not 'maybe'"),
        ("learning_rate: fast", ":1: learning_rate: invalid float value: 'fast'"),
        ("optimizer: adamm", ":1: optimizer: invalid choice: 'adamm' (choose from 'adamw', 'adafactor', "),
        ("seed: {a: 1}", ":1: key 'seed'"),
        *((f"report_to: {text}", ":1: key 'report_to'") for text in ("[{a: 1}]", "[[wandb]]", "!own wandb", "[!own wandb]")),
        *((text, ": must contain `key: value` lines") for text in ("", "- seed", "seed", "3")),
        ("seed: 1\nmodel: a: b\n", ":2: not valid YAML"),
        ("seed: 1\n\n\tmodel: x\n", ":3: not valid YAML"),
        ("seed: 1\nmodel: 'open\n", ": not valid YAML"),
        ("model: a\nseed: \x15 1\n", ": not valid YAML"),
        ("mix:\n  data: x\n  coef: much\n", ":3: mix.coef: invalid float value: 'much'"),
        ("mix:\n  data: x\n  coeff: 1\n", ":3: unknown key 'mix.coeff'; did you mean mix.coef?"),
        ("mix: {data: x, data: y}\n", ":1: duplicate key 'mix.data'"),
        ("mix: {data: {a: b}}\n", ":1: key 'mix.data'"),
        ("mix: {data: [a, b]}\n", ":1: key 'mix.data' must be one value, not a list"),
        ("seed: 1\nmix: x\n", ":2: key 'mix' must be a mapping of its settings"),
        ("mixx: {data: x}\n", ":1: unknown key 'mixx'; did you mean mix?"),
    ],
)
def test_a_mistake_in_a_file_names_its_line(from_yaml, tmp_path, text, says):
    stage = WithBlock if "mix" in text else SFTConfig
    message = refused(lambda: from_yaml(text, stage=stage), says)
    assert message.startswith(f"{tmp_path}/a.yaml:")


def test_a_file_that_is_not_there_not_a_file_or_not_text(tmp_path):
    refused(lambda: read(SFTConfig, "--config", str(tmp_path / "none.yaml")), "none.yaml: No such file or directory")
    refused(lambda: read(SFTConfig, "--config", str(tmp_path)), "Is a directory")
    (tmp_path / "b.yaml").write_bytes(b"model: \xff")
    refused(lambda: read(SFTConfig, "--config", str(tmp_path / "b.yaml")), "b.yaml:", "not valid YAML")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--lerning_rate 1", "unknown option --lerning_rate; did you mean --learning_rate?"),
        ("--batch-size-of=1", "did you mean --batch_size?"),
        ("--zzzzqqqq", "unknown option --zzzzqqqq; see --help-all"),
        ("--learn 1", "unknown option --learn"),  # the beginning of a name is none
        ("-x", "-x"),
        ("stray", "'stray'"),
        ("--seed 1 2", "'2' after --seed"),
        ("--seed", "--seed"),
        ("--seed --num_train_epochs 2", "seed"),
        ("--seed many", "seed: invalid int value: 'many'"),
        ("--config", "--config needs the path"),
        ("--mix.coeff 1", "unknown option --mix.coeff; did you mean --mix.coef?"),
        ("--mxi.coef 1", "unknown option --mxi.coef; did you mean --mix.coef?"),
        ("--mix_coef 1", "unknown option --mix_coef; did you mean --mix.coef?"),
        ("--mix x", "--mix.data, --mix.coef, --mix.kind, --mix.weights"),
        ("--mix.coef much", "mix.coef: invalid float value: 'much'"),
        ("--mix.data x --mix.coef 0", "mix.coef is 0.0, but must be above 0"),
        ("--mix.data x y", "'y' after --mix.data"),
    ],
)
def test_a_mistake_on_the_command_line_names_its_option(words, says):
    refused(lambda: parse(WithBlock if "mix" in words or "mxi" in words else SFTConfig, words.split()), says)


def test_a_block_that_is_not_given_is_none_and_not_imported(from_yaml):
    """The module of `absent` does not exist: importing it would raise."""
    unset = from_yaml("mix:\nabsent: null\n", stage=WithAbsentBlock)
    for config in (WithAbsentBlock(), parse(WithAbsentBlock, []), unset):
        assert (config.mix, config.absent) == (None, None)


def test_the_same_block_from_everywhere(from_yaml, tmp_path):
    expected = MixSettings(data="x", coef=2.0, kind="packed", weights=["a", "b"], shuffled=True, rows=3)
    words = ["--mix.data", "x", "--mix.coef=2", "--mix.kind", "packed", "--mix.weights", "a", "b", "--mix.shuffled"]
    words += ["--mix.rows", "3"]
    whole = "mix: {data: x, coef: 2, kind: packed, weights: [a, b], shuffled: on, rows: 3}"
    assert parse(WithBlock, words).mix == expected
    assert from_yaml(whole, stage=WithBlock).mix == expected
    assert from_yaml("mix:\n  data: x\n  coef: 2\n", *words[3:], stage=WithBlock).mix == expected
    assert WithBlock(mix=expected).mix is expected
    assert WithBlock(mix=asdict(expected)).mix == expected
    assert from_yaml("mix.data: 007\n", stage=WithBlock).mix == MixSettings(data="007")
    assert WithBlock(mix={"data": "x", "weights": "one"}).mix.weights == ["one"]
    config = WithBlock(mix=expected)
    assert replace(config, seed=3).mix is config.mix
    (tmp_path / "b.yaml").write_text("mix: {coef: 3.0, weights: []}\n")
    config = from_yaml(whole, "--config", str(tmp_path / "b.yaml"), "--mix.data", "y", stage=WithBlock)
    assert config.mix == replace(expected, data="y", coef=3.0, weights=[]), "later files and words win key by key"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"data": "x", "coef": -1.0}, "mix.coef is -1.0"),
        ({"data": "x", "coef": "1"}, "mix.coef is '1' (str)"),
        ({"coef": 1.0}, "mix.data is ''"),
        ({"data": "x", "kind": "loose"}, "mix.kind is 'loose'"),
        ({"data": "x", "rows": 3}, "mix.rows is 3"),
        ({"data": "x", "coeff": 1.0}, "unknown setting mix.coeff; did you mean mix.coef?"),
        ({"data": "x", 3: 1.0}, "unknown setting mix.3; did you mean mix.rows?"),
        (3, "mix is 3"),
    ],
)
def test_a_mistake_in_python_has_the_full_name(values, says):
    assert refused(lambda: WithBlock(mix=values)).startswith(says)


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
def test_secrets_in_addresses_are_neither_shown_nor_saved(text, shown, monkeypatch, capsys):
    assert without_secrets(text) == shown
    assert yaml.safe_load(dump(SFTConfig(model=text)))["model"] == shown
    with pytest.raises(SystemExit), one_line_errors():
        raise UserError(f"vLLM server {text}: not up")
    assert capsys.readouterr().err == f"error: vLLM server {shown}: not up\n"
    monkeypatch.setenv("ALIGN_TRACEBACK", "1")
    with pytest.raises(SystemExit), one_line_errors():
        raise UserError(f"vLLM server {text}: not up")
    assert capsys.readouterr().err.endswith(f"UserError: vLLM server {shown}: not up\nerror: vLLM server {shown}: not up\n")
