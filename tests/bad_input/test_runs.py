import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from align import cli
from align.core.errors import UserError
from align.training.checkpoint.consolidation import consolidate
from benchmarks.soak import fuzz
from tests.bad_input.conftest import SHORT, TINY, snapshot, write_rows


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    data = write_rows(folder / "r.jsonl", *({"prompt": f"{i}?", "responses": ["x", "y"], "ranks": [1, 2]} for i in range(4)))
    cli.main(["reward", *TINY, "--train_data", str(data), "--output_dir", str(folder / "run")])
    return folder / "run" / "model"


def test_an_existing_run_without_resume(finished, demonstrations, refused):
    line = refused("sft", *TINY, "--train_data", demonstrations, output=finished)
    told = f"error: {finished} already holds a run; set resume_from_checkpoint auto to continue it, or choose another"
    assert line == f"{told} output_dir"


def test_an_existing_run_without_resume_and_without_a_checkpoint(finished, demonstrations, refused, tmp_path):
    run = Path(shutil.copytree(finished, tmp_path / "copy"))
    shutil.rmtree(run / "checkpoints")
    line = refused("sft", *TINY, "--train_data", demonstrations, output=run)
    assert "; set resume_from_checkpoint auto to repeat it, as it left no checkpoint, or choose another" in line


@pytest.mark.parametrize("text", ["", "- a\n- list\n", "just words", "a: [1,", "key: \x00"])
def test_settings_of_a_run_that_cannot_be_read(text, finished, demonstrations, refused, tmp_path):
    run = Path(shutil.copytree(finished, tmp_path / "copy"))
    (run / "config.yaml").write_text(text)
    line = refused("sft", *TINY, "--train_data", demonstrations, "--resume_from_checkpoint", output=run)
    assert line.startswith(f"error: {run}/config.yaml: not the settings of a run")
    with pytest.raises(UserError, match=r"config\.yaml: not the settings of a run"):
        consolidate(run, tmp_path / "out")


def test_an_output_dir_that_is_a_link_to_nowhere(demonstrations, refused, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for folder in (tmp_path / "link", tmp_path / "link" / "run"):
        line = refused("sft", *TINY, "--train_data", demonstrations, output=folder)
        assert line == f"error: output_dir {folder}: {tmp_path}/link is a link to {tmp_path}/gone, which does not exist"


@pytest.mark.parametrize("kind", ["name", "name below a new folder", "path", "path of a file in it"])
def test_an_output_dir_whose_path_is_too_long(kind, demonstrations, tmp_path, command_error):
    place = {"name": "x" * 300, "name below a new folder": "new/" + "x" * 300 + "/run", "path": "/".join(["y" * 200] * 22)}
    room = (4030 - len(str(tmp_path))) // 2  # 4,095 characters are allowed
    folder = tmp_path / place.get(kind, "/".join("z" * room))
    words = ["sft", *TINY, "--train_data", str(demonstrations), "--output_dir", str(folder)]
    assert command_error(cli.main, words) == f"error: output_dir {folder}: File name too long\n"
    assert [path.name for path in tmp_path.iterdir()] == ["demos.jsonl"]


def test_resuming_another_architecture_without_its_settings(finished, demonstrations, refused, tmp_path):
    run = Path(shutil.copytree(finished, tmp_path / "copy"))
    (run / "config.yaml").unlink()
    words = ("--model", "tiny-llama", "--report_to", "none", "--train_data", demonstrations, "--resume_from_checkpoint")
    line = refused("sft", *words, output=run, alone=False)
    assert "the checkpoint belongs to another model or other settings" in line


@pytest.fixture
def resumed(finished, tmp_path):
    """A copy of the finished run, and a function that resumes it with more words."""
    run, data = Path(shutil.copytree(finished, tmp_path / "copy")), finished.parent / "demos.jsonl"
    words = ["sft", *TINY, "--train_data", str(data), "--resume_from_checkpoint", "--output_dir", str(run)]
    return run, lambda *more: cli.main([*words, *more])


def test_other_settings_are_told_on_resume(resumed, capsys):
    run, resume = resumed
    with (run / "config.yaml").open("a") as settings:
        settings.write("responses: teacher\n")  # of an earlier version
    resume("--num_train_epochs", "3")
    changes = "save_steps 0 (was 1), num_train_epochs 3 (was 2), no responses (was teacher), which this version lacks"
    assert f"{run} continues with other settings: {changes}" in " ".join(capsys.readouterr().err.split())
    assert [json.loads(line)["update"] for line in (run / "metrics.jsonl").read_text().splitlines()][-3:] == [1, 2, 3]


def test_a_metrics_line_that_a_kill_cut_short(resumed):
    run, resume = resumed
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole + '{"update": 3, "los')
    resume("--num_train_epochs", "2", "--save_steps", "1")
    assert (run / "metrics.jsonl").read_text() == whole


