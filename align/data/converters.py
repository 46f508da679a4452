"""From one row of another project's layout to records: one function a layout, each with where the layout comes from."""

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
from align.data.fields import check_list, check_text, check_texts, field_error, require, shown
from align.data.records import Demonstration, Prompt, Ranking, Record
from align.data.scores import check_score, ranks_of, spread

Row = Mapping[str, Any]
SPEAKER = re.compile(r"\n\n(Human|Assistant):")
ROLE_NAMES = {"Human": "user", "Assistant": "assistant"}


def own_text(value: object) -> str | None:
    """A category of a foreign row where it is usable text; a missing or odd one is no reason to lose the row."""
    return value if isinstance(value, str) and value.strip() else None


def own_id(value: object) -> str | None:
    """An id of a foreign row, a text or a number, where it is usable."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else own_text(value)


def make_pair(row: Row, prompt: object, chosen: object, rejected: object, names: tuple[str, str]) -> list[Record]:
    """A ranking of two. `names` are the fields that the two texts came from, for the errors."""
    texts = (check_answer(chosen, names[0]), check_answer(rejected, names[1]))
    if texts[0] == texts[1]:
        raise field_error(names[1], f"is the same text as '{names[0]}'", "remove the row")
    return [
        Ranking(
            prompt=check_prompt(prompt),
            responses=texts,
            ranks=(1, 2),
            margin=row.get("margin"),
            labeler=row.get("labeler"),
            id=own_id(row.get("id")),
            category=own_text(row.get("category")),
        )
    ]


# --- TRL's preference form: prompt, chosen, rejected ---


def pair(row: Row) -> list[Record]:
    """Text or turns; turns that hold the whole conversation, as in TRL's implicit prompt or UltraFeedback, are cut."""
    scores = (row.get("score_chosen"), row.get("score_rejected"))  # UltraFeedback binarized
    if scores[0] is not None and scores[0] == scores[1]:
        raise field_error("score_rejected", "equals score_chosen, so there is nothing to learn", "remove the row")
    chosen = require(row, "chosen", "a pair has prompt, chosen and rejected")
    rejected = require(row, "rejected", "a pair has prompt, chosen and rejected")
    if is_whole(chosen) or is_whole(rejected):
        prompt, answers = _cut(check_conversation(chosen, "chosen"), check_conversation(rejected, "rejected"))
        return make_pair(row, prompt, answers[0], answers[1], ("chosen", "rejected"))
    prompt = require(row, "prompt", "write the text that both responses answer")
    return make_pair(row, prompt, chosen, rejected, ("chosen", "rejected"))


def is_whole(turns: object) -> bool:
    """Whether a list of turns begins with the prompt, and not with the answer to it."""
    first = turns[0] if isinstance(turns, list | tuple) and turns else None
    return isinstance(first, Mapping) and first.get("role") != "assistant"


def _cut(chosen: Conversation, rejected: Conversation) -> tuple[Conversation, tuple[str, str]]:
    for field, turns in (("chosen", chosen), ("rejected", rejected)):
        if turns[-1]["role"] != "assistant":
            raise field_error(field, "ends with a user turn", "end it with the response")
    if chosen[:-1] != rejected[:-1]:
        wrong = "differs from 'chosen' before its last turn"
        raise field_error("rejected", wrong, "give both the same prompt, or remove the row")
    return chosen[:-1], (chosen[-1]["content"], rejected[-1]["content"])


def pair_prompt(row: Row) -> list[Record]:
    """The prompt of a pair of whole conversations: the turns of `chosen` before the last."""
    turns = check_conversation(require(row, "chosen", "a pair has prompt, chosen and rejected"), "chosen")
    return [Prompt(prompt=turns[:-1], id=own_id(row.get("id")), category=own_text(row.get("category")))]


# --- HH-RLHF transcripts (Bai et al. 2022): "\n\nHuman: ...\n\nAssistant: ..." ---


