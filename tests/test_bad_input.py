"""What users get wrong: one line that says what and where, exit code 2, no traceback, and nothing half-written."""

import contextlib
import json
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from align import cli

TINY = ("--model", "tiny-gpt2", "--log_to", "none")
SHORT = ("--updates", "1", "--rollout_size", "4", "--max_new_tokens", "4", "--max_prompt_tokens", "64")


def write_rows(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, whole."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def demonstrations(tmp_path) -> Path:
    return write_rows(tmp_path / "demos.jsonl", *({"prompt": f"Is {i} odd?", "completion": "Yes."} for i in range(4)))


@pytest.fixture
def prompts(tmp_path) -> Path:
    return write_rows(tmp_path / "prompts.jsonl", *({"prompt": f"Is {i} odd?"} for i in range(4)))


@pytest.fixture
def refused(tmp_path, capsys) -> Callable[..., str]:
    """Run a command that must fail; gives its error line. It writes nothing to stdout, and nothing to a new run folder."""

    def of(*words: object, output: Path | None = None, alone: bool = True) -> str:
        folder = output or tmp_path / "run"
        before = snapshot(folder) if output else None
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in (*words, "--output_dir", folder)])
        told = capsys.readouterr()
        assert ended.value.code == 2
        assert told.out == ""
        lines = told.err.splitlines()
        assert [line.startswith("error: ") for line in lines] == [False] * (len(lines) - 1) + [True]
        assert "Traceback" not in told.err
        if alone:
            assert len(lines) == 1, lines
        if output is None:
            assert not folder.exists(), sorted(folder.rglob("*"))
        else:
            assert snapshot(folder) == before
        return lines[-1]

    return of


# ----------------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize(
    ("stage", "key"), [("sft", "train_data"), ("reward", "train_data"), ("ppo", "prompts"), ("sft", "validation_data")]
)
def test_missing_file(stage, key, tmp_path, refused):
    extra = ("--reward_functions", "align.ppo.examples:brevity") if stage == "ppo" else ()
    line = refused(stage, *TINY, *extra, f"--{key}", tmp_path / "none.jsonl")
    assert line == f"error: {tmp_path}/none.jsonl: no such file or folder; check the path"


@pytest.mark.parametrize(("text", "why"), [("", "the file is empty"), ("\n\n", "has no rows")])
def test_empty_data(text, why, tmp_path, refused):
    path = tmp_path / "empty.jsonl"
    path.write_text(text)
    assert refused("sft", *TINY, "--train_data", path) == f"error: {path}: {why}; write one record a line"


@pytest.mark.parametrize(
    ("row", "field", "why"),
    [
        ({"responses": ["x"], "ranks": [1]}, "responses", "is a list of 1; give from 2 to 9"),
        ({"responses": ["x", "y"], "ranks": [2, 2]}, "ranks", "is a tie of all responses"),
        ({"responses": ["x", ""], "ranks": [1, 2]}, "responses[1]", "is empty"),
        ({"responses": ["x", "y"], "ranks": [1]}, "ranks", ""),
    ],
    ids=["K=1", "all ties", "empty response", "a rank is missing"],
)
def test_a_ranking_that_teaches_nothing(row, field, why, tmp_path, refused):
    good = {"prompt": "a", "responses": ["x", "y"], "ranks": [1, 2]}
    path = write_rows(tmp_path / "rankings.jsonl", good, {"prompt": "b", **row})
    line = refused("reward", *TINY, "--train_data", path)
    assert line.startswith(f"error: {path}:2: field '{field}': ")
    assert why in line


def test_empty_completion(tmp_path, refused):
    path = write_rows(tmp_path / "demos.jsonl", {"prompt": "a", "completion": "  "})
    line = refused("sft", *TINY, "--train_data", path)
    assert line == f"error: {path}:1: field 'completion': is empty; write the text, or remove the row"


