"""What users get wrong: one line that says what and where, exit code 2, no traceback, and nothing half-written."""

import pytest

from align import cli
from benchmarks.fuzz import fuzz_rows, fuzz_settings
from tests.bad_input.conftest import TINY, write_rows


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
    assert line.startswith("error: model './nothing/here' is no folder, no hub name and none of the built-in models")


def test_a_file_where_the_run_should_be(demonstrations, command_error):
    for folder in (demonstrations, demonstrations / "deeper" / "run"):
        words = ["sft", *TINY, "--train_data", str(demonstrations), "--output_dir", str(folder)]
        error = f"error: output_dir {folder}: {demonstrations} is a file, not a folder\n"
        assert command_error(cli.main, words) == error
    assert demonstrations.is_file()


@pytest.mark.parametrize(("fuzz", "count"), [(fuzz_rows, 400), (fuzz_settings, 60)])
def test_mutated_input_is_accepted_or_refused_where_it_is_wrong(fuzz, count, tmp_path):
    tally = fuzz(count, 1, tmp_path)
    assert tally.findings == []
    assert tally.accepted
    assert tally.refused
