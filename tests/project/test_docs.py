"""What docs/ says is held against the code: every metric, setting, function, data example, error and launch file in it."""

import ast
import contextlib
import dataclasses
import json
import re
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest
import yaml

from align.commands.stage_configs import STAGE_CONFIGS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ("metrics", "details", "data", "clusters", "evaluation")
STAGES = {
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "rules": "Rule model",
    "attributes": "Attribute model",
    "ppo": "PPO",
    "dpo": "DPO",
    "distill": "Distillation",
}


def page(name):
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def section(text, title):
    """The text from a heading of the second level to the next."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S).group(1)


def table(text, first):
    """The rows of the table whose first column is headed `first`, each as a list of cells."""
    body = re.search(rf"^\| {first} \|.*\n\| ---.*\n((?:\|.*\n?)*)", text, re.M).group(1)
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in body.splitlines()]


def code_in(text):
    """What stands in `code` spans."""
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("name", PAGES)
def test_lines_are_short_and_table_rows_are_whole(name):
    width = None
    for number, line in enumerate(page(name).splitlines(), 1):
        assert len(line) <= 125, f"docs/{name}.md:{number}"
        cells = line.count(" | ") if line.startswith("|") else None
        assert cells is None or width in (None, cells), f"docs/{name}.md:{number} has another number of cells"
        width = cells


@pytest.mark.parametrize("path", [*(DOCS / f"{name}.md" for name in PAGES), ROOT / "README.md"], ids=lambda path: path.stem)
def test_files_that_are_named_exist(path):
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"\b((?:align|configs|docs|data|tests)/[\w./-]*\w\.(?:py|yaml|json|jsonl|md))\b", text)
    missing = {name for name in named if not (ROOT / name).exists()}
    assert not missing
    assert all((path.parent / link).exists() for link in re.findall(r"\]\((?!https?:)([^)#]+)", text))


# ------------------------------------------------------------------------------------------------------ docs/metrics.md


def write_data(folder):
    """Small data of every kind; the path of each file by its kind."""
    verdicts = (("Yo", "violates"), ("I am 7.", "follows"))
    rows = {
        "judgments": [
            {"prompt": f"{n}?", "response": text, "rule": rule, "verdict": verdict}
            for n in range(4)
            for text, verdict in verdicts
            for rule in ("no-digits", "no-exclamation-marks")
        ],
        "ratings": [
            {"prompt": f"{n}?", "response": text, "attributes": {"polite": n % 2, "rating": 1 + n}}
            for n in range(4)
            for text in ("Yo", "I am 7.")
        ],
        "demonstrations": [{"prompt": "Hi", "completion": "Yo"}, {"prompt": "Count.", "completion": "1 2 3"}],
        # Ranks 1 and 3 apart too, so that more than one distance is written.
        "rankings": [{"prompt": f"{n}?", "responses": ["a", "bb", "c c"], "ranks": [1, 2, 3]} for n in range(2)],
        "prompts": [{"prompt": "Hi"}, {"prompt": "Count."}],
    }
    data = {name: folder / f"{name}.jsonl" for name in rows}
    for name, path in data.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    return {name: str(path) for name, path in data.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, serve):
    """The folders of two updates of each stage on tiny-llama, with everything on that writes a metric."""
    from align.attributes import run_attribute_model
    from align.distill import run_distill
    from align.dpo import run_dpo
    from align.ppo import run_ppo
    from align.reward import run_reward
    from align.rules import run_rule_model
    from align.sft import run_sft

    root = tmp_path_factory.mktemp("docs")
    data = write_data(root)
    config = {
        stage: partial(made, dtype="float32", log_to=["none"], save_every=1, output_dir=str(root / stage))
        for stage, made in STAGE_CONFIGS.items()
    }
    demonstrations, rankings = data["demonstrations"], data["rankings"]
    learned = {"train_data": demonstrations, "validation_data": demonstrations, "batch_size": 1}
    start = str(run_sft(config["sft"](model="tiny-llama", **learned)))
    run_distill(config["distill"](model=start, student_share=0.5, **learned))
    learned = {"train_data": rankings, "validation_data": rankings, "batch_size": 1}
    terms = {"demonstrations": demonstrations, "centering_weight": 0.01, "lm_loss_weight": 0.5}
    scorer = str(run_reward(config["reward"](model=start, **terms, **learned)))
    run_dpo(config["dpo"](model=start, **learned))
    rated = {"train_data": data["ratings"], "validation_data": data["ratings"], "batch_size": 4}
    run_attribute_model(config["attributes"](model=start, form="generative", **rated))
    judged = {"rules": ["configs/rules/plain-style.yaml"], "held_out_rules": ["no-exclamation-marks"]}
    judge = run_rule_model(
        config["rules"](model=start, train_data=data["judgments"], held_out_share=0.5, batch_size=2, **judged)
    )
    ppo = config["ppo"](
        model=start,
        reward_models=[scorer, scorer],
        judge_model=scorer,
        rule_model=str(judge),
        rule_budgets=["0.1"],
        kl_penalty="k3",
        entropy_weight=0.01,
        reward_functions=["align.ppo.examples:share_of_e"],
        prompts=data["prompts"],
        validation_prompts=data["prompts"],
        ptx_data=demonstrations,
        updates=2,
        rollout_size=4,
        max_new_tokens=4,
        missing_eos="keep",
        evaluate_every=1,
        keep_policies=True,
        engine="vllm-server",
        importance_cap=2.0,
        reference_refresh=1,
        vllm_url=serve(start).url,
    )
    run_ppo(ppo)
    return {stage: root / stage for stage in STAGES}


def defined(stage):
    """The names that the page defines for a stage: those of all stages and its own."""
    text = page("metrics")
    rows = table(section(text, "All stages"), "name") + table(section(text, STAGES[stage]), "name")
    return [code_in(row[0])[0] for row in rows]


def written(folder):
    """The names in the lines of metrics.jsonl."""
    return {name for line in (folder / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}


@pytest.mark.parametrize("stage", STAGES)
def test_every_metric_is_defined_and_every_definition_is_of_a_metric(runs, stage):
    names, seen = defined(stage), written(runs[stage])
    assert len(names) == len(set(names))
    exact = {name for name in names if "*" not in name and "<" not in name}
    patterns = {name: re.sub("<[a-z]+>", "*", name) for name in names if name not in exact}
    others = [name for name in seen if name not in exact]
    undefined = [name for name in others if not any(fnmatch(name, pattern) for pattern in patterns.values())]
    assert not undefined
    assert exact <= seen
    assert all(any(fnmatch(name, pattern) for name in others) for pattern in patterns.values())


@pytest.mark.parametrize("title", ["All stages", *STAGES.values()])
def test_a_unit_and_a_formula_for_each_and_advice_on_known_names_alone(title):
    text = section(page("metrics"), title)
    rows = table(text, "name")
    assert all(len(row) == 3 and all(row) for row in rows)
    names = {code_in(row[0])[0] for row in rows}
    advised = [name for row in table(text, "how to read it") for name in code_in(row[0])]
    assert set(advised) <= names


@pytest.mark.parametrize("stage", STAGES)
def test_the_files_of_a_run_folder(runs, stage):
    listed = {}
    for name, stages, _ in table(section(page("metrics"), "Files of a run folder"), "file"):
        if stages == "all" or stage in stages.split(", "):
            listed |= {code.rstrip("/"): code.endswith("/") for code in code_in(name)}
    found = {path.name: path.is_dir() for path in runs[stage].iterdir()}
    assert found.items() <= listed.items()
    # Nothing broke, and nobody asked for a report.
    assert listed.keys() - found.keys() - {"unscored.jsonl", "unfinished.jsonl"} == {"broken-batch-N.json", "report.html"}
    checkpoint = runs[stage] / "checkpoints" / "update-000002"
    assert sorted(path.name for path in checkpoint.parent.iterdir())[-1] == checkpoint.name
    files = {"checksums.json", "state.safetensors", "trainer.json"}
    assert {path.name for path in checkpoint.iterdir()} == files | ({"reference.safetensors"} if stage == "ppo" else set())


# ------------------------------------------------------------------------------------------------------ docs/details.md


def names_in(path):
    """Functions, classes, `Class.method`s and constants of a Python file."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{item.name}" for item in ast.walk(node) if isinstance(item, ast.FunctionDef)}
    return found


