import re

import pytest

from align.core.files import read_json_lines
from benchmarks.studies.t5_from_scratch import (
    KINDS,
    SIZES,
    documents,
    main,
    random_model,
    ranking_of,
    score,
    selected_kl,
    solution,
    table,
    tokenizer_of,
    words_to_sort,
    write_data,
)

TINY = SIZES["tiny"]


def test_the_program_scores_answers():
    prompt = "sort water call people about ="
    assert solution(prompt) == "about call people water"
    assert score(prompt, "about call people water") == 1
    assert score(prompt, "about call water people") == 0.25  # half of 2 of 4 places
    assert score(prompt, "about call people water water") == 0.5, "a word too many is not right"
    assert score(prompt, "") == 0
    row = {"prompt": prompt, "responses": ["", "about call people water", "about", "people about call water"]}
    assert ranking_of(row)["ranks"] == [4, 1, 2, 2]


def test_the_parts_are_disjoint_and_their_words_are_those_of_the_text(tmp_path):
    write_data(tmp_path, TINY)
    rows = {path.stem: list(read_json_lines(path)) for path in tmp_path.iterdir()}
    parts = {
        name: [frozenset(row["prompt"].split()[1:-1]) for row in part] for name, part in rows.items() if "text" not in name
    }
    lists = [words for part in parts.values() for words in part]
    assert len(set(lists)) == len(lists) == 64 + 48 + 32 + 16 + 16
    assert all(len(words) == TINY.listed for words in lists)
    assert all(row["completion"] == solution(row["prompt"]) for row in rows["demonstrations"])
    assert len(rows["text"]) + len(rows["text-heldout"]) == TINY.texts
    text = " ".join(documents()).lower()
    assert all(re.search(rf"\b{word}\b", text) for word in words_to_sort(TINY))


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_is_a_token_and_the_models_have_the_same_size(kind):
    size = SIZES["full"]
    tokenizer = tokenizer_of(kind, size)
    words = words_to_sort(size)
    assert len(words) == len(set(words)) == size.words
    ids = tokenizer(" ".join(words), add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == words
    assert tokenizer.decode(ids) == " ".join(words)
    assert (tokenizer("water").input_ids[-1] == tokenizer.eos_token_id) == (kind == "t5")
    weights = sum(weight.numel() for weight in random_model(kind, len(tokenizer)).parameters())
    assert 0.9e6 < weights < 1.1e6


def result(kind, seed, sft, ppo):
    answers = {"sft": {"sampled": sft, "greedy": sft}, "ppo": {"sampled": ppo, "greedy": ppo}}
    figures = {"text_loss": [6.0, 3.0], "reward_accuracy": 0.75, "reward": [0.0, 1.0, 3.0], "kl": [0.0, 2.5, 11.0]}
    return {"model": kind, "seed": seed, **figures, **answers}


def test_the_table_by_hand():
    rows = [result("t5", 0, "0101", "1101"), result("t5", 1, "0000", "1111"), result("gpt2", 0, "1111", "1111")]
    assert selected_kl(rows[0]) == 2.5, "the best policy within 10 nats"
    lines = table(rows).splitlines()[2:]
    assert len(lines) == 4, "a line for each run, and one for the seeds of T5"
    assert lines[0].startswith("| t5 | 0 | 6.00 to 3.00 | 75.0 % | 50.0 % | 75.0 % | +25.0 (+0.0 to +75.0) |")
    assert lines[1].startswith("| t5 | 1 | 6.00 to 3.00 | 75.0 % | 0.0 % | 100.0 % | +100.0 (+100.0 to +100.0) |")
    assert lines[2].startswith("| t5 | all |  |  | 25.0 % | 87.5 % | +62.5 (")
    assert "| +0.0 (+0.0 to +0.0) |" in lines[3]


@pytest.mark.slow
def test_the_study_runs_and_repeats_no_finished_stage(tmp_path, capsys):
    words = ["--size", "tiny", "--seeds", "0", "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    main(words)
    rows = list(read_json_lines(tmp_path / "results" / "results.jsonl"))
    assert [row["model"] for row in rows] == list(KINDS)
    assert all(
        len(row[stage][how]) == TINY.test for row in rows for stage in ("sft", "ppo") for how in ("sampled", "greedy")
    )
    assert all(row["explained_variance"] for row in rows), "the critic of GAE"
    capsys.readouterr()
    for path in (tmp_path / "runs").glob("*/results.json"):
        path.unlink()
    main(words)
    assert list(read_json_lines(tmp_path / "results" / "results.jsonl")) == rows
    assert "sft 1/" not in capsys.readouterr().err