def test_a_prompt_beyond_the_limit(tmp_path, refused):
    # A token is a byte: "User: " + 1500 + newline + "Assistant: " are 6 + 1500 + 1 + 11 = 1518 tokens.
    path = write_rows(
        tmp_path / "demos.jsonl", {"prompt": "a", "completion": "b"}, {"prompt": "x" * 1500, "completion": "y"}
    )
    line = refused("sft", *TINY, "--train_data", path)
    assert line.startswith(f"error: {path}: record 2: the prompt has 1518 tokens, max_prompt_tokens is 1024; ")


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_a_prompt_beyond_the_model(stage, tmp_path, refused):
    row = {"prompt": "x" * 1500, "id": "row-7"}
    row |= {"sft": {"completion": "yes"}, "reward": {"responses": ["yes", "no"], "ranks": [1, 2]}, "ppo": {}}[stage]
    path = write_rows(tmp_path / "rows.jsonl", row)
    extra = ("--reward_functions", "align.ppo.examples:brevity", "--max_new_tokens", 4) if stage == "ppo" else ()
    key = "--prompts" if stage == "ppo" else "--train_data"
    line = refused(stage, *TINY, *extra, key, path, "--max_prompt_tokens", 4000)
    # "yes" and its end token are 4 tokens, as many as PPO may draw; tiny-gpt2 reads 1024.
    assert line.startswith(f"error: {path}: record row-7: 1518 prompt and 4 response tokens do not fit the model's context")
    assert "1024" in line


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--epochs", "many"), "epochs: invalid int value: 'many'"),
        (("--learning_rate", "-1"), "learning_rate is -1.0, but must be above 0"),
        (("--modle", "x"), "unknown option --modle; did you mean --model?"),
        (("--config", "none.yaml"), "none.yaml: No such file or directory"),
        (("--log_to", "wandbb"), "log_to is ['wandbb'], but must be tensorboard, wandb, trackio or none"),
    ],
)
def test_wrong_settings(words, line, refused):
    assert refused("sft", *TINY, *words) == f"error: {line}"


def test_no_such_model(refused, demonstrations):
    line = refused("sft", "--model", "./nothing/here", "--log_to", "none", "--train_data", demonstrations)
    assert line.startswith("error: model './nothing/here' is no folder, no hub name and none of the builtin models")


