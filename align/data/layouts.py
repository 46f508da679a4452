"""Layouts of other projects, row by row: pairs, transcripts, instructions with answers, answers with votes, and samples."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from align.data.conversation import (
    Conversation,
    check_answer,
    check_continuation,
    check_conversation,
    check_prompt,
    user_turn,
)
from align.data.fields import (
    check_list,
    check_score,
    check_text,
    check_texts,
    field_error,
    id_or_none,
    required_field,
    short_repr,
    text_or_none,
)
from align.data.records import Demonstration, Prompt, Ranking, Record, evenly_spaced, ranks_from_scores
from align.data.transcripts import parse_transcript

Row = Mapping[str, Any]


def id_and_category(row: Row) -> dict[str, Any]:
    """Both, if the row has them in a usable form."""
    return {"id": id_or_none(row.get("id")), "category": text_or_none(row.get("category"))}


def make_pair_ranking(
    row: Row, prompt: object, chosen: object, rejected: object, names: tuple[str, str], *, may_be_empty: bool = False
) -> list[Record]:
    """A ranking of two responses; `names` are their fields, for messages."""
    given = zip((chosen, rejected), names, strict=True)
    texts = tuple(check_answer(answer, name, may_be_empty=may_be_empty) for answer, name in given)
    if texts[0] == texts[1]:
        raise field_error(names[1], f"is the same text as '{names[0]}'", "remove the row")
    return [
        Ranking(
            prompt=check_prompt(prompt),
            responses=texts,
            ranks=(1, 2),
            margin=row.get("margin"),
            labeler=row.get("labeler"),
            **id_and_category(row),
        )
    ]


# --- TRL's preference form: prompt, chosen, rejected ---


def pair(row: Row) -> list[Record]:
    """Text or turns; turns of the whole conversation, as in TRL's implicit prompt or UltraFeedback, are split."""
    chosen = required_field(row, "chosen", "a pair has prompt, chosen and rejected")
    rejected = required_field(row, "rejected", "a pair has prompt, chosen and rejected")
    if is_whole_conversation(chosen) or is_whole_conversation(rejected):
        prompt, answers = _split_off_answers(check_conversation(chosen, "chosen"), check_conversation(rejected, "rejected"))
        return make_pair_ranking(row, prompt, answers[0], answers[1], ("chosen", "rejected"))
    prompt = required_field(row, "prompt", "write the text that both responses answer")
    # as the labeling app exports them: a policy's answer may be empty, and somebody has judged it
    return make_pair_ranking(row, prompt, chosen, rejected, ("chosen", "rejected"), may_be_empty=True)


def is_whole_conversation(turns: object) -> bool:
    """Whether a list of turns begins with the prompt, and not with the answer to it."""
    first = turns[0] if isinstance(turns, list | tuple) and turns else None
    return isinstance(first, Mapping) and first.get("role") != "assistant"


def _split_off_answers(chosen: Conversation, rejected: Conversation) -> tuple[Conversation, tuple[str, str]]:
    for field, turns in (("chosen", chosen), ("rejected", rejected)):
        if turns[-1]["role"] != "assistant":
            raise field_error(field, "ends with a user turn", "end it with the response")
    if chosen[:-1] != rejected[:-1]:
        wrong = "differs from 'chosen' before its last turn"
        raise field_error("rejected", wrong, "give both the same prompt, or remove the row")
    return chosen[:-1], (chosen[-1]["content"], rejected[-1]["content"])


def pair_prompt(row: Row) -> list[Record]:
    """The prompt of a pair of whole conversations: the turns of `chosen` before the last."""
    turns = check_conversation(required_field(row, "chosen", "a pair has prompt, chosen and rejected"), "chosen")
    return [Prompt(prompt=turns[:-1], **id_and_category(row))]


# --- Pairs of whole transcripts, as in HH-RLHF (Bai et al. 2022) ---


def hh_pair(row: Row) -> list[Record]:
    """Two transcripts that differ in the assistant's last turn (Anthropic/hh-rlhf: `chosen`, `rejected`)."""
    chosen = parse_transcript(required_field(row, "chosen", "write the transcript"), "chosen")
    rejected = parse_transcript(required_field(row, "rejected", "write the transcript"), "rejected")
    prompt, answers = _split_off_answers(chosen, rejected)
    return make_pair_ranking(row, prompt, answers[0], answers[1], ("chosen", "rejected"))


