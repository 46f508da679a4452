"""Layouts of other projects, row by row: pairs, transcripts, instructions with answers, answers with votes, and samples.

A function `..._prompt` returns the fields of a `Prompt`; the others return records.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from align.data.conversation import (
    Conversation,
    Message,
    check_answer,
    check_continuation,
    check_conversation,
    check_prompt,
    user_turn,
)
from align.data.fields import (
    check_list,
    check_score,
    check_scores,
    check_text,
    check_texts,
    field_error,
    id_or_none,
    required_field,
    short_repr,
    text_or_none,
)
from align.data.records import Demonstration, Ranking, Record, evenly_spaced, ranks_from_scores

Row = Mapping[str, Any]


def id_and_category(row: Row) -> dict[str, Any]:
    """Both, if the row has them in a usable form."""
    return {"id": id_or_none(row.get("id")), "category": text_or_none(row.get("category"))}


def make_pair_ranking(
    row: Row, prompt: object, chosen: object, rejected: object, names: tuple[str, str], *, may_be_empty: bool = False
) -> list[Record]:
    """A ranking of two responses, a tie if their scores are equal; `names` are their fields, for messages."""
    given = zip((chosen, rejected), names, strict=True)
    texts = tuple(check_answer(answer, name, may_be_empty=may_be_empty) for answer, name in given)
    if texts[0] == texts[1]:
        raise field_error(names[1], f"is the same text as '{names[0]}'", "remove the row")
    return [
        Ranking(
            prompt=check_prompt(prompt),
            responses=texts,
            ranks=(1, 1) if check_scores(row) else (1, 2),
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


def pair_prompt(row: Row) -> dict[str, Any]:
    """The prompt of a pair of whole conversations: the turns of `chosen` before the last."""
    turns = check_conversation(required_field(row, "chosen", "a pair has prompt, chosen and rejected"), "chosen")
    return {"prompt": turns[:-1], **id_and_category(row)}


# --- Transcripts, as in HH-RLHF (Bai et al. 2022): "\\n\\nHuman: ...\\n\\nAssistant: ..." ---

SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_SPEAKER = re.compile(r"(?:\A\s*|\r?\n\r?\n)(Human|Assistant):")
"""A name that begins a turn: at the beginning of the text, or after a blank line. Elsewhere it is part of a message."""


def _transcript_turns(text: str) -> list[Message] | None:
    """The turns of a text that begins with a speaker's name, stripped of white space; None for any other text."""
    before, *parts = _SPEAKER.split(text)
    if before or not parts:
        return None
    return [
        {"role": SPEAKERS[name], "content": content.strip()} for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def _joined(turns: Sequence[Message]) -> Conversation:
    """Join turns of one speaker in a row (a model that wrote "Assistant:" again): roles have to alternate."""
    joined: list[Message] = []
    for turn in turns:
        if joined and joined[-1]["role"] == turn["role"]:
            text = f"{joined.pop()['content']}\n\n{turn['content']}".strip()
            turn = {"role": turn["role"], "content": text}
        joined.append(turn)
    return tuple(joined)


def parse_transcript(text: object, field: str) -> Conversation:
    """The turns of a transcript; the last may be empty."""
    turns = _transcript_turns(check_text(text, field))
    if turns is None:
        wrong = "is neither a transcript that begins with 'Human:' nor an answer to a 'prompt'"
        raise field_error(field, wrong, "add the field prompt")
    return _joined(turns)


_HELPSTEER_SPEAKER = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
"""What separates the turns of a prompt in HelpSteer and HelpSteer 2; the first turn is the user's."""


def with_parsed_prompt(row: Row) -> Row:
    """The row, with `prompt` parsed if it is a transcript that waits for the assistant, as in Dahoas/rm-static.

    It begins with the user's name and ends with the assistant's name or with a user's turn, or its turns are separated as in
    HelpSteer 2. Any other text is one message.
    """
    prompt = row.get("prompt")
    first, *rest = _HELPSTEER_SPEAKER.split(prompt) if isinstance(prompt, str) else ("",)
    if rest:
        roles = {"User": "user", "Assistant": "assistant"}
        later = [{"role": roles[name], "content": text} for name, text in zip(rest[::2], rest[1::2], strict=True)]
        return {**row, "prompt": [{"role": "user", "content": first}, *later]}
    turns = _transcript_turns(prompt) if isinstance(prompt, str) else None
    if turns is None or turns[0]["role"] != "user":
        return row
    joined = _joined(turns)
    if turns[-1] == {"role": "assistant", "content": ""}:
        return {**row, "prompt": joined if joined[-1]["content"] else joined[:-1]}
    waits = joined[-1]["role"] == "user" and (len(joined) > 1 or str(prompt).startswith("\n\n"))
    return {**row, "prompt": joined} if waits else row


def hh_pair(row: Row) -> list[Record]:
    """Two transcripts that differ in the assistant's last turn (Anthropic/hh-rlhf: `chosen`, `rejected`)."""
    chosen = parse_transcript(required_field(row, "chosen", "write the transcript"), "chosen")
    rejected = parse_transcript(required_field(row, "rejected", "write the transcript"), "rejected")
    prompt, answers = _split_off_answers(chosen, rejected)
    return make_pair_ranking(row, prompt, answers[0], answers[1], ("chosen", "rejected"))


def hh_prompt(row: Row) -> dict[str, Any]:
    """The turns before the assistant's last one in `chosen`."""
    turns = parse_transcript(required_field(row, "chosen", "write the transcript"), "chosen")
    return {"prompt": turns[:-1] if turns[-1]["role"] == "assistant" else turns, **id_and_category(row)}


# --- Instructions: Alpaca (Taori et al. 2023), Dolly (Conover et al. 2023) ---


def instruction_prompt(row: Row, extra: str = "", category: str = "category") -> dict[str, Any]:
    """The instruction, and after an empty line the field `extra`, if there is one; `category` is the field of that name."""
    text = check_text(required_field(row, "instruction", "write the task"), "instruction")
    addition = check_text(row.get(extra) or "", extra, may_be_empty=True) if extra else ""
    prompt = user_turn(f"{text}\n\n{addition}" if addition.strip() else text)
    return {"prompt": prompt, "category": text_or_none(row.get(category))}


def instruction_demonstration(row: Row, extra: str, answer: str) -> list[Record]:
    """A demonstration of the answer in the field `answer`; Alpaca's `text`, all fields in a template, is ignored."""
    continuation = check_continuation(check_text(row.get(answer), answer), answer)
    return [Demonstration(**instruction_prompt(row, extra), continuation=continuation)]


# --- UltraFeedback (Cui et al. 2023) ---


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
            **instruction_prompt(row, category="source"),
            responses=tuple(responses),
            ranks=ranks_from_scores(scores),
            model=check_texts(models, "model") if all(models) else None,
        )
    ]