def test_a_file_where_the_run_should_be(tmp_path, demonstrations, capsys):
    for folder in (demonstrations, demonstrations / "deeper" / "run"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["sft", *TINY, "--train_data", str(demonstrations), "--output_dir", str(folder)])
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"error: output_dir {folder}: {demonstrations} is a file, not a folder\n"
    assert demonstrations.is_file()


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A fine-tuning run of two updates, with its last checkpoint."""
    folder = tmp_path_factory.mktemp("finished")
    rows = [{"prompt": f"Is {i} odd?", "completion": "Yes."} for i in range(4)]
    data = write_rows(folder / "demos.jsonl", *rows)
    words = ["sft", *TINY, "--train_data", str(data), "--epochs", "2", "--save_every", "1"]
    cli.main([*words, "--output_dir", str(folder / "run")])
    return folder / "run"


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    data = write_rows(folder / "r.jsonl", *({"prompt": f"{i}?", "responses": ["x", "y"], "ranks": [1, 2]} for i in range(4)))
    cli.main(["reward", *TINY, "--train_data", str(data), "--output_dir", str(folder / "run")])
    return folder / "run" / "model"


def test_an_existing_run_without_resume(finished, demonstrations, refused):
    line = refused("sft", *TINY, "--train_data", demonstrations, output=finished)
    assert line == f"error: {finished} already holds a run; set resume to go on with it, or another output_dir"


@pytest.mark.parametrize(
    ("key", "value", "old"),
    [("model", "tiny-llama", "'tiny-gpt2'"), ("lora_rank", "4", "0"), ("optimizer", "adafactor", "")],
)
def test_resuming_another_model(key, value, old, finished, demonstrations, refused):
    line = refused("sft", *TINY, "--train_data", demonstrations, "--resume", f"--{key}", value, output=finished)
    assert line.startswith(f"error: {finished}/config.yaml: this run has {key} {old}")


def test_resuming_another_architecture_without_its_settings(finished, demonstrations, refused, tmp_path):
    run = Path(shutil.copytree(finished, tmp_path / "copy"))
    (run / "config.yaml").unlink()
    words = ("--model", "tiny-llama", "--log_to", "none", "--train_data", demonstrations, "--resume")
    line = refused("sft", *words, output=run, alone=False)
    assert "the checkpoint belongs to another model or other settings" in line


def test_other_settings_are_told_on_resume(finished, tmp_path, capsys):
    run = Path(shutil.copytree(finished, tmp_path / "copy"))
    data = finished.parent / "demos.jsonl"
    cli.main(["sft", *TINY, "--train_data", str(data), "--epochs", "3", "--resume", "--output_dir", str(run)])
    told = capsys.readouterr().err
    assert f"{run} goes on with other settings: save_every 0 (was 1), epochs 3 (was 2)" in told
    assert [json.loads(line)["update"] for line in (run / "metrics.jsonl").read_text().splitlines()][-3:] == [1, 2, 3]


def test_a_metrics_line_that_a_kill_cut_short(finished, tmp_path):
    run = Path(shutil.copytree(finished, tmp_path / "copy"))
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole + '{"update": 3, "los')
    data = finished.parent / "demos.jsonl"
    words = ["--train_data", str(data), "--epochs", "2", "--save_every", "1", "--resume", "--output_dir", str(run)]
    cli.main(["sft", *TINY, *words])
    assert (run / "metrics.jsonl").read_text() == whole


def test_no_reward_model(finished, prompts, refused, tmp_path):
    for folder in (finished / "model", tmp_path / "none"):
        line = refused("ppo", *TINY, *SHORT, "--prompts", prompts, "--reward_model", folder)
        assert line.startswith(f"error: {folder}: not a reward model of this package (reward.json is missing)")


def test_a_reward_head_of_another_width(reward_model, prompts, refused, tmp_path):
    folder = Path(shutil.copytree(reward_model, tmp_path / "other"))
    save_file({"weight": torch.zeros(1, 32)}, folder / "reward_head.safetensors")
    line = refused("ppo", *TINY, *SHORT, "--prompts", prompts, "--reward_model", folder, alone=False)
    assert line == f"error: {folder}: its head reads 32 numbers, the model gives 64"


# ----------------------------------------------------------------------------------------------------- reward functions


@pytest.fixture
def mine(tmp_path, monkeypatch) -> None:
    """A module `wrong_rewards` that Python finds."""
    code = "import math\n\ndef short(prompts, responses):\n    return [1.0]\n\n"
    code += "def endless(prompts, responses):\n    return [math.inf] * len(responses)\n"
    (tmp_path / "wrong_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("wrong_rewards:absent", "module 'wrong_rewards' has no attribute 'absent'"),
        ("wrong_rewards", "module 'wrong_rewards' has no attribute ''"),
        ("wrong_rewards:short=much", "could not convert string to float: 'much'"),
    ],
)
def test_a_reward_function_that_is_not_there(function, why, prompts, refused, mine):
    line = refused("ppo", *TINY, *SHORT, "--prompts", prompts, "--reward_functions", function)
    assert line == f"error: reward function '{function}': {why}; write module:function or module:function=weight"


@pytest.mark.parametrize(
    ("function", "why"), [("short", "gave 1 scores for 4 responses"), ("endless", "gave inf for the response ")]
)
def test_a_reward_function_with_wrong_scores(function, why, prompts, mine, tmp_path, capsys):
    words = ["ppo", *TINY, *SHORT, "--prompts", str(prompts), "--reward_functions", f"wrong_rewards:{function}"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--output_dir", str(tmp_path / "run")])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.splitlines()[-1].startswith(f"error: reward function '{function}' {why}")
    assert "Traceback" not in told
    # The first update did not end: the run's head is there and nothing else, and the same command may be tried again.
    assert set(snapshot(tmp_path / "run")) == {"config.yaml", "environment.json"}


# ------------------------------------------------------------------------------------------------------------ full disk


@dataclass
class Disk:
    """A place where files stop growing, until `enlarge` is called."""

    folder: Path
    enlarge: Callable[[], None]


def mounted(size: str) -> bool:
    """Try a small file system in memory; containers often forbid it."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
        return done.returncode == 0 and subprocess.run(["umount", folder]).returncode == 0