def hh_prompt(row: Row) -> list[Record]:
    """The turns before the assistant's last one in `chosen`."""
    turns = parse_transcript(required_field(row, "chosen", "write the transcript"), "chosen")
    prompt = turns[:-1] if turns[-1]["role"] == "assistant" else turns
    return [Prompt(prompt=prompt, **id_and_category(row))]


# --- Instructions: Alpaca and Dolly ---


def _instruction(row: Row, extra: str | None = None) -> Conversation:
    instruction = check_text(required_field(row, "instruction", "write the task"), "instruction")
    addition = check_text(row.get(extra) or "", extra, may_be_empty=True) if extra else ""
    return user_turn(f"{instruction}\n\n{addition}" if addition.strip() else instruction)


def alpaca_prompt(row: Row) -> list[Record]:
    """Taori et al. 2023: the input, if there is one, follows the instruction after an empty line."""
    return [Prompt(prompt=_instruction(row, "input"))]


def alpaca(row: Row) -> list[Record]:
    """A row of tatsu-lab/alpaca as a demonstration; its `text`, all three fields in a template, is ignored."""
    continuation = check_continuation(check_text(row.get("output"), "output"), "output")
    return [Demonstration(prompt=_instruction(row, "input"), continuation=continuation)]


def dolly_prompt(row: Row) -> list[Record]:
    """databricks-dolly-15k (Conover et al. 2023): the context follows the instruction after an empty line."""
    return [Prompt(prompt=_instruction(row, "context"), category=text_or_none(row.get("category")))]


def dolly(row: Row) -> list[Record]:
    continuation = check_continuation(check_text(row.get("response"), "response"), "response")
    category = text_or_none(row.get("category"))
    return [Demonstration(prompt=_instruction(row, "context"), continuation=continuation, category=category)]


# --- UltraFeedback (Cui et al. 2023) ---


def ultrafeedback_prompt(row: Row) -> list[Record]:
    """The instruction; `source` becomes the category."""
    return [Prompt(prompt=_instruction(row), category=text_or_none(row.get("source")))]


def ultrafeedback(row: Row) -> list[Record]:
    """The raw form (openbmb/UltraFeedback): ranked by the mean of their aspect scores, or else by `overall_score`.

    The mean comes first because `overall_score` was wrong for many rows (a 1 stored as 10; card of
    argilla/ultrafeedback-binarized-preferences). The mean goes from 1 to 5 and `overall_score` to 10: if one completion has
    no mean (null, or NaN in the published files), all are ranked by the latter.
    """
    completions = check_list(row["completions"], "completions")
    for i, completion in enumerate(completions):
        if not isinstance(completion, Mapping):
            raise field_error(f"completions[{i}]", f"is {short_repr(completion)}", "write {response, overall_score, ...}")
    has_means = not any(_is_missing(completion.get("fine-grained_score")) for completion in completions)
    name = "fine-grained_score" if has_means else "overall_score"
    scores = [check_score(entry.get(name), f"completions[{i}].{name}") for i, entry in enumerate(completions)]
    responses = [check_text(entry.get("response"), f"completions[{i}].response") for i, entry in enumerate(completions)]
    models = [text_or_none(completion.get("model")) for completion in completions]
    return [
        Ranking(
            prompt=_instruction(row),
            responses=tuple(responses),
            ranks=ranks_from_scores(scores),
            model=check_texts(models, "model") if all(models) else None,
            category=text_or_none(row.get("source")),
        )
    ]


def _is_missing(score: object) -> bool:
    return score is None or (isinstance(score, float) and math.isnan(score))


def ultrafeedback_pair(row: Row) -> list[Record]:
    """The binarized form: instruction and two named responses (argilla/ultrafeedback-binarized-preferences)."""
    prompt = _instruction(row)
    names = ("chosen_response", "rejected_response")
    return make_pair_ranking(row, prompt, row["chosen_response"], row.get("rejected_response"), names)


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


def sampled_demonstrations(row: Row) -> list[Record]:
    """A demonstration for each response of a row of `align sample`, such as the best of n answers."""
    texts = [check_text(text, f"responses[{place}]") for place, text in enumerate(check_list(row["responses"], "responses"))]
    return [
        Demonstration(
            prompt=check_prompt(row["prompt"]),
            continuation=check_continuation(text, "responses"),
            **id_and_category(row),
        )
        for text in texts
    ]
