"""What docs/ says is held against the code: functions, defaults, data examples, errors and launch commands in it."""

import contextlib
import dataclasses
import json
import re
import runpy
import shlex
from pathlib import Path

import yaml

from align.cli import main, stage_configs
from align.core.errors import UserError
from align.core.plugins import import_object
from align.core.settings import block_paths
from align.data import FORMATS, KINDS, Ranking, check_data, read_records
from align.data.formats import find_format
from tests.files import read_rows, write_rows
from tests.project.markdown import DOCS, ROOT, code_in, page, section, table


def test_each_setting_that_is_named_has_that_default():
    classes = stage_configs()
    settings = re.findall(r"`(sft|reward|ppo|dpo|distill)\.(?:(\w+)\.)?(\w+): ([^`]+)`", page("details"))
    assert len(settings) > 20
    for stage, block, key, value in settings:
        declared = import_object(block_paths(classes[stage])[block]) if block else classes[stage]
        default = {item.name: item.default for item in dataclasses.fields(declared)}[key]
        documented = yaml.safe_load(value)
        # YAML reads 1e-05 as text.
        assert (float(documented) if isinstance(default, float) else documented) == default, f"{stage}.{key}"


def examples():
    """Each example of docs/data.md: its rows, and the kinds of record that the line after it promises."""
    for style, block, kinds in re.findall(r"```(jsonl?)\n(.*?)```\n\nRead as: ([a-z, ()]+)\.\n", page("data"), re.S):
        yield [json.loads(line) for line in (block.splitlines() if style == "jsonl" else [block])], kinds.split(", ")


def count_prompts(rows):
    return len({row.get("prompt") or row["instruction"] for row in rows})


def test_each_example_is_read_as_what_it_promises_and_each_layout_has_one(tmp_path):
    path, shown = tmp_path / "rows.jsonl", set()
    for rows, kinds in examples():
        write_rows(path, rows)
        readable = []
        for name, kind in KINDS.items():
            grouped = f"{name} (one per prompt)"
            with contextlib.suppress(UserError):
                expected = count_prompts(rows) if grouped in kinds else len(rows)
                assert len(read_records(path, kind, token_ids=True)) == expected
                readable.append(grouped if grouped in kinds else name)
        assert sorted(readable) == sorted(kinds), rows
        names = [name.removesuffix(" (one per prompt)") for name in kinds]
        formats = [(find_format(row, KINDS[name]), name) for row in rows for name in names]
        shown |= {(found.name, name) for found, name in formats if found}
    names = {kind: name for name, kind in KINDS.items()}
    assert shown == {(known.name, names[known.kind]) for known in FORMATS}


def test_data_check_says_what_the_pages_show(tmp_path, monkeypatch):
    text = page("data")
    rankings = re.search(r"## Rankings.*?```jsonl\n(.*?)```", text, re.S).group(1)
    bad = next(code for code in code_in(section(text, "Inspecting a file")) if code.startswith("{"))
    monkeypatch.chdir(tmp_path)
    Path("rankings.jsonl").write_text(rankings + bad + "\n", encoding="utf-8")
    assert check_data("rankings.jsonl") == re.search(r"```check\n(.*?)\n```", text, re.S).group(1)
    monkeypatch.chdir(ROOT)
    source, shown = re.search(r"align data check (\S+)\n```\n\n```text\n(.*?)\n```", page("tutorial"), re.S).groups()
    printed = "\n".join(line.rstrip() for line in check_data(source).splitlines())
    assert printed.startswith(f"{shown}\nexample 1:")


def test_the_launch_commands_are_taken():
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    from align.core.settings_parser import parse

    text = "\n".join([page("clusters"), page("howto/cluster"), (ROOT / "README.md").read_text(encoding="utf-8")])
    joined = re.sub(r" \\\n +", " ", text)  # lines that end in a backslash go on
    launched = [line.split() for line in re.findall(r"^ *(?:[A-Z_]+=\S* )?accelerate launch (.*)$", joined, re.M)]
    assert len(launched) >= 10
    with contextlib.chdir(ROOT):
        for words in launched:
            given = _validate_launch_command(launch_command_parser().parse_args(words))[0]
            assert Path(given.training_script).exists()
            parse(stage_configs()[Path(given.training_script).parent.name], given.training_script_args)


def test_the_page_of_models_lists_the_architectures_that_are_tested():
    written = runpy.run_path(str(DOCS / "write_models.py"))["page"]()
    assert page("models") == written, "run python docs/write_models.py"


def test_the_commands_of_the_spreadsheet_make_a_reward_model(tmp_path, monkeypatch, capfd, caplog):
    text = page("howto/spreadsheet")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers.csv").write_text(re.search(r"```csv\n(.*?)```", text, re.S).group(1), encoding="utf-8")
    check, convert, train = (shlex.split(block)[1:] for block in re.findall(r"```console\n(.*?)```", text, re.S))

    main(check)
    shown = capfd.readouterr().out
    for line in (
        "kind:                  ranking",
        "tied pairs:            1 of 4 (25.0 %)",
        "unused columns:        comment (1 row)",
    ):
        assert f"{line}\n" in shown
    assert shown.endswith("bad rows:              none\n")

    main(convert)
    rankings = read_records("answers.jsonl", Ranking)
    assert rankings == read_records(convert[2], Ranking)
    assert [ranking.ranks for ranking in rankings] == [(1, 2), (2, 1), (1, 1), (1, 2)]
    assert rankings[3].responses == ("House.", "NA")

    main([*("tiny-gpt2" if word == "smollm2-135m" else word for word in train), "--report_to", "none"])
    assert any(line.startswith("answers.jsonl: skipped 1 ranking with all responses tied") for line in caplog.messages)
    folder = tmp_path / "runs" / "answers" / "reward"
    assert (folder / "model").is_dir()
    metrics = read_rows(folder / "metrics.jsonl")
    assert any("validation/accuracy" in line for line in metrics)


def test_the_other_spreadsheets_are_read(tmp_path):
    path = tmp_path / "sheet.csv"
    path.write_text("question,answer,stars,good,bad\nHi,a,1,c,d\nHi,b,5,e,f\n", encoding="utf-8")
    found = []
    for _, brackets in table(section(page("howto/spreadsheet"), "Other sheets"), "sheet"):
        options = re.search(r"`(\[.*?\])`", brackets).group(1)
        output = tmp_path / f"out-{len(found)}.jsonl"
        main(["data", "convert", f"{path}{options}", str(output)])
        found.append(read_rows(output)[0])
    assert found == [
        {"prompt": "Hi", "responses": ["a", "b"], "ranks": [2, 1]},
        {"prompt": "Hi", "responses": ["c", "d"], "ranks": [1, 2]},
        {"prompt": "Hi", "completion": "a"},
    ]
