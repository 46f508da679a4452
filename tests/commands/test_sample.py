import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align import cli
from align.commands.sample import scorer_of
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.data import Demonstration, Prompt, read_records
from align.eval.answers import sampled_responses
from align.models.loading import load
from align.reward.checkpoint import load_reward_model
from align.tokenization import encode_demonstration
from align.tokenization.encoded import EncodedPrompt
from tests.commands.words import words_of
from tests.files import ROOT, read_rows, write_rows


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "?"}]
    rows = [{"prompt": "What is rain?", "id": "p1", "category": "truth"}, {"prompt": talk}, {"prompt": "A longer one. " * 5}]
    write_rows(path, rows)
    return path


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    rows = [{"prompt": f"{i}?", "responses": ["yes", "no", "what"], "ranks": [1, 2, 2]} for i in range(8)]
    write_rows(folder / "rankings.jsonl", rows)
    settings = words_of(model="tiny-gpt2", train_data=folder / "rankings.jsonl", output_dir=folder / "run", report_to="none")
    cli.main(["reward", *settings, "--demonstrations", str(ROOT / "data" / "demonstrations_heldout.jsonl")])
    return folder / "run" / "model"


def sampled(tmp_path, prompts, name="out", **settings) -> list[dict]:
    output = tmp_path / f"{name}.jsonl"
    given = {"model": "tiny-gpt2", "max_new_tokens": 12, "dtype": "float32"} | settings
    cli.main(["sample", *words_of(prompts=prompts, output=output, **given)])
    return read_rows(output)


def test_sample_writes_rows_for_the_labeling_app(tmp_path, prompts):
    rows = sampled(tmp_path, prompts)
    source = read_rows(prompts)
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in source]
    assert [row["id"] for row in rows] == ["p1", "2", "3"]
    assert [row.get("category") for row in rows] == ["truth", None, None]
    for row in rows:
        assert row["model"] == ["tiny-gpt2"]
        assert len(row["responses"]) == 1
        assert row["finish_reason"] == ["length"]  # an untrained model does not end within 12 tokens
        assert isinstance(row["responses"][0], str)
        assert "rewards" not in row


@settings(max_examples=6, deadline=None)
@given(st.lists(st.sampled_from(["short", "long", "named", "bad"]), min_size=3, max_size=8))
def test_an_id_is_the_number_of_its_row_whatever_rows_are_left_out(tmp_path_factory, kinds):
    kinds = [*kinds, "short", *["short"] * kinds.count("long")]  # at least half of the rows must be left
    folder = tmp_path_factory.mktemp("rows")
    rows = {
        "short": {"prompt": "Hi"},
        "long": {"prompt": "A longer one. " * 40},
        "named": {"prompt": "Hi", "id": "n"},
        "bad": {"prompt": 3},
    }
    source = write_rows(folder / "prompts.jsonl", [rows[kind] for kind in kinds])
    written = sampled(folder, source, max_new_tokens=1, overlong="drop", max_prompt_tokens=100, skip_bad_rows="true")
    expected = [("n" if kind == "named" else str(number), kind) for number, kind in enumerate(kinds, start=1)]
    assert [row["id"] for row in written] == [name for name, kind in expected if kind in ("short", "named")]


def test_answers_that_were_cut_are_learned_without_an_end_token(tmp_path, prompts, capfd):
    rows = sampled(tmp_path, prompts, samples_per_prompt=4)
    loaded = load(ModelConfig(model="tiny-gpt2", dtype="float32"), torch.float32)
    records = read_records(tmp_path / "out.jsonl", Demonstration, skip_bad_rows=True)
    reasons = [reason for row in rows for reason in row["finish_reason"]]
    assert [record.finish_reason for record in records] == reasons
    for record in records:
        (example,) = encode_demonstration(loaded.tokenization, record, one_row=True)
        assert (example.response[-1] == loaded.tokenization.end_id) == (record.finish_reason == "stop")
    # An untrained model samples bytes that are no UTF-8 and special tokens, which a text does not keep.
    assert re.search(r"warning: \d+ of 12 responses", capfd.readouterr().err)


def test_samples_depend_on_the_seed_alone(tmp_path, prompts):
    first = sampled(tmp_path, prompts, "a", samples_per_prompt=3)
    assert first == sampled(tmp_path, prompts, "b", samples_per_prompt=3, batch_tokens=40)
    other = sampled(tmp_path, prompts, "c", samples_per_prompt=3, seed=1)
    assert all(set(a["responses"]).isdisjoint(b["responses"]) for a, b in zip(first, other, strict=True))
    assert all(len(set(row["responses"])) == 3 for row in first)
    greedy = sampled(tmp_path, prompts, "greedy", samples_per_prompt=3, temperature=0)
    assert all(len(set(row["responses"])) == 1 for row in greedy)
    # Truncation to the likeliest token is the same thing.
    assert greedy == sampled(tmp_path, prompts, "k", samples_per_prompt=3, top_k=1)