def test_no_reward_model(finished, prompts, refused, tmp_path):
    for folder in (finished / "model", tmp_path / "none"):
        line = refused("ppo", *TINY, *SHORT, "--prompts", prompts, "--reward_model", folder)
        assert line.startswith(f"error: {folder}: neither a reward model of this package (reward.json is missing), nor")


def test_a_reward_head_of_another_width(reward_model, prompts, refused, tmp_path):
    folder = Path(shutil.copytree(reward_model, tmp_path / "other"))
    save_file({"weight": torch.zeros(1, 32)}, folder / "reward_head.safetensors")
    line = refused("ppo", *TINY, *SHORT, "--prompts", prompts, "--reward_model", folder, alone=False)
    assert line == f"error: {folder}: its head is made for states of width 32, the model's have 64"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module `wrong_rewards` that Python finds."""
    code = "import math\n\ndef short(prompts, responses):\n    return [1.0]\n\n"
    code += "def failing(prompts, responses):\n    return [1 / 0]\n\n"
    code += "def endless(prompts, responses):\n    return [math.inf] * len(responses)\n"
    (tmp_path / "wrong_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("short", "returned 1 scores for 4 responses"),
        ("endless", "gave inf for the response "),
        ("failing", "failed: ZeroDivisionError: division by zero ("),
    ],
)
def test_a_reward_function_with_wrong_scores(function, why, prompts, mine, tmp_path, command_error):
    words = ["ppo", *TINY, *SHORT, "--prompts", str(prompts), "--reward_functions", f"wrong_rewards:{function}"]
    printed = command_error(cli.main, [*words, "--output_dir", str(tmp_path / "run")])
    assert printed.splitlines()[-1].startswith(f"error: reward function '{function}' {why}")
    # The first update did not end: the run's head is there and nothing else, and the same command may be tried again.
    assert set(snapshot(tmp_path / "run")) == {"config.yaml", "environment.json", "unscored.jsonl", ".lock"}


@pytest.mark.parametrize(
    ("stage", "key"), [("sft", "train_data"), ("reward", "train_data"), ("ppo", "prompts"), ("sft", "validation_data")]
)
def test_missing_file(stage, key, tmp_path, refused):
    extra = ("--reward_functions", "align.ppo.toy_rewards:brevity") if stage == "ppo" else ()
    line = refused(stage, *TINY, *extra, f"--{key}", tmp_path / "none.jsonl")
    assert line == f"error: {tmp_path}/none.jsonl: no such file or folder; check the path"


def test_a_bad_row_is_named_by_file_and_line(tmp_path, refused):
    good = {"prompt": "a", "responses": ["x", "y"], "ranks": [1, 2]}
    path = write_rows(tmp_path / "rankings.jsonl", good, {"prompt": "b", "responses": ["x", "y"], "ranks": [0, 1]})
    line = refused("reward", *TINY, "--train_data", path)
    assert line.startswith(f"error: {path}:2: field 'ranks[0]': is 0; use a whole number of 1 or more")


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_a_prompt_beyond_the_model(stage, tmp_path, refused):
    row = {"prompt": "x" * 1500, "id": "row-7"}
    row |= {"sft": {"completion": "yes"}, "reward": {"responses": ["yes", "no"], "ranks": [1, 2]}, "ppo": {}}[stage]
    path = write_rows(tmp_path / "rows.jsonl", row)
    extra = ("--reward_functions", "align.ppo.toy_rewards:brevity", "--max_new_tokens", 4) if stage == "ppo" else ()
    key = "--prompts" if stage == "ppo" else "--train_data"
    line = refused(stage, *TINY, *extra, key, path, "--max_prompt_tokens", 4000)
    # "yes" and its end token are 4 tokens, as many as PPO may draw; tiny-gpt2 reads 1024.
    assert line.startswith(f"error: {path}: record row-7: 1518 prompt and 4 response tokens do not fit the model's context")
    assert "1024" in line


def test_no_such_model(refused, demonstrations):
    line = refused("sft", "--model", "./nothing/here", "--report_to", "none", "--train_data", demonstrations)
    assert line.startswith("error: model './nothing/here' is not a local folder, GGUF")


def test_a_file_where_the_run_should_be(demonstrations, command_error):
    for folder in (demonstrations, demonstrations / "deeper" / "run"):
        words = ["sft", *TINY, "--train_data", str(demonstrations), "--output_dir", str(folder)]
        error = f"error: output_dir {folder}: {demonstrations} is a file, not a folder\n"
        assert command_error(cli.main, words) == error
    assert demonstrations.is_file()


@pytest.mark.parametrize(("kind", "count"), [("rows", 400), ("settings", 60)])
def test_mutated_input_is_accepted_or_refused_where_it_is_wrong(kind, count):
    tally = fuzz(kind, count, 1)
    assert tally["findings"] == []
    assert tally["accepted"]
    assert tally["refused"]
