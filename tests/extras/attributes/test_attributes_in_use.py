"""What an attribute model says decides which candidate is written, and is a reward of PPO by the same expression."""

import json

import pytest

from align import cli
from align.extras.attributes import AttributeConfig, AttributeTrainer

from .test_attribute_models import planted

TINY = ["--model", "tiny-llama", "--dtype", "float32", "--max_new_tokens", "6"]


@pytest.fixture(scope="module", params=["heads", "generative"])
def judge(tmp_path_factory, align_cache, request):
    """A model of either form with the attributes `unsafe` and `rating`; how good it is does not matter here."""
    folder, form = tmp_path_factory.mktemp("attributes"), request.param
    config = AttributeConfig(output_dir=str(folder), report_to=["none"], dtype="float32", learning_rate=3e-3, form=form)
    return str(AttributeTrainer("tiny-llama", planted(24), config).train())


def sampled(folder, judge, name, *more):
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "Question {n}?"}}\n' for n in range(4)))
    output = folder / f"{name}.jsonl"
    words = ["--prompts", str(folder / "prompts.jsonl"), "--output", str(output), "--attributes.model", judge, *more]
    cli.main(["sample", *TINY, *words])
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_candidates_are_filtered_and_ranked(judge, tmp_path):
    every = sampled(tmp_path, judge, "all", "--samples_per_prompt", "4")
    best = sampled(tmp_path, judge, "best", "--best_of", "4", "--attributes.rank", "rating-unsafe")
    for row, kept in zip(every, best, strict=True):
        worth = [rating - unsafe for rating, unsafe in zip(*map(row["attributes"].get, ("rating", "unsafe")), strict=True)]
        assert kept["responses"] == [row["responses"][worth.index(max(worth))]]
        assert set(kept["attributes"]) == {"rating", "unsafe"}
    middle = sorted(value for row in every for value in row["attributes"]["unsafe"])[8]
    passed = sampled(
        tmp_path, judge, "passed", "--best_of", "4", "--attributes.rank", "rating", "--attributes.filter", f"unsafe<{middle}"
    )
    assert all(row["attributes"]["unsafe"][0] < middle for row in passed)


def test_where_nothing_is_left_the_fallback_that_was_declared_is_written(judge, tmp_path, capsys):
    words = ["--best_of", "2", "--attributes.filter", "unsafe<0"]
    assert sampled(tmp_path, judge, "none", *words) == []
    assert "4 prompts left out by the filter" in capsys.readouterr().err
    rows = sampled(tmp_path, judge, "fallback", *words, "--fallback", "I'd rather not say.")
    assert [(row["responses"], row["model"]) for row in rows] == [(["I'd rather not say."], ["fallback"])] * 4
    assert "attributes" not in rows[0]


def test_the_same_expression_is_a_reward(judge, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n')
    words = [*TINY, "--prompts", str(tmp_path / "prompts.jsonl"), "--attributes.model", judge, "--report_to", "none"]
    words += [
        "--output_dir",
        str(tmp_path / "ppo"),
        "--total_updates",
        "1",
        "--rollout_batch_size",
        "4",
        "--missing_eos_score",
        "none",
    ]
    cli.main(["ppo", *words, "--attributes.reward", "2*rating-unsafe"])
    (line,) = (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["reward/attributes"] == pytest.approx(metrics["reward/mean"], abs=1e-5)
    assert 1 < metrics["reward/attributes"] < 14


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--attributes.filter", "unsave<1"],
            "attributes.filter 'unsave<1': no attribute 'unsave' among rating, unsafe; did you mean unsafe?",
        ),
        (["--attributes.rank", "rating<1"], "attributes.rank 'rating<1': write numbers"),
    ],
)
def test_a_bad_expression_is_told_before_anything_is_sampled(judge, tmp_path, capsys, words, says):
    with pytest.raises(SystemExit):
        sampled(tmp_path, judge, "bad", *words)
    assert f"error: {says}" in capsys.readouterr().err