def test_best_of_keeps_the_best_of_what_it_would_have_drawn(tmp_path, prompts, reward_folder):
    every = sampled(tmp_path, prompts, "all", samples_per_prompt=6, reward_model=reward_folder)
    best = sampled(tmp_path, prompts, "best", samples_per_prompt=2, best_of=3, reward_model=reward_folder)
    for drawn, kept in zip(every, best, strict=True):
        for number, group in enumerate((range(3), range(3, 6))):
            winner = max(group, key=lambda i: drawn["rewards"][i])
            assert kept["responses"][number] == drawn["responses"][winner]
            assert kept["rewards"][number] == pytest.approx(drawn["rewards"][winner], abs=1e-5)
        assert len(set(drawn["rewards"])) == 6
    learned = list(read_records(str(tmp_path / "best.jsonl"), Demonstration))
    assert [record.continuation[0]["content"] for record in learned] == [text for row in best for text in row["responses"]]


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
    rewards = scorer_of(loaded, reward, 100)(sampled_responses(drawn, responses, loaded.tokenization))
    assert reward.mean != 0.0
    for record, text, value in zip(records, texts, rewards, strict=True):
        prompt = Padded.from_lists([theirs.prompt_ids(record.prompt)])
        with torch.no_grad():
            alone = reward.model(prompt, Padded.from_lists([theirs.response_ids(text)])).item() - reward.mean
        assert value == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"best_of": 2}, "error: best_of is 2, but must be 1, unless reward_model, rules or"),
        ({"max_new_tokens": 1020}, "do not fit the model's context of 1024"),
        ({"max_prompt_tokens": 20}, "max_prompt_tokens is 20"),
        ({"reward_model": "/nowhere"}, "error: /nowhere: neither a reward model of this package"),
        ({"name": "prompts"}, "already exists"),
    ],
)
def test_sample_refuses(settings, line, tmp_path, prompts, command_error):
    (tmp_path / "prompts.jsonl").write_text("precious")
    assert line in command_error(sampled, tmp_path, prompts, **settings)
    assert not (tmp_path / "out.jsonl").exists()
    assert (tmp_path / "prompts.jsonl").read_text() == "precious"


def printed(capsys, *words, **settings) -> str:
    given = {"max_new_tokens": 12, "dtype": "float32"} | settings
    cli.main(["sample", *words, *words_of(**given)])
    return capsys.readouterr().out


def test_a_prompt_is_answered_on_the_terminal(tmp_path, capsys):
    text = printed(capsys, "tiny-gpt2", "--prompt", "What is rain?")
    (tmp_path / "p.jsonl").write_text('{"prompt": "What is rain?"}\n')
    (row,) = sampled(tmp_path, tmp_path / "p.jsonl")
    assert text == row["responses"][0] + "\n"
    talk = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: What is rain?\n\nAssistant:"
    text = printed(capsys, "tiny-gpt2", "--prompt", talk, "And snow?")
    headings = [line for line in text.splitlines() if line.startswith("--- ")]
    assert headings == ["--- What is rain?", "--- And snow?"], "the last turn"
    printed(capsys, "tiny-gpt2", "--prompt", "What is rain?", output=tmp_path / "written.jsonl")
    assert [row["prompt"] for row in read_rows(tmp_path / "written.jsonl")] == ["What is rain?"]


def test_several_prompts_models_and_responses_get_headings(capsys, reward_folder):
    words = ("tiny-gpt2", "tiny-t5", "--prompt", "What is rain?", "-5 + 3?")
    text = printed(capsys, *words, samples_per_prompt=2, reward_model=reward_folder)
    headings = [line.split(" | ") for line in text.splitlines() if line.startswith("--- ")]
    expected = [
        [f"--- {model}", prompt, f"response {number}"] for model in words[:2] for prompt in words[3:] for number in (1, 2)
    ]
    assert [heading[:-1] for heading in headings] == expected
    assert all(re.fullmatch(r"reward -?\d+\.\d{3}", heading[-1]) for heading in headings)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["m"], "error: output is ''"),
        (["m", "--prompts", "What is rain?", "--output", "o.jsonl"], "does not exist"),
        (["m", "n", "--output", "o.jsonl"], "error: model is ['m', 'n'], but must be"),
        (["m", "--model", "n", "--prompt", "x"], "error: model is set twice"),
        (["m", "--prompt", "x", "--prompts", "y"], "error: prompts is 'y', but must be"),
        (["--prompt", "x"], "error: model is []"),
        (["tiny-gpt2", "--prompt", ""], "prompts in memory: item 1: field 'prompt'"),
    ],
)
def test_sample_names_what_is_missing(words, line, command_error):
    assert line in command_error(cli.main, ["sample", *words])
