import re

import pytest

from align.core.files import read_json_lines
from benchmarks.studies.t5_from_scratch import (
    KINDS,
    SIZES,
    VERDICTS,
    documents,
    incomplete,
    main,
    mistakes,
    random_model,
    ranking_of,
    selected_kl,
    solution,
    table,
    tokenizer_of,
    verdict,
    words_to_sort,
    write_data,
)

TINY = SIZES["tiny"]


PROMPT = "sort water call people about ="


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("about call people water", "right"),
        ("about call water people", "order"),
        ("about call people water water", "twice the same word"),
        ("about call people week", "foreign word"),
        ("call people water", "missing word"),
        ("", "missing word"),
    ],
)
def test_the_program_judges_an_answer(answer, expected):
    assert solution(PROMPT) == "about call people water"
    assert verdict(PROMPT, answer) == expected
    assert expected in VERDICTS


def test_a_ranking_has_the_right_answer_and_the_samples_that_equal_it_first():
    responses = ["", "about call people water", "about"]
    ranking = ranking_of({"prompt": PROMPT, "responses": responses})
    assert ranking == {"prompt": PROMPT, "responses": [*responses, "about call people water"], "ranks": [2, 1, 2, 1]}


def test_the_parts_are_disjoint_and_their_words_are_those_of_the_text(tmp_path):
    write_data(tmp_path, TINY)
    rows = {path.stem: list(read_json_lines(path)) for path in tmp_path.iterdir()}
    parts = {
        name: [frozenset(row["prompt"].split()[1:-1]) for row in part] for name, part in rows.items() if "text" not in name
    }
    lists = [words for part in parts.values() for words in part]
    assert len(set(lists)) == len(lists) == 64 + 48 + 32 + 16 + 16, "demonstrations, ranked, prompts, validation, test"
    assert all(len(words) == TINY.listed for words in lists)
    verdicts = [verdict(row["prompt"], row["completion"]) for row in rows["demonstrations"]]
    assert verdicts == ["missing word", "right"] * 32
    assert all(row["completion"] == incomplete(row["prompt"]) for row in rows["demonstrations"][::2])
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
    assert 0.8e6 < weights < 1.1e6


def result(kind, seed, sft, ppo):
    answers = {"sft": {"sampled": sft, "greedy": sft}, "ppo": {"sampled": ppo, "greedy": ppo}}
    figures = {"text_loss": [6.0, 3.0], "reward_accuracy": 0.75, "reward": [0.0, 1.0, 3.0], "kl": [0.0, 2.5, 11.0]}
    figures["explained_variance"] = [-1.0, 0.0, 0.2, 0.3, 0.4, 0.6]
    return {"model": kind, "seed": seed, **figures, **answers}


def test_the_table_by_hand():
    rows = [result("t5", 0, "frmr", "rrmr"), result("t5", 1, "ffto", "rrrr"), result("gpt2", 0, "rrrr", "rrrr")]
    assert selected_kl(rows[0]) == 2.5, "the best policy within 10 nats"
    lines = table(rows).splitlines()[2:]
    assert all(line.endswith(" | 2.5 | 0.50 |") for line in (lines[0], lines[1], lines[3])), "0.4 and 0.6: the last third"
    assert len(lines) == 4, "a line for each run, and one for the seeds of T5"
    assert lines[0].startswith("| t5 | 0 | 6.00 to 3.00 | 75.0 % | 50.0 % | 75.0 % | +25.0 (+0.0 to +75.0) |")
    assert lines[1].startswith("| t5 | 1 | 6.00 to 3.00 | 75.0 % | 0.0 % | 100.0 % | +100.0 (+100.0 to +100.0) |")
    assert lines[2].startswith("| t5 | all |  |  | 25.0 % | 87.5 % | +62.5 (")
    assert "| +0.0 (+0.0 to +0.0) |" in lines[3]
    lines = mistakes(rows).splitlines()[2:]
    assert lines[0] == "| t5 | sft | 25.0 % | 37.5 % | 12.5 % | 12.5 % | 12.5 % |"
    assert lines[1] == "| t5 | ppo | 87.5 % | 0.0 % | 0.0 % | 12.5 % | 0.0 % |"


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
