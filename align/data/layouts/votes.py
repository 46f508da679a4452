"""Answers with votes: SHP (Ethayarajh et al. 2022) and StackExchange-style lists (Askell et al. 2021)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from align.data.conversation import check_prompt
from align.data.fields import check_list, check_text, field_error, id_or_none, short_repr, text_or_none
from align.data.layouts.pairs import make_pair_ranking
from align.data.records import Prompt, Ranking, Record
from align.data.scores import check_score, evenly_spaced, ranks_from_scores

Row = Mapping[str, Any]


def shp_prompt(row: Row) -> list[Record]:
    """The post is `history`, title and body; its forum, without the split that `domain` ends with, is the category."""
    return [Prompt(prompt=check_prompt(row.get("history"), "history"), category=_forum(row))]


def shp(row: Row) -> list[Record]:
    """Two comments; `labels` is 1 where A is preferred and 0 where B is (card of stanfordnlp/SHP, "Data Structure")."""
    answers = [check_text(row.get(field), field) for field in ("human_ref_A", "human_ref_B")]
    label = row.get("labels")
    if label not in (0, 1) or isinstance(label, bool):
        raise field_error("labels", f"is {short_repr(label)}", "use 1 where A is preferred, 0 where B is")
    ranks = (1, 2) if label == 1 else (2, 1)
    prompt = check_prompt(row.get("history"), "history")
    post = text_or_none(row.get("post_id"))
    return [Ranking(prompt=prompt, responses=tuple(answers), ranks=ranks, id=post, category=_forum(row))]


def _forum(row: Row) -> str | None:
    domain = text_or_none(row.get("domain"))
    return re.sub("_(train|validation|test)$", "", domain) if domain else None


def scored_prompt(row: Row) -> list[Record]:
    """The question."""
    return [Prompt(prompt=check_prompt(row["question"], "question"), id=_question_id(row))]


def scored_answers(row: Row) -> list[Record]:
    """A question and answers with votes; of more than nine, nine evenly spaced by rank are kept, in the order of the file.

    Answers are {text, pm_score} (HuggingFaceH4/stack-exchange-preferences: log2 of 1 + votes, 1 more if accepted, -1 for
    a negative number). `score` or `votes`, and lists by column ({"text": [...], "score": [...]}), are read too.
    """
    answers = _answer_rows(row["answers"])
    texts = [check_text(answer.get("text"), f"answers[{i}].text") for i, answer in enumerate(answers)]
    scores = []
    for i, answer in enumerate(answers):
        name = next((field for field in ("pm_score", "score", "votes") if answer.get(field) is not None), "pm_score")
        scores.append(check_score(answer.get(name), f"answers[{i}].{name}"))
    order = sorted(range(len(answers)), key=lambda i: -scores[i])
    kept = sorted(order[i] for i in evenly_spaced(len(order)))
    prompt = check_prompt(row["question"], "question")
    ranks = ranks_from_scores([scores[i] for i in kept])
    return [Ranking(prompt=prompt, responses=tuple(texts[i] for i in kept), ranks=ranks, id=_question_id(row))]


def _answer_rows(answers: object) -> Sequence[Row]:
    if isinstance(answers, Mapping):
        columns = {name: check_list(column, f"answers.{name}") for name, column in answers.items()}
        count = max(map(len, columns.values()), default=0)
        if any(len(column) != count for column in columns.values()):
            raise field_error("answers", "has columns of different lengths", "give one entry for each answer")
        return [{name: column[i] for name, column in columns.items()} for i in range(count)]
    rows = check_list(answers, "answers")
    for i, answer in enumerate(rows):
        if not isinstance(answer, Mapping):
            raise field_error(f"answers[{i}]", f"is {short_repr(answer)}", "write {text, pm_score}")
    return rows


def _question_id(row: Row) -> str | None:
    return id_or_none(row.get("qid")) or id_or_none(row.get("id"))


def stack_pair(row: Row) -> list[Record]:
    """lvwerra/stack-exchange-paired: `response_j` was voted above `response_k`."""
    names = ("response_j", "response_k")
    prompt = check_prompt(row["question"], "question")
    return make_pair_ranking({"id": _question_id(row)}, prompt, row["response_j"], row.get("response_k"), names)