def read_transcript(text: object, field: str) -> Conversation:
    """The turns of a transcript without the spaces around them; the last may be empty.

    Turns of one speaker in a row (a model that wrote "Assistant:" again) are joined: roles have to alternate.
    """
    text = check_text(text, field)
    before, *parts = SPEAKER.split(text if text.startswith("\n\n") else f"\n\n{text}")
    if before.strip() or not parts:
        wrong = "is neither a transcript that begins with 'Human:' nor an answer to a 'prompt'"
        raise field_error(field, wrong, "add the field prompt")
    turns: list[tuple[str, str]] = []
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        role, content = ROLE_NAMES[speaker], content.strip()
        if turns and turns[-1][0] == role:
            turns[-1] = (role, f"{turns[-1][1]}\n\n{content}".strip())
        else:
            turns.append((role, content))
    return tuple({"role": role, "content": content} for role, content in turns)


def open_transcript(row: Row) -> Row:
    """The row, with its `prompt` read if that is a transcript that waits for the assistant, as in Dahoas/rm-static."""
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt.startswith("\n\nHuman:"):
        return row
    if not prompt.rstrip().endswith("\n\nAssistant:"):
        return row
    turns = read_transcript(prompt, "prompt")
    return {**row, "prompt": turns if turns[-1]["content"] else turns[:-1]}


def hh_pair(row: Row) -> list[Record]:
    """Two transcripts that differ in the assistant's last turn (Anthropic/hh-rlhf: `chosen`, `rejected`)."""
    chosen = read_transcript(require(row, "chosen", "write the transcript"), "chosen")
    rejected = read_transcript(require(row, "rejected", "write the transcript"), "rejected")
    prompt, answers = _cut(chosen, rejected)
    return make_pair(row, prompt, answers[0], answers[1], ("chosen", "rejected"))


def hh_prompt(row: Row) -> list[Record]:
    """What comes before the assistant's last turn in `chosen`."""
    turns = read_transcript(require(row, "chosen", "write the transcript"), "chosen")
    prompt = turns[:-1] if turns[-1]["role"] == "assistant" else turns
    return [Prompt(prompt=prompt, id=own_id(row.get("id")), category=own_text(row.get("category")))]


# --- Instructions: Alpaca (instruction, input, output) and Dolly (instruction, context, response) ---


def _instruction(row: Row, extra: str | None = None) -> Conversation:
    instruction = check_text(require(row, "instruction", "write the task"), "instruction")
    addition = check_text(row.get(extra) or "", extra, may_be_empty=True) if extra else ""
    return user_turn(f"{instruction}\n\n{addition}" if addition.strip() else instruction)


def alpaca_prompt(row: Row) -> list[Record]:
    """Taori et al. 2023: the input, where there is one, follows the instruction after an empty line."""
    return [Prompt(prompt=_instruction(row, "input"))]


def alpaca(row: Row) -> list[Record]:
    """A row of tatsu-lab/alpaca as a demonstration; its `text`, all three fields in a template, is not read."""
    continuation = check_continuation(check_text(row.get("output"), "output"), "output")
    return [Demonstration(prompt=_instruction(row, "input"), continuation=continuation)]


def dolly_prompt(row: Row) -> list[Record]:
    """databricks-dolly-15k (Conover et al. 2023): the context follows the instruction after an empty line."""
    return [Prompt(prompt=_instruction(row, "context"), category=own_text(row.get("category")))]


def dolly(row: Row) -> list[Record]:
    """A Dolly row as a demonstration; `category` is kept."""
    continuation = check_continuation(check_text(row.get("response"), "response"), "response")
    category = own_text(row.get("category"))
    return [Demonstration(prompt=_instruction(row, "context"), continuation=continuation, category=category)]


# --- UltraFeedback (Cui et al. 2023) ---


def ultrafeedback_prompt(row: Row) -> list[Record]:
    """The instruction; `source` becomes the category."""
    return [Prompt(prompt=_instruction(row), category=own_text(row.get("source")))]


