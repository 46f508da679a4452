"""The command line: what each word does, how mistakes are told, and that a run is the same however it is started."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from align import __version__, cli
from align.builtin.zoo import list_builtin
from align.commands.sample import score
from align.data import Prompt
from align.errors import UserError
from align.examples import EncodedPrompt
from align.models.loading import load
from align.reward.checkpoint import load_reward_model
from align.settings import ModelConfig
from align.tensor_ops import Padded

ROOT = Path(__file__).resolve().parents[2]
ALIGN = [sys.executable, "-m", "align.cli"]


def words_of(**settings) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ------------------------------------------------------------------------------------------------------------ the words


def test_the_installed_command_is_this_one():
    (found,) = entry_points(group="console_scripts", name="align")
    assert found.value == "align.cli:main"


def test_help_has_one_line_for_each_command(capsys):
    cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    told = [line.split()[0] for line in lines if line.startswith("  ")]
    assert told == list(cli.COMMANDS)
    assert told == [
        "sft",
        "reward",
        "rules",
        "attributes",
        "ppo",
        "dpo",
        "launch",
        "sample",
        "loop",
        "plan",
        "serve-reward",
        "demo",
        "eval",
        "replay",
        "report",
        "data",
        "model",
        "annotate",
    ]


def test_help_waits_for_no_heavy_import():
    code = "import sys, align.cli; align.cli.main(['--help']); print('HEAVY', sorted({'torch', 'trl', 'transformers', "
    code += "'datasets', 'accelerate', 'deepspeed', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_version(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"align {version('align-rlhf')}\n"
    assert version("align-rlhf") == __version__


def test_no_words_show_the_help_and_fail(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: align COMMAND")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rewrad"], "error: unknown command 'rewrad'; did you mean reward?"),
        (["xyz"], "error: unknown command 'xyz'; use one of " + ", ".join(cli.COMMANDS)),
        (
            ["data", "chek", "x"],
            "error: align data: argument check|clean: invalid choice: 'chek' (choose from 'check', 'clean')",
        ),
        (["data", "check"], "error: align data check: the following arguments are required: FILE"),
        (["model"], "error: align model: the following arguments are required: list|fetch|consolidate"),
        (["report"], "error: align report: the following arguments are required: RUN"),
        (["ppo", "--kl_bta", "0.1"], "error: unknown option --kl_bta; did you mean --kl_beta?"),
        (["sample"], "error: model is '', but must be given"),
    ],
)
def test_a_wrong_word_is_one_line(words, line, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == line + "\n"


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo", "dpo", "sample"])
def test_stage_help_names_the_program_and_explains_a_default(stage, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([stage, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert text.startswith(f"usage: align {stage} ")
    assert "--seed SEED seed of all random numbers; the same seed gives the same" in text
    assert "(default: 0)" in text


def test_data_check(capsys):
    cli.main(["data", "check", str(ROOT / "data" / "rankings.jsonl")])
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    count = len(rows_of(ROOT / "data" / "rankings.jsonl"))
    assert lines["kind"].strip() == "ranking"
    assert lines["records"].strip() == f"{count} from {count} rows"


def test_data_check_takes_a_kind(capsys):
    cli.main(["data", "check", str(ROOT / "data" / "demonstrations.jsonl"), "--kind", "prompt"])
    assert "kind:                  prompt\n" in capsys.readouterr().out


def test_model_list_and_fetch(capsys):
    cli.main(["model", "list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(list_builtin())
    cli.main(["model", "fetch", "tiny-gpt2"])
    assert (Path(capsys.readouterr().out.strip()) / "config.json").is_file()


def test_annotate_without_its_packages_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "annotation_ui.cli", None)  # what an import finds where a package is missing
    with pytest.raises(SystemExit) as ended:
        cli.main(["annotate"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("install the extra: pip install 'align-rlhf[ui]'\n")


# ------------------------------------------------------------------------------------------------------------ run_stage


@dataclass(kw_only=True)
class Two:
    """Settings of a stage that does nothing."""

    first: int = 1
    names: list[str] = field(default_factory=list)


def test_run_stage_reads_the_file_then_the_words(tmp_path):
    (tmp_path / "two.yaml").write_text("first: 5\nnames: [a, b]\n")
    seen = []
    cli.run_stage(Two, seen.append, ["--config", str(tmp_path / "two.yaml"), "--first=7"])
    assert seen == [Two(first=7, names=["a", "b"])]


def test_run_stage_reads_its_own_process_without_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--first", "9"])
    seen = []
    cli.run_stage(Two, seen.append)
    assert seen[0].first == 9


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


# ----------------------------------------------------------------------------------------------------- real processes


SMALL = words_of(
    model="tiny-gpt2", overlong="truncate", max_prompt_tokens=64, max_response_tokens=32, batch_size=2, log_to="none"
)


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "demonstrations.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Is {i} odd?", "completion": "Yes."}) + "\n" for i in range(4)))
    return path


@pytest.mark.slow
def test_command_and_script_do_the_same_and_say_little(tmp_path, demonstrations, monkeypatch, capfd):
    """The script in a process of its own, the command in this one; `test_control_c_is_one_line` starts the command."""
    monkeypatch.chdir(tmp_path)  # the package must not depend on where it is started
    words = [*SMALL, "--train_data", str(demonstrations)]
    script = [sys.executable, str(ROOT / "align" / "sft" / "train.py"), *words, "--output_dir", "script"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cli.main(["sft", *words, "--output_dir", "command"])
    told = capfd.readouterr()
    assert done.stdout == told.out == ""
    # The line of the stage and its progress bar: no loading bars, no advice of libraries.
    for lines in (done.stderr.splitlines(), told.err.splitlines()):
        assert lines[0] == "sft: 4 examples to learn from, 0 held out; model tiny-gpt2"
        assert all(line.strip().startswith("sft") for line in lines), lines
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("script", "command")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_control_c_is_one_line(tmp_path, demonstrations):
    run = tmp_path / "run"
    words = [*SMALL, "--train_data", str(demonstrations), "--epochs", "100000", "--output_dir", str(run)]
    process = subprocess.Popen(
        [*ALIGN, "sft", *words],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs inherit it ignored
    )
    try:
        metrics, deadline = run / "metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 75  # asked to stop: saved, to be resumed
    assert "--resume" in told.splitlines()[-1]
    assert "Traceback" not in told


# --------------------------------------------------------------------------------------------------------------- sample


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "?"}]
    rows = [{"prompt": "What is rain?", "id": "p1", "category": "truth"}, {"prompt": talk}, {"prompt": "A longer one. " * 5}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    rows = [{"prompt": f"{i}?", "responses": ["yes", "no", "what"], "ranks": [1, 2, 2]} for i in range(8)]
    (folder / "rankings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = words_of(model="tiny-gpt2", train_data=folder / "rankings.jsonl", output_dir=folder / "run", log_to="none")
    cli.main(["reward", *settings, "--demonstrations", str(ROOT / "data" / "demonstrations_heldout.jsonl")])
    return folder / "run" / "model"


def sampled(tmp_path, prompts, name="out", **settings) -> list[dict]:
    output = tmp_path / f"{name}.jsonl"
    given = {"model": "tiny-gpt2", "max_new_tokens": 12, "dtype": "float32"} | settings
    cli.main(["sample", *words_of(prompts=prompts, output=output, **given)])
    return rows_of(output)


def test_sample_writes_rows_for_the_labeling_app(tmp_path, prompts):
    rows = sampled(tmp_path, prompts)
    source = rows_of(prompts)
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in source]
    assert [row["id"] for row in rows] == ["p1", "2", "3"]
    assert [row.get("category") for row in rows] == ["truth", None, None]
    for row in rows:
        assert row["model"] == ["tiny-gpt2"]
        assert len(row["responses"]) == 1
        assert isinstance(row["responses"][0], str)
        assert "rewards" not in row


def test_samples_depend_on_the_seed_alone(tmp_path, prompts):
    first = sampled(tmp_path, prompts, "a", samples_per_prompt=3)
    assert first == sampled(tmp_path, prompts, "b", samples_per_prompt=3, batch_tokens=40)
    other = sampled(tmp_path, prompts, "c", samples_per_prompt=3, seed=1)
    assert all(set(a["responses"]).isdisjoint(b["responses"]) for a, b in zip(first, other, strict=True))
    assert all(len(set(row["responses"])) == 3 for row in first)


def test_samples_at_temperature_0_are_alike(tmp_path, prompts):
    rows = sampled(tmp_path, prompts, samples_per_prompt=3, temperature=0)
    assert all(len(set(row["responses"])) == 1 for row in rows)
    # Truncation to the likeliest token is the same thing.
    assert rows == sampled(tmp_path, prompts, "k", samples_per_prompt=3, top_k=1)


def test_best_of_keeps_the_best_of_what_it_would_have_drawn(tmp_path, prompts, reward_folder):
    every = sampled(tmp_path, prompts, "all", samples_per_prompt=6, reward_model=reward_folder)
    best = sampled(tmp_path, prompts, "best", samples_per_prompt=2, best_of=3, reward_model=reward_folder)
    for drawn, kept in zip(every, best, strict=True):
        for number, group in enumerate((range(3), range(3, 6))):
            winner = max(group, key=lambda i: drawn["rewards"][i])
            assert kept["responses"][number] == drawn["responses"][winner]
            assert kept["rewards"][number] == pytest.approx(drawn["rewards"][winner], abs=1e-5)
        assert len(set(drawn["rewards"])) == 6


@pytest.mark.parametrize("policy", ["tiny-gpt2", "tiny-t5"])
def test_scores_are_those_of_one_row_at_a_time(policy, reward_folder):
    """tiny-t5 has the reward model's vocabulary, but ends its prompts with an id of its own: texts go over instead."""
    loaded = load(ModelConfig(model=policy), torch.float32)
    reward = load_reward_model(str(reward_folder), "float32")
    theirs = reward.loaded.tokenization
    texts = ["fine", "a rather longer response", "no"]
    records = [Prompt.from_row({"prompt": text}) for text in ("x", "What is that over there?", "y" * 30)]
    drawn = [EncodedPrompt(record.prompt, loaded.tokenization.prompt_ids(record.prompt)) for record in records]
    responses = [loaded.tokenization.response_ids(text) for text in texts]
    rewards = score(loaded, reward, drawn, responses, texts, batch_tokens=100)
    assert reward.mean != 0.0
    for record, text, value in zip(records, texts, rewards, strict=True):
        prompt = Padded.from_lists([theirs.prompt_ids(record.prompt)])
        with torch.no_grad():
            alone = reward.model(prompt, Padded.from_lists([theirs.response_ids(text)])).item() - reward.mean
        assert value == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"best_of": 2},
            "error: best_of is 2, but must be 1, unless reward_model, rule_model, rubrics or attribute_model is given",
        ),
        ({"top_p": 0}, "error: top_p is 0.0, but must be above 0 and at most 1"),
        ({"max_new_tokens": 1020}, "do not fit the model's context of 1024"),
        ({"max_prompt_tokens": 20}, "max_prompt_tokens is 20"),
        ({"reward_model": "nowhere"}, "error: nowhere: neither a reward model of this package"),
    ],
)
def test_sample_refuses(settings, told, tmp_path, prompts, capsys):
    with pytest.raises(SystemExit) as ended:
        sampled(tmp_path, prompts, **settings)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_sample_overwrites_nothing(tmp_path, prompts, capsys):
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(SystemExit):
        sampled(tmp_path, prompts)
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == "precious"
