import ast
import json
import re
import runpy
import shlex

import pytest

from align.cli import COMMANDS
from align.data import Demonstration, Prompt, Ranking, read_records
from tests.http_stand_in import answering
from tests.project.markdown import DOCS, PAGES, README, ROOT, page, table, text_of
from tests.project.test_layers import LAYERS


def blocks(path, languages):
    """The fenced blocks of a page in one of these languages."""
    fences = re.findall(r"^```([a-z]*)\n(.*?)^```$", text_of(path), re.M | re.S)
    return [body for language, body in fences if language in languages]


def commands(inline):
    """The `align` commands of the pages, without the word `align`: those of blocks, or those inside sentences and tables."""
    for path in PAGES:
        lines = "".join(blocks(path, ("console", ""))).replace(" \\\n", " ").splitlines()
        lines += re.findall(r"^ {4}(align .*)$", text_of(path), re.M)
        if inline:
            lines = re.findall(r"`(align [^`\n]+)`", text_of(path))
        for line in lines:
            words = shlex.split(line, comments=True) if line.startswith("align ") else []
            if any(word.startswith("--") and word not in ("--help", "--help-all") for word in words):
                yield pytest.param(words[1:], id=f"{path.stem}: {line[:70]}")


def settings_of(words):
    """The settings class of a command and the words that are left, or None where the command has no such class."""
    from align.cli import OTHER_STAGES, stage_configs
    from align.commands.chat import ChatConfig
    from align.commands.sample import SampleConfig
    from align.eval import TASKS
    from align.extras.plan import PlanConfig

    assert words[0] in COMMANDS
    if words[0] == "eval":
        return TASKS[words[1]].load()[0], words[2:]
    known = stage_configs() | {"sample": SampleConfig, "chat": ChatConfig, "plan": PlanConfig}
    rest = OTHER_STAGES[words[0]].named(words[1:]) if words[0] in OTHER_STAGES else words[1:]
    return known.get(words[0]), rest


@pytest.mark.parametrize("words", commands(inline=False))
def test_commands_parse(words, monkeypatch):
    from align.core.settings_parser import parse
    from annotation_ui.cli import _parser

    monkeypatch.chdir(ROOT)
    config_class, rest = settings_of(words)
    if words[0] == "annotate":
        _parser().parse_args(rest)
    elif config_class is not None:
        parse(config_class, rest)


@pytest.mark.parametrize("words", commands(inline=True))
def test_options_in_sentences_exist(words):
    """Commands in a sentence may be parts of one, with words that stand for the reader's own."""
    if words[0] == "COMMAND" or words[:2] == ["eval", "TASK"]:
        return
    from align.core.settings_parser import setting_names

    config_class, rest = settings_of(words)
    if config_class is not None:
        options = {word[2:].split("=")[0].replace("-", "_") for word in rest if word.startswith("--")}
        assert options <= {*setting_names(config_class), "config", "help"}


def code():
    for path in PAGES:
        for number, block in enumerate(blocks(path, ("python",))):
            yield pytest.param(block, id=f"{path.stem}-{number}")


@pytest.mark.parametrize("block", code())
def test_code_is_whole_and_its_imports_and_settings_exist(block):
    from align.core.settings_parser import setting_names

    known = {}
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("align"):
            module = __import__(node.module, fromlist=["_"])
            known |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Config"):
            assert {keyword.arg for keyword in node.keywords} <= set(setting_names(known[node.func.id]))


def test_the_reward_functions_that_are_shown_score(tmp_path, monkeypatch):
    from align.ppo.reward_functions import call_reward_function, load_functions

    text = page("howto/own-reward")
    (tmp_path / "my_rewards.py").write_text(re.search(r"```python\n(.*?)```", text, re.S).group(1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    named = re.search(r"--reward_functions (.*)", text).group(1).split()
    polite, short = load_functions(named)
    prompts = [({"role": "user", "content": "Hi"},)] * 2
    assert (polite.weight, short.weight) == (0.5, 1.0)
    assert call_reward_function(polite, prompts, ["Thank you!", "No."]) == [1.0, 0.0]
    assert call_reward_function(short, prompts, ["word " * 40, "word " * 50]) == [0.0, -0.5]


def test_the_server_reward_that_is_shown_asks_and_scores(tmp_path, monkeypatch):
    def score(request):
        asked = json.loads(request.body)
        scores = [len(prompt) - len(response) for prompt, response in zip(*asked.values(), strict=True)]
        return 200, json.dumps({"scores": scores}).encode()

    code = re.findall(r"```python\n(.*?)```", page("howto/reward-elsewhere"), re.S)[0]
    with answering(score) as url:
        names = {}
        exec(code.replace("http://localhost:9000", url), names)
        assert names["score"]([[{"role": "user", "content": "four"}]], ["one"]) == [1]


def test_the_layers_that_are_drawn_are_those_of_the_code():
    drawn = re.search(r"```layers\n(.*?)```", page("architecture"), re.S).group(1).strip().splitlines()
    assert [set(re.findall(r"[\w.]+", line)) for line in reversed(drawn)] == list(LAYERS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sft", "reward"))])
def test_the_files_of_an_update_are_those_of_a_trace(stage):
    script = runpy.run_path(str(DOCS / "write_architecture.py"))
    shown = script["section"](stage).search(page("architecture"))[2]
    traced = table(script["table"](script["run_trace"](stage)), "file | functions")
    for column, name in ((0, "files"), (3, "descriptions")):
        assert [row[column] for row in table(shown, "file | functions")] == [row[column] for row in traced], (
            f"{name} changed: run docs/write_architecture.py"
        )


def test_readme_names_commands_targets_and_folders_that_are_there():
    text, makefile = text_of(README), text_of(ROOT / "Makefile")
    assert {"sft", "reward", "ppo", "dpo"} <= set(re.findall(r"align(?:/| )([a-z]+)(?:/train\.py)? --config", text))
    assert set(re.findall(r"`align ([a-z]+)", text)) <= set(COMMANDS)
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in re.findall(r"^ {4}make (\w+)", text, re.M))
    folders = re.findall(r"^ {4}(\w+/(?:\w+/)*) ", text, re.M)
    assert len(folders) > 5
    assert [folder for folder in folders if not (ROOT / folder).exists()] == []


def test_examples_of_data_in_readme_are_read(tmp_path):
    rows = [json.loads(line.strip()) for line in text_of(README).splitlines() if line.startswith('    {"')]
    kinds = {"completion": Demonstration, "messages": Demonstration, "responses": Ranking, "chosen": Ranking}
    for row in rows:
        kind = next((kinds[key] for key in row if key in kinds), Prompt)
        (tmp_path / "one.jsonl").write_text(json.dumps(row) + "\n")
        assert len(read_records(str(tmp_path / "one.jsonl"), kind)) == 1
    assert len(rows) == 2