def ultrafeedback(row: Row) -> list[Record]:
    """The raw form (openbmb/UltraFeedback): completions, ranked by the mean of their aspects, or else by `overall_score`.

    The mean comes first because `overall_score` was wrong for many rows (a 1 stored as 10; see the update in the README
    of OpenBMB/UltraFeedback and the card of argilla/ultrafeedback-binarized-preferences). It goes from 1 to 5 and the
    other to 10: where one completion has no mean (null, or NaN in the published files), all are ranked by the other.
    """
    completions = check_list(row["completions"], "completions")
    for i, completion in enumerate(completions):
        if not isinstance(completion, Mapping):
            raise field_error(f"completions[{i}]", f"is {shown(completion)}", "write {response, overall_score, ...}")
    has_means = not any(_is_missing(completion.get("fine-grained_score")) for completion in completions)
    name = "fine-grained_score" if has_means else "overall_score"
    scores = [check_score(each.get(name), f"completions[{i}].{name}") for i, each in enumerate(completions)]
    responses = [check_text(each.get("response"), f"completions[{i}].response") for i, each in enumerate(completions)]
    models = [own_text(completion.get("model")) for completion in completions]
    return [
        Ranking(
            prompt=_instruction(row),
            responses=tuple(responses),
            ranks=ranks_of(scores),
            model=check_texts(models, "model") if all(models) else None,
            category=own_text(row.get("source")),
        )
    ]


def _is_missing(score: object) -> bool:
    return score is None or (isinstance(score, float) and math.isnan(score))


def ultrafeedback_pair(row: Row) -> list[Record]:
    """The binarized form: instruction and two named responses (card of argilla/ultrafeedback-binarized-preferences)."""
    prompt = _instruction(row)
    names = ("chosen_response", "rejected_response")
    return make_pair(row, prompt, row["chosen_response"], row.get("rejected_response"), names)


# --- Answers with votes: SHP (Ethayarajh et al. 2022) and StackExchange-style lists (Askell et al. 2021) ---


def shp_prompt(row: Row) -> list[Record]:
    """The post is `history`, title and body; its forum, without the split that `domain` ends with, is the category."""
    return [Prompt(prompt=check_prompt(row.get("history"), "history"), category=_forum(row))]


def shp(row: Row) -> list[Record]:
    """Two comments; `labels` is 1 where A is preferred and 0 where B is (card of stanfordnlp/SHP, "Data Structure")."""
    answers = [check_text(row.get(field), field) for field in ("human_ref_A", "human_ref_B")]
    label = row.get("labels")
    if label not in (0, 1) or isinstance(label, bool):
        raise field_error("labels", f"is {shown(label)}", "use 1 where A is preferred, 0 where B is")
    ranks = (1, 2) if label == 1 else (2, 1)
    prompt = check_prompt(row.get("history"), "history")
    post = own_text(row.get("post_id"))
    return [Ranking(prompt=prompt, responses=tuple(answers), ranks=ranks, id=post, category=_forum(row))]


def _forum(row: Row) -> str | None:
    domain = own_text(row.get("domain"))
    return re.sub("_(train|validation|test)$", "", domain) if domain else None


def scored_prompt(row: Row) -> list[Record]:
    """The question."""
    return [Prompt(prompt=check_prompt(row["question"], "question"), id=_question_id(row))]


def scored_answers(row: Row) -> list[Record]:
    """A question and answers with votes; of more than nine, nine spread evenly over the order, kept as they stood.

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
    kept = sorted(order[i] for i in spread(len(order)))
    prompt = check_prompt(row["question"], "question")
    ranks = ranks_of([scores[i] for i in kept])
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
            raise field_error(f"answers[{i}]", f"is {shown(answer)}", "write {text, pm_score}")
    return rows


def _question_id(row: Row) -> str | None:
    return own_id(row.get("qid")) or own_id(row.get("id"))


def stack_pair(row: Row) -> list[Record]:
    """lvwerra/stack-exchange-paired: `response_j` was voted above `response_k`."""
    names = ("response_j", "response_k")
    prompt = check_prompt(row["question"], "question")
    return make_pair({"id": _question_id(row)}, prompt, row["response_j"], row.get("response_k"), names)
