"""What users get wrong: one line that says what and where, exit code 2, no traceback, and nothing half-written."""

import pytest

from align import cli
from benchmarks.fuzz import fuzz_rows, fuzz_settings
from tests.bad_input.conftest import TINY, write_rows

# ----------------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize(
    ("stage", "key"), [("sft", "train_data"), ("reward", "train_data"), ("ppo", "prompts"), ("sft", "validation_data")]
)
def test_missing_file(stage, key, tmp_path, refused):
    extra = ("--reward_functions", "align.ppo.toy_rewards:brevity") if stage == "ppo" else ()
    line = refused(stage, *TINY, *extra, f"--{key}", tmp_path / "none.jsonl")
    assert line == f"error: {tmp_path}/none.jsonl: no such file or folder; check the path"


@pytest.mark.parametrize(("text", "why"), [("", "the file is empty"), ("\n\n", "has no rows")])
def test_empty_data(text, why, tmp_path, refused):
    path = tmp_path / "empty.jsonl"
    path.write_text(text)
    assert refused("sft", *TINY, "--train_data", path) == f"error: {path}: {why}; write one record per line"


@pytest.mark.parametrize(
    ("row", "field", "why"),
    [
        ({"responses": ["x"], "ranks": [1]}, "responses", "is a list of 1; give from 2 to 9"),
        ({"responses": ["x", "y"], "ranks": [2, 2]}, "ranks", "is a tie of all responses"),
        ({"responses": ["x", "y"], "ranks": [1]}, "ranks", ""),
    ],
    ids=["K=1", "all ties", "a rank is missing"],
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
    extra = ("--reward_functions", "align.ppo.toy_rewards:brevity", "--max_new_tokens", 4) if stage == "ppo" else ()
    key = "--prompts" if stage == "ppo" else "--train_data"
    line = refused(stage, *TINY, *extra, key, path, "--max_prompt_tokens", 4000)
    # "yes" and its end token are 4 tokens, as many as PPO may draw; tiny-gpt2 reads 1024.
    assert line.startswith(f"error: {path}: record row-7: 1518 prompt and 4 response tokens do not fit the model's context")
    assert "1024" in line


# ------------------------------------------------------------------------------------------------------------- settings


def test_no_such_model(refused, demonstrations):
    line = refused("sft", "--model", "./nothing/here", "--log_to", "none", "--train_data", demonstrations)
    assert line.startswith("error: model './nothing/here' is no folder, no hub name and none of the built-in models")


def test_a_file_where_the_run_should_be(tmp_path, demonstrations, capsys):
    for folder in (demonstrations, demonstrations / "deeper" / "run"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["sft", *TINY, "--train_data", str(demonstrations), "--output_dir", str(folder)])
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"error: output_dir {folder}: {demonstrations} is a file, not a folder\n"
    assert demonstrations.is_file()


@pytest.mark.parametrize(("fuzz", "count"), [(fuzz_rows, 400), (fuzz_settings, 60)])
def test_mutated_input_is_accepted_or_refused_where_it_is_wrong(fuzz, count, tmp_path):
    tally = fuzz(count, 1, tmp_path)
    assert tally.findings == []
    assert tally.accepted
    assert tally.refused