def test_each_detail_has_a_source_and_a_function_that_exists():
    places = re.findall(r"`(align/[\w/]+\.py): ([\w.]+)`", page("details"))
    assert not [f"{path}: {name}" for path, name in places if name not in names_in(ROOT / path)]
    details = re.findall(r"^\*\*.*?(?=^\*\*|^## |\Z)", page("details"), re.M | re.S)
    assert len(details) > 20
    for detail in details:
        assert re.search(r"^- source: .*^- done by: `align/[^`]+: ", detail, re.M | re.S), detail.splitlines()[0]


def test_each_setting_that_is_named_has_that_default():
    classes = STAGE_CONFIGS
    settings = re.findall(r"`(sft|reward|ppo|dpo|distill)\.(\w+): ([^`]+)`", page("details"))
    assert len(settings) > 20
    for stage, key, value in settings:
        default = {item.name: item.default for item in dataclasses.fields(classes[stage])}[key]
        said = yaml.safe_load(value)
        # YAML reads 1e-05 as text.
        assert (float(said) if isinstance(default, float) else said) == default, f"{stage}.{key}"


# --------------------------------------------------------------------------------------------------------- docs/data.md


def examples():
    """Each example of docs/data.md: its rows, and the kinds of record that the line after it promises."""
    found = []
    for style, block, kinds in re.findall(r"```(jsonl?)\n(.*?)```\n\nRead as: ([a-z, ]+)\.\n", page("data"), re.S):
        rows = [json.loads(line) for line in block.splitlines()] if style == "jsonl" else [json.loads(block)]
        found.append((rows, kinds.split(", ")))
    return found


