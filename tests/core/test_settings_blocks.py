"""Blocks of settings: YAML, command line and Python, what is refused and how, the way to config.yaml and back."""

from dataclasses import asdict, replace

import pytest

from align.core.settings import dump
from align.core.settings_parser import parse
from tests.core.reading import MixSettings, WithAbsentBlock, WithBlock, refused


@pytest.fixture
def from_yaml(tmp_path):
    """Parse the text of a YAML file."""

    def run(text, *words, stage=WithBlock):
        path = tmp_path / "a.yaml"
        path.write_text(text)
        return parse(stage, ["--config", str(path), *words])

    return run


def test_a_block_that_is_not_given_is_none_and_not_imported(from_yaml):
    """The module of `absent` does not exist: importing it would raise."""
    unset = from_yaml("mix:\nabsent: null\n", stage=WithAbsentBlock)
    for config in (WithAbsentBlock(), parse(WithAbsentBlock, []), unset):
        assert (config.mix, config.absent) == (None, None)


def test_the_same_block_from_everywhere(from_yaml):
    expected = MixSettings(data="x", coef=2.0, kind="packed", weights=["a", "b"], shuffled=True, rows=3)
    words = ["--mix.data", "x", "--mix.coef=2", "--mix.kind", "packed", "--mix.weights", "a", "b", "--mix.shuffled"]
    words += ["--mix.rows", "3"]
    assert parse(WithBlock, words).mix == expected
    assert from_yaml("mix: {data: x, coef: 2, kind: packed, weights: [a, b], shuffled: on, rows: 3}").mix == expected
    assert from_yaml("mix:\n  data: x\n  coef: 2\n", *words[3:]).mix == expected
    assert WithBlock(mix=expected).mix is expected
    assert WithBlock(mix=asdict(expected)).mix == expected
    assert from_yaml("mix.data: x\n").mix == MixSettings(data="x")


def test_the_command_line_and_later_files_win_key_by_key(from_yaml, tmp_path):
    (tmp_path / "b.yaml").write_text("mix: {coef: 3.0, weights: []}\n")
    config = from_yaml("mix: {data: x, coef: 2.0, weights: [a]}\n", "--config", str(tmp_path / "b.yaml"), "--mix.data", "y")
    assert config.mix == MixSettings(data="y", coef=3.0)


def test_paths_types_and_ranges_are_those_of_any_setting(monkeypatch, from_yaml):
    monkeypatch.setenv("HOME", "/home/me")
    assert from_yaml("mix: {data: ~/x}").mix.data == "/home/me/x"
    assert from_yaml("mix: {data: 007}").mix.data == "007"
    assert WithBlock(mix={"data": "x", "weights": "one"}).mix.weights == ["one"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"data": "x", "coef": -1.0}, "mix.coef is -1.0, but must be above 0"),
        ({"data": "x", "coef": "1"}, "mix.coef is '1' (str), but must be a number"),
        ({"coef": 1.0}, "mix.data is '', but must be given"),
        ({"data": "x", "kind": "loose"}, "mix.kind is 'loose', but must be one of plain, packed"),
        ({"data": "x", "rows": 3}, "mix.rows is 3, but must be 0 unless kind is packed"),
        ({"data": "x", "coeff": 1.0}, "unknown setting mix.coeff; did you mean mix.coef?"),
        (3, "mix is 3, but must be a block of settings"),
    ],
)
def test_a_mistake_in_python_has_the_full_name(values, says):
    assert refused(lambda: WithBlock(mix=values)) == says


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: 1\nmix:\n  data: x\n  coef: much\n", ":4: mix.coef: invalid float value: 'much'"),
        ("mix:\n  data: x\n  coeff: 1\n", ":3: unknown key 'mix.coeff'; did you mean mix.coef?"),
        ("mix: {data: x, data: y}\n", ":1: key 'mix.data' occurs twice; remove one"),
        ("mix: {data: {a: b}}\n", ":1: key 'mix.data': a nested mapping"),
        ("mix: {data: [a, b]}\n", ":1: key 'mix.data' must be one value, not a list"),
        ("seed: 1\nmix: x\n", ":2: key 'mix' must be a mapping of its settings"),
        ("mixx: {data: x}\n", ":1: unknown key 'mixx'; did you mean mix?"),
    ],
)
def test_a_mistake_in_a_file_names_its_line(from_yaml, text, says):
    assert says in refused(lambda: from_yaml(text))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mix.coeff", "1"], "unknown option --mix.coeff; did you mean --mix.coef?"),
        (["--mxi.coef", "1"], "unknown option --mxi.coef; did you mean --mix.coef?"),
        (["--mix_coef", "1"], "unknown option --mix_coef; did you mean --mix.coef?"),
        (["--mix", "x"], "--mix is a block of settings: give --mix.data, --mix.coef, --mix.kind, --mix.weights"),
        (["--mix.coef", "much"], "mix.coef: invalid float value: 'much'"),
        (["--mix.data", "x", "--mix.coef", "0"], "mix.coef is 0.0, but must be above 0"),
        (["--mix.data", "x", "y"], "unexpected word 'y' after --mix.data, which takes one value"),
    ],
)
def test_a_mistake_on_the_command_line_has_the_full_name(words, says):
    assert refused(lambda: parse(WithBlock, words)).startswith(says)


def test_dump_reads_back(tmp_path):
    path = tmp_path / "config.yaml"
    for config in (WithBlock(), WithBlock(mix=MixSettings(data="x", weights=["a"], kind="packed", rows=2))):
        path.write_text(dump(config))
        assert parse(WithBlock, ["--config", str(path)]) == config
    assert replace(config, seed=3).mix is config.mix


def test_help_lists_the_settings_of_all_blocks(capsys):
    with pytest.raises(SystemExit):
        parse(WithBlock, ["--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "mix: texts that are mixed in" in shown
    assert "--mix.coef" in shown
    assert "the weight of its loss (default: 27.8)" in shown
