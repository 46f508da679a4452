import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from align import __version__, cli
from align.cli import stage_configs
from align.core.errors import UserError
from align.core.settings_parser import parse
from align.model_registry.registry import registered_models
from tests.commands.words import words_of
from tests.files import ROOT, read_rows, write_rows


def test_help_has_one_line_for_each_command(capsys):
    cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    printed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert printed == list(cli.COMMANDS)


def test_help_waits_for_no_heavy_import():
    code = "import sys, align.cli; align.cli.main(['--help']); print('HEAVY', sorted({'torch', 'trl', 'transformers', "
    code += "'datasets', 'accelerate', 'deepspeed', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_no_words_show_the_help_and_fail(command_error):
    assert command_error(cli.main, []).startswith("usage: align COMMAND")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rewrad"], "error: unknown command 'rewrad'; did you mean reward?"),
        (["xyz"], "error: unknown command 'xyz'; choose from " + ", ".join(cli.COMMANDS)),
        (
            ["data", "chek", "x"],
            "error: align data: argument check|convert|clean: "
            "invalid choice: 'chek' (choose from 'check', 'convert', 'clean')",
        ),
        (["data", "check"], "error: align data check: the following arguments are required: FILE"),
        (["model"], "error: align model: the following arguments are required: list|fetch|push|merge|consolidate"),
        (["report"], "error: align report: the following arguments are required: RUN"),
        (["ppo", "--ptx.dta", "x"], "error: unknown option --ptx.dta; did you mean --ptx.data?"),
        (["sample"], "error: model is []"),
    ],
)
def test_a_wrong_word_is_one_line(words, line, command_error):
    error = command_error(cli.main, words)
    assert error.startswith(line)
    assert error.count("\n") == 1


def test_version_and_entry_point(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"align {version('align-rlhf')}\n"
    assert version("align-rlhf") == __version__
    (found,) = entry_points(group="console_scripts", name="align")
    assert found.value == "align.cli:main"


def test_data_check(capsys):
    cli.main(["data", "check", str(ROOT / "data" / "rankings.jsonl")])
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    count = len(read_rows(ROOT / "data" / "rankings.jsonl"))
    assert lines["kind"].strip() == "ranking"
    assert lines["records"].strip() == f"{count} from {count} rows"
    cli.main(["data", "check", str(ROOT / "data" / "demonstrations.jsonl"), "--kind", "prompt"])
    assert "kind:                  prompt\n" in capsys.readouterr().out


def test_model_list_and_fetch(capsys):
    cli.main(["model", "list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(registered_models())
    cli.main(["model", "fetch", "tiny-gpt2"])
    assert (Path(capsys.readouterr().out.strip()) / "config.json").is_file()


def test_annotate_without_its_packages_names_the_extra(monkeypatch, command_error):
    monkeypatch.setitem(sys.modules, "annotation_ui.cli", None)  # what an import finds where a package is missing
    assert command_error(cli.main, ["annotate"]).endswith("pip install -c constraints.txt -e '.[ui]'\n")


@dataclass(kw_only=True)
class Two:
    """Settings of a stage that does nothing."""

    first: int = 1
    names: list[str] = field(default_factory=list)


def test_run_stage_reads_the_file_then_the_words_or_those_of_its_own_process(tmp_path, monkeypatch):
    (tmp_path / "two.yaml").write_text("first: 5\nnames: [a, b]\n")
    monkeypatch.setattr(sys, "argv", ["train.py", "--first", "9"])
    seen = []
    cli.run_stage(Two, seen.append, ["--config", str(tmp_path / "two.yaml"), "--first=7"])
    cli.run_stage(Two, seen.append)
    assert seen == [Two(first=7, names=["a", "b"]), Two(first=9)]


@pytest.mark.parametrize(("rank", "prefix"), [(None, ""), ("0", ""), ("3", "[process 3] ")])
@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [(UserError("what\nand where"), 2, "error: what and where"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_run_stage_ends_in_one_line(rank, prefix, raised, code, line, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)

    def stage(config):
        raise raised

    with pytest.raises(SystemExit) as ended:
        cli.run_stage(Two, stage, [])
    assert ended.value.code == code
    assert capsys.readouterr().err == f"{prefix}{line}\n"


def test_run_stage_hides_no_fault_of_the_program():
    def stage(config):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.run_stage(Two, stage, [])


SMALL = words_of(
    model="tiny-gpt2", overlong="truncate", max_prompt_tokens=64, max_response_tokens=32, batch_size=2, report_to="none"
)


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "demonstrations.jsonl"
    write_rows(path, ({"prompt": f"Is {i} odd?", "completion": "Yes."} for i in range(4)))
    return path


def test_command_and_script_do_the_same_and_say_little(tmp_path, demonstrations, monkeypatch, capfd):
    """The script in this process, too: tests of launches start it in its own."""
    monkeypatch.chdir(tmp_path)  # the package must not depend on where it is started
    words = [*SMALL, "--train_data", str(demonstrations)]
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "--output_dir", "script"])
    runpy.run_path(str(ROOT / "align" / "sft" / "train.py"), run_name="__main__")
    script = capfd.readouterr()
    cli.main(["sft", *words, "--output_dir", "command"])
    command = capfd.readouterr()
    assert script.out == command.out == ""
    # The stage, its progress bar, the model's place and the next command: no loading bars, no advice of libraries.
    for folder, printed in (("script", script.err), ("command", command.err)):
        *lines, place, following = printed.splitlines()
        assert lines[0] == "sft: 4 examples to learn from, 0 held out; model tiny-gpt2"
        assert all(line.strip().startswith("sft") for line in lines), lines
        assert f"{folder}/model" in place
        assert f"--model {folder}/model" in following
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("script", "command")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo"])
def test_a_stage_without_settings_names_what_it_needs_and_a_file_that_is_complete(stage, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([stage])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    config = stage_configs()[stage]
    assert config.needs in line
    assert line.endswith(f"align {stage} --config {config.first_run}")
    settings = parse(config, ["--config", str(ROOT / config.first_run)])
    assert settings.model in registered_models(), "a model that is made or downloaded, not one of an earlier stage"
    data = [getattr(settings, name, "") for name in ("train_data", "validation_data", "demonstrations", "prompts")]
    assert all((ROOT / path).is_file() for path in filter(None, data))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo"])
def test_the_file_that_a_launch_without_settings_names_runs_in_a_fresh_clone(stage, tmp_path):
    for name in ("align", "configs", "data"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    variables = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "1", "--cpu"]

    def launch(*words: str) -> "subprocess.CompletedProcess[str]":
        program = [*launcher, *words]
        return subprocess.run(program, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)

    refused = launch(f"align/{stage}/train.py")
    (line,) = (line for line in refused.stderr.splitlines() if line.startswith("error: "))
    assert "from accelerate's launcher; the error is in the line above)" in refused.stderr
    command = line.rpartition("accelerate launch ")[2].split()
    done = launch(*command, "--dtype", "float32")
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(tmp_path.glob("runs/*/*/model/model.safetensors"))