def _is_missing(score: object) -> bool:
    return score is None or (isinstance(score, float) and math.isnan(score))


def ultrafeedback_pair(row: Row) -> list[Record]:
    """The binarized form: instruction and two named responses (argilla/ultrafeedback-binarized-preferences)."""
    names = ("chosen_response", "rejected_response")
    prompt = instruction_prompt(row)["prompt"]
    return make_pair_ranking(row, prompt, row["chosen_response"], row.get("rejected_response"), names)


def shp_prompt(row: Row) -> dict[str, Any]:
    """The post is `history`, title and body; its forum, without the split that `domain` ends with, is the category."""
    domain = text_or_none(row.get("domain"))
    forum = re.sub("_(train|validation|test)$", "", domain) if domain else None
    return {"prompt": check_prompt(row.get("history"), "history"), "category": forum}


def shp(row: Row) -> list[Record]:
    """Two comments; `labels` is 1 where A is preferred and 0 where B is (card of stanfordnlp/SHP, "Data Structure")."""
    answers = [check_text(row.get(field), field) for field in ("human_ref_A", "human_ref_B")]
    label = row.get("labels")
    if label not in (0, 1) or isinstance(label, bool):
        raise field_error("labels", f"is {short_repr(label)}", "use 1 where A is preferred, 0 where B is")
    ranks = (1, 2) if label == 1 else (2, 1)
    post = text_or_none(row.get("post_id"))
    return [Ranking(**shp_prompt(row), responses=tuple(answers), ranks=ranks, id=post)]


def question_prompt(row: Row) -> dict[str, Any]:
    question = id_or_none(row.get("qid")) or id_or_none(row.get("id"))
    return {"prompt": check_prompt(row["question"], "question"), "id": question}


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
    ranks = ranks_from_scores([scores[i] for i in kept])
    return [Ranking(**question_prompt(row), responses=tuple(texts[i] for i in kept), ranks=ranks)]


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


def stack_pair(row: Row) -> list[Record]:
    """lvwerra/stack-exchange-paired: `response_j` was voted above `response_k`."""
    names = ("response_j", "response_k")
    asked = question_prompt(row)
    return make_pair_ranking({"id": asked["id"]}, asked["prompt"], row["response_j"], row.get("response_k"), names)


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