# The limit on a file's size works everywhere and gives "File too large"; a full file system is the real thing.
KINDS = ["file size"] + (["file system"] if shutil.which("mount") and mounted("64k") else [])


@pytest.fixture(params=KINDS)
def small_disk(request, tmp_path):
    """`small_disk(kilobytes)`: writing beyond that fails as it does on a full disk."""
    undo = contextlib.ExitStack()

    def of(kilobytes: int) -> Disk:
        folder = tmp_path / "disk"
        folder.mkdir()
        if request.param == "file system":
            mount = ["mount", "-t", "tmpfs", "-o"]
            subprocess.run([*mount, f"size={kilobytes}k", "tmpfs", str(folder)], check=True)
            undo.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
            return Disk(folder, lambda: subprocess.run([*mount, "remount,size=64m", str(folder)], check=True) and None)
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        undo.callback(resource.setrlimit, resource.RLIMIT_FSIZE, old)
        resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, old[1]))
        return Disk(folder, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, old))

    with undo:
        yield of


def fails(words: list[str], capsys) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert "Traceback" not in told
    assert told.splitlines()[-1].startswith("error: ")
    return told.splitlines()[-1]


# tiny-gpt2 in float32 has 300 kB: 120 kB are less than the model, 600 kB less than a checkpoint with Adam's moments.
@pytest.mark.parametrize("kilobytes", [120, 600])
def test_a_full_disk(kilobytes, small_disk, finished, capsys):
    """The line names what was being written; no file is cut off; with room again, `--resume` ends as if nothing happened."""
    disk = small_disk(kilobytes)
    run = disk.folder / "run"
    data = str(finished.parent / "demos.jsonl")
    words = ["sft", *TINY, "--train_data", data, "--epochs", "2", "--save_every", "1", "--output_dir", str(run)]
    line = fails(words, capsys)
    place = run / ("model" if kilobytes == 120 else "checkpoints/update-000001")
    assert line.startswith(f"error: {place}: cannot be written (")
    assert line.endswith("nothing was changed there")
    left = snapshot(run)
    assert not place.exists()
    assert not [name for name in left if "/." in name or name.startswith(".")], "temporary files were left"
    for name in left:
        if name.endswith(".jsonl"):
            assert all(json.loads(row) for row in left[name].decode().splitlines())
        if name.endswith(".safetensors"):
            assert load_file(run / name)
    disk.enlarge()
    cli.main([*words, "--resume"])
    ours, theirs = load_file(run / "model" / "model.safetensors"), load_file(finished / "model" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_disk_that_fills_up_under_the_metrics(small_disk, finished, capsys):
    """With TensorBoard too, whose writer works in a thread: the lines that are there are whole."""
    disk = small_disk(40)
    data = str(finished.parent / "demos.jsonl")
    # No model fits 40 kB, so the run must end before its first one: it is at the end of an epoch of 4 updates.
    words = ["sft", "--model", "tiny-gpt2", "--train_data", data, "--batch_size", "1", "--evaluate_every", "1000000"]
    words += ["--epochs", "2000", "--output_dir", str(disk.folder / "run")]
    line = fails(words, capsys)
    assert str(disk.folder / "run") in line
    rows = (disk.folder / "run" / "metrics.jsonl").read_text().splitlines()
    updates = [json.loads(row)["update"] for row in rows]
    assert updates == list(range(updates[0], updates[0] + len(rows)))
    assert len(rows) > 20