@pytest.mark.parametrize(("rows", "kinds"), examples(), ids=[str(n) for n in range(len(examples()))])
def test_each_example_is_read_as_what_it_promises(rows, kinds, tmp_path):
    from align.data import KINDS, read_records
    from align.errors import UserError

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    readable = []
    for name, kind in KINDS.items():
        with contextlib.suppress(UserError):
            records = read_records(path, kind)
            assert len(records) == len(rows)
            readable.append(name)
    assert sorted(readable) == sorted(kinds)


def test_every_layout_has_an_example():
    from align.data import FORMATS, KINDS
    from align.data.formats import find_format

    assert len(examples()) == len(re.findall("^```jsonl?$", page("data"), re.M))
    shown = {
        (found.name, name)
        for rows, kinds in examples()
        for row in rows
        for name in kinds
        if (found := find_format(row, KINDS[name])) is not None
    }
    names = {kind: name for name, kind in KINDS.items()}
    # OpenAssistant's flat list is known only to be refused.
    expected = {(known.name, names[known.kind]) for known in FORMATS if known.name != "OpenAssistant messages"}
    assert shown == expected


def test_each_error_is_the_one_that_its_row_causes(tmp_path):
    from align.data import Ranking, read_records
    from align.errors import UserError

    lines = re.search(r"```text\n(.*?)```", page("data"), re.S).group(1).splitlines()
    assert len(lines) >= 10
    path = tmp_path / "rows.jsonl"
    for row, message in zip(lines[::2], lines[1::2], strict=True):
        path.write_text(row + "\n", encoding="utf-8")
        with pytest.raises(UserError) as error:
            read_records(path, Ranking)
        assert str(error.value).replace(str(path), "FILE") == message


def test_data_check_says_what_the_page_shows(tmp_path, monkeypatch):
    from align.data import check_data

    text = page("data")
    rankings = re.search(r"## Rankings.*?```jsonl\n(.*?)```", text, re.S).group(1)
    bad = next(code for code in code_in(section(text, "What is in a file")) if code.startswith("{"))
    monkeypatch.chdir(tmp_path)
    Path("rankings.jsonl").write_text(rankings + bad + "\n", encoding="utf-8")
    shown = re.search(r"```check\n(.*?)\n```", text, re.S).group(1)
    assert check_data("rankings.jsonl") == shown


# ----------------------------------------------------------------------------------------------------- docs/clusters.md


def test_every_launch_file_is_in_the_table_with_its_deepspeed_file():
    rows = table(page("clusters"), "set-up \\| file in configs/accelerate/")
    listed = {code_in(row[1])[0]: (code_in(row[2]) or [None])[0] for row in rows}
    found = {}
    for path in (ROOT / "configs" / "accelerate").iterdir():
        settings = yaml.safe_load(path.read_text())
        file = settings.get("deepspeed_config", {}).get("deepspeed_config_file")
        found[path.name] = Path(file).name if file else None
    assert listed == found


def test_the_launch_commands_are_taken():
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    from align.settings import parse

    text = "\n".join([page("clusters"), page("howto/cluster"), (ROOT / "README.md").read_text(encoding="utf-8")])
    joined = re.sub(r" \\\n +", " ", text)  # lines that end in a backslash go on
    launched = [line.split() for line in re.findall(r"^ *(?:[A-Z_]+=\S* )?accelerate launch (.*)$", joined, re.M)]
    assert len(launched) >= 10
    with contextlib.chdir(ROOT):
        for words in launched:
            given = _validate_launch_command(launch_command_parser().parse_args(words))[0]
            stage = Path(given.training_script).parent.name
            assert Path(given.training_script).exists()
            parse(STAGE_CONFIGS[stage], given.training_script_args)
