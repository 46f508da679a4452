"""`align schema`."""

import json

import pytest

from align import cli


def test_the_schema_of_a_command(capsys):
    cli.main(["schema", "eval", "toxicity"])
    found = json.loads(capsys.readouterr().out)
    assert found["title"] == "Settings of align eval toxicity"
    assert found["properties"]["top_p"] == {"default": 0.9, "exclusiveMinimum": 0, "maximum": 1, "type": "number"} | {
        "description": found["properties"]["top_p"]["description"]
    }


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["schema", "pp"], "error: align schema: give a command with settings, or --all FOLDER, not 'pp'; did you"),
        (["schema", "demo"], "error: align schema: give a command with settings, or --all FOLDER, not 'demo'"),
    ],
)
def test_a_mistake_is_one_line(words, line, command_error):
    assert command_error(cli.main, words).startswith(line)


def test_help_is_printed(capsys):
    cli.main(["schema", "--help"])
    assert capsys.readouterr().out.startswith("usage: align schema ")
