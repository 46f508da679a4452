"""A reward model that several tests score with."""

import pytest

from align import cli
from tests.files import ROOT, read_rows, write_rows


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory):
    """A reward model on the tiny Llama, trained for one update."""
    folder = tmp_path_factory.mktemp("reward")
    rows = write_rows(folder / "rankings.jsonl", read_rows(ROOT / "data" / "rankings_heldout.jsonl")[:4])
    words = ["--model", "tiny-llama", "--train_data", rows, "--output_dir", str(folder / "run"), "--report_to", "none"]
    words += ["--overlong", "truncate", "--max_prompt_tokens", "64", "--max_response_tokens", "64", "--dtype", "float32"]
    cli.main(["reward", *words])
    return str(folder / "run" / "model")
