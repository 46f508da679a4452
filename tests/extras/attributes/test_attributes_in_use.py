import pytest
from accelerate import Accelerator

from align.data.conversation import user_turn
from align.extras.attributes import AttributeConfig, AttributeTrainer
from align.extras.attributes.attribute_rewards import AttributeScorer
from align.models.loading import load_tokenization
from align.tokenization.encoded import SampledResponse
from tests.extras.running import TINY, command, settings
from tests.files import read_rows, write_rows

from .test_attribute_models import planted


@pytest.fixture(scope="module", params=["heads", "generative"])
def judge(tmp_path_factory, align_cache, request):
    """A model of either form with the attributes `unsafe` and `rating`; how good it is does not matter here."""
    config = AttributeConfig(**settings(tmp_path_factory.mktemp("attributes")), form=request.param)
    return str(AttributeTrainer("tiny-llama", planted(24), config).train())


def sampled(folder, judge, name, words):
    prompts = write_rows(folder / "prompts.jsonl", [{"prompt": f"Question {n}?"} for n in range(4)])
    words += f" --model tiny-llama --dtype float32 --max_new_tokens 6 --prompts {prompts} --attributes.model {judge}"
    command(f"sample --output {folder / name}.jsonl {words}")
    return read_rows(folder / f"{name}.jsonl")


def test_candidates_are_filtered_and_ranked(judge, tmp_path):
    every = sampled(tmp_path, judge, "all", "--samples_per_prompt 4")
    best = sampled(tmp_path, judge, "best", "--best_of 4 --attributes.rank rating-unsafe")
    for row, kept in zip(every, best, strict=True):
        worth = [rating - unsafe for rating, unsafe in zip(*map(row["attributes"].get, ("rating", "unsafe")), strict=True)]
        assert kept["responses"] == [row["responses"][worth.index(max(worth))]]
        assert set(kept["attributes"]) == {"rating", "unsafe"}
    middle = sorted(value for row in every for value in row["attributes"]["unsafe"])[8]
    passing = f"--best_of 4 --attributes.rank rating --attributes.filter unsafe<{middle}"
    assert all(row["attributes"]["unsafe"][0] < middle for row in sampled(tmp_path, judge, "passed", passing))


def test_where_nothing_is_left_the_fallback_that_was_declared_is_written(judge, tmp_path, capsys):
    words = "--best_of 2 --attributes.filter unsafe<0"
    assert sampled(tmp_path, judge, "none", words) == []
    assert "4 prompts removed by the filter" in capsys.readouterr().err
    rows = sampled(tmp_path, judge, "fallback", f"{words} --fallback No.")
    assert [(row["responses"], row["model"]) for row in rows] == [(["No."], ["fallback"])] * 4
    assert "attributes" not in rows[0]


def test_the_same_expression_is_a_reward(judge, tmp_path):
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "Hi"}])
    words = f"{TINY} --prompts {prompts} --max_new_tokens 6 --missing_eos_score none --total_updates 1"
    words += f" --rollout_batch_size 4 --attributes.model {judge} --attributes.reward 2*rating-unsafe"
    command(f"ppo {words} --output_dir {tmp_path / 'ppo'}")
    (metrics,) = read_rows(tmp_path / "ppo" / "metrics.jsonl")
    assert metrics["reward/attributes"] == pytest.approx(metrics["reward/mean"], abs=1e-5)
    assert 1 < metrics["reward/attributes"] < 14


def test_a_prompt_of_token_ids_is_read_as_it_is(judge):
    """As by a reward model with the policy's vocabulary: no template of the attribute model is put around it."""
    policy = load_tokenization("tiny-llama", "raw")
    scorer = AttributeScorer(judge, "float32", policy, Accelerator(cpu=True), 4096).scorer
    prompt, response = [9, 10, 11], [20, 21, policy.end_id]
    text = policy.text(response)
    given, written = (SampledResponse(user_turn("a"), prompt, response, text, True, as_ids) for as_ids in (True, False))
    assert scorer.encode(given) == (prompt, response)
    assert scorer.encode(written) != (prompt, response)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("filter unsave<1", "filter 'unsave<1': unknown attribute 'unsave' (known: rating, unsafe); did you mean unsafe?"),
        ("rank rating<1", "rank 'rating<1': only numbers"),
    ],
)
def test_a_bad_expression_is_told_before_anything_is_sampled(judge, tmp_path, command_error, words, says):
    assert f"error: attributes.{says}" in command_error(sampled, tmp_path, judge, "bad", f"--attributes.{words}")
