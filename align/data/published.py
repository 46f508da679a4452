"""Layouts of published data sets: recognition, and extraction of prompts and answers.

A row is converted to the fields of one of this project's layouts: `messages`, `completion`, `chosen` and `rejected`,
`responses` and `ranks`, or the `response` and `rating` of one answer. The fields of a layout follow the data set's card.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from align.data.answers import (
    alternating_turns,
    check_objects,
    compared_answers,
    completion_of,
    pair_of,
    preference_by_number,
    preference_in_words,
    ranked_answers,
    ranks_of_two,
    score_of,
    scores_of,
    texts_of,
)
from align.data.conversation import check_prompt
from align.data.fields import (
    check_list,
    check_text,
    field_error,
    id_or_none,
    required_field,
    short_repr,
    text_or_none,
)
from align.data.layouts import (
    Fields,
    Format,
    Matcher,
    RatedAnswer,
    Reader,
    Row,
    has,
    has_any,
    id_and_category,
    messages_prompt,
    pair,
    prompt_field,
)
from align.data.model_comparisons import (
    alpaca_eval_answers,
    arena_55k_answers,
    arena_55k_questions,
    arena_answers,
    arena_questions,
    qa_feedback_answers,
    qa_feedback_question,
)
from align.data.records import Demonstration, Ranking, Record

Entry = tuple[str, str, Matcher, Reader, Reader]


def published(name: str, kind: type[Record], fields: str, matches: Matcher, prompt: Reader, answers: Reader) -> Format:
    """Define a layout whose rows are first converted to a native layout.

    Args:
        prompt: function that returns the prompt of a row, its id and its category.
        answers: function that returns the answers of a row with their order.
    """

    def read_prompt(row: Row) -> Fields:
        prompt_fields = prompt(row)
        return messages_prompt(prompt_fields) if "messages" in prompt_fields else prompt_fields

    def convert(row: Row) -> Sequence[Record]:
        native = {**prompt(row), **answers(row)}
        if kind is Demonstration:
            return Demonstration.all_from_row(native)
        if "rating" in native:
            return [RatedAnswer.from_row(native)]
        return pair(native) if "chosen" in native else [Ranking.from_row(native)]

    return Format(name, kind, fields, matches, convert, None if prompt is prompt_field else read_prompt)


IN_PAIR = ("chosen", "rejected")


def _is_text_pair(*prompt: str) -> Matcher:
    """Return whether a row has a pair of responses and one of these fields, but no `prompt`."""
    is_pair, asks = has(*IN_PAIR, without=("prompt",)), has_any(*prompt)
    return lambda row: is_pair(row) and asks(row) and isinstance(row["chosen"], str)


def is_messages_pair(row: Row) -> bool:
    """Return whether a row has a list `messages` and two responses to it."""
    return has("messages", *IN_PAIR)(row) and isinstance(row["chosen"], Mapping)


def _is_tagged(row: Row) -> bool:
    answered = has("instruction", "output")(row) or has_any("conversations", "messages")(row)
    return answered and _tag(row) in (0, 1)


def _tag(row: Row) -> Any:
    """Return whether an answer is good, from `kto_tag` or a `label` next to `messages`. Other `label` fields may be class
    labels.
    """
    if row.get("kto_tag") is not None:
        return row["kto_tag"]
    label = row.get("label")
    return label if isinstance(label, bool) and row.get("messages") is not None else None


# --- Prompts ---


def instruction(*extras: str, category: str = "category") -> Reader:
    """Return the instruction followed by the non-empty fields `extras`, separated by blank lines. `category` is a field
    name.
    """

    def prompt(row: Row) -> Fields:
        text = check_text(required_field(row, "instruction", "write the task"), "instruction")
        additions = [check_text(row.get(extra) or "", extra, may_be_empty=True) for extra in extras]
        whole = "\n\n".join([text, *(addition for addition in additions if addition.strip())])
        return {"prompt": whole, "category": text_or_none(row.get(category))}

    return prompt


TASK = instruction("input", "context")
"""Additional input: Alpaca's `input` or Dolly's `context`."""


def _question(row: Row) -> Fields:
    text = check_prompt(row.get("question") or row.get("input"), "question")
    return {"prompt": text, "id": id_or_none(row.get("qid")) or id_or_none(row.get("id"))}


SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}


def _sharegpt_turn(turn: object, field: str) -> Fields:
    """Convert a {from, value} turn. Other fields, such as `weight`, are kept."""
    if not isinstance(turn, Mapping):
        raise field_error(field, f"is {short_repr(turn)}, not a turn", "use {from, value}")
    speaker = turn.get("from")
    if speaker != "system" and speaker not in SHAREGPT_ROLES:
        raise field_error(f"{field}.from", f"is {short_repr(speaker)}", "use system, human or gpt")
    content = check_text(turn.get("value"), f"{field}.value", may_be_empty=speaker == "system")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {**others, "role": SHAREGPT_ROLES.get(speaker, "system"), "content": content}


def _sharegpt_turns(row: Row) -> list[Fields]:
    turns = check_list(row["conversations"], "conversations")
    if all(isinstance(turn, Mapping) and "role" in turn for turn in turns):  # some copies use role and content
        return turns
    if all(isinstance(turn, str) for turn in turns):  # LIMA
        return alternating_turns(turns, "conversations")
    return [_sharegpt_turn(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]


def _is_ultrachat(row: Row) -> bool:
    data = row.get("data")
    return isinstance(data, list | tuple) and bool(data) and all(isinstance(text, str) for text in data)


def _capybara(row: Row) -> Fields:
    turns = [
        {"role": role, "content": check_text(entry.get(name), f"conversation[{i}].{name}")}
        for i, entry in enumerate(check_objects(row["conversation"], "conversation", "{input, output}"))
        for name, role in (("input", "user"), ("output", "assistant"))
    ]
    return {**id_and_category(row), "messages": turns}


def _post_to_summarize(row: Row) -> Fields:
    """Format a Reddit post or news article as in Stiennon et al. 2020, appendix B."""
    info = row["info"]
    post = [f"SUBREDDIT: r/{info.get('subreddit')}", f"TITLE: {info.get('title')}", f"POST: {info.get('post')}"]
    shown = post if info.get("post") else [f"Article:\n{check_text(info.get('article'), 'info.article')}"]
    return {"prompt": "\n\n".join([*shown, "TL;DR:"]), "id": info.get("id")}


def _shp_post(row: Row) -> Fields:
    """Convert `history` (title and body). The category is the forum: `domain` without its split suffix."""
    domain = text_or_none(row.get("domain"))
    forum = re.sub("_(train|validation|test)$", "", domain) if domain else None
    return {"prompt": check_prompt(row.get("history"), "history"), "category": forum}


def _webgpt_question(row: Row) -> Fields:
    question = row["question"]
    return {
        "prompt": check_prompt(
            question.get("full_text") if isinstance(question, Mapping) else question, "question.full_text"
        )
    }


def _tagged_turns(row: Row) -> list[Fields]:
    return _sharegpt_turns(row) if row.get("conversations") is not None else check_list(row["messages"], "messages")


def _tagged_prompt(row: Row) -> Fields:
    if row.get("instruction") is not None:
        return TASK(row)
    return {**id_and_category(row), "prompt": _tagged_turns(row)[:-1]}


# --- Answers ---


def _summaries(row: Row) -> Fields:
    summaries = check_objects(row["summaries"], "summaries")
    if len(summaries) != 2:
        raise field_error("summaries", f"is a list of {len(summaries)}", "use two summaries")
    ranks = ranks_of_two(preference_by_number(row, "choice"))
    return {"responses": texts_of(summaries, "summaries", "text"), "ranks": ranks, "labeler": row.get("worker")}


def _nectar(row: Row) -> Fields:
    answers = check_objects(row["answers"], "answers", "{answer, rank}")
    texts = texts_of(answers, "answers", "answer")
    return ranked_answers(answers, texts, [-rank for rank in scores_of(answers, "answers", "rank")])


def _ultrafeedback(row: Row) -> Fields:
    """Convert the raw format (openbmb/UltraFeedback), ranked by mean aspect score or else `overall_score`.

    The mean comes first because `overall_score` was wrong for many rows (a 1 stored as 10; card of
    argilla/ultrafeedback-binarized-preferences). The mean goes from 1 to 5 and `overall_score` to 10: if one completion has
    no mean (null, or NaN in the published files), all are ranked by the latter.
    """
    completions = check_objects(row["completions"], "completions", "{response, overall_score, ...}")
    means = [completion.get("fine-grained_score") for completion in completions]
    has_means = not any(mean is None or (isinstance(mean, float) and math.isnan(mean)) for mean in means)
    scores = scores_of(completions, "completions", "fine-grained_score" if has_means else "overall_score")
    return ranked_answers(completions, texts_of(completions, "completions", "response"), scores)


def _scored_answers(row: Row) -> Fields:
    """Convert voted answers: {text, pm_score}, or lists by column ({"text": [...], "score": [...]}).

    HuggingFaceH4/stack-exchange-preferences: log2 of 1 + votes, 1 more if accepted, -1 for a negative number.
    """
    answers = row["answers"]
    if isinstance(answers, Mapping):
        columns = [check_list(column, f"answers.{name}") for name, column in answers.items()]
        if len(set(map(len, columns))) > 1:
            raise field_error("answers", "has columns of different lengths", "add one entry per answer")
        answers = [dict(zip(answers, entry, strict=True)) for entry in zip(*columns, strict=True)]
    answers = check_objects(answers, "answers", "{text, pm_score}")
    texts = texts_of(answers, "answers", "text")
    return ranked_answers([], texts, scores_of(answers, "answers", "pm_score", "score", "votes"))


def _tagged(row: Row) -> Fields:
    response = row["output"] if row.get("instruction") is not None else _tagged_turns(row)[-1:]
    return {"response": response, "rating": int(_tag(row))}


_RANKINGS: tuple[Entry, ...] = (
    # Comparisons of two answers
    ("LLaMA-Factory pair", "instruction, chosen, rejected", _is_text_pair("instruction"), TASK, pair_of(*IN_PAIR)),
    ("Orca pair", "question, chosen, rejected", _is_text_pair("question", "input"), _question, pair_of(*IN_PAIR)),
    ("ShareGPT pair", "conversations, chosen, rejected", has("conversations", *IN_PAIR),
     lambda row: {**id_and_category(row), "prompt": _sharegpt_turns(row)},
     lambda row: {name: [_sharegpt_turn(row[name], name)] for name in IN_PAIR}),
    # The same with OpenAI's names, as in LLaMA-Factory and axolotl
    ("messages pair", "messages, chosen, rejected", is_messages_pair,
     lambda row: {**id_and_category(row), "prompt": row["messages"]},
     lambda row: {name: [row[name]] for name in IN_PAIR}),
    # Binarized format of argilla/ultrafeedback-binarized-preferences
    ("UltraFeedback pair", "instruction, chosen_response, rejected_response", has("instruction", "chosen_response"),
     instruction(category="source"),
     lambda row: {**pair_of("chosen_response", "rejected_response")(row), **id_and_category(row)}),
    # lvwerra/stack-exchange-paired: `response_j` was voted above `response_k`
    ("StackExchange pair", "question, response_j, response_k", has("question", "response_j"), _question,
     pair_of("response_j", "response_k")),
    # lmsys/lmsys-arena-human-preference-55k: `prompt` and responses are JSON lists of strings
    ("Arena 55k", "prompt, response_a, response_b, winner_model_a", has_any("winner_model_a"), arena_55k_questions,
     arena_55k_answers),
    # Native spreadsheet format: two answers, and a column with the better one
    ("preferred", "prompt, response_a, response_b, preferred", has_any("response_a", "response_b"), prompt_field,
     compared_answers("response_a", "response_b", lambda row: preference_in_words(row, "preferred"), labeler="labeler")),
    ("Chatbot Arena", "conversation_a, conversation_b, winner", has("conversation_a", "winner"), arena_questions,
     arena_answers),
    # Ranked by `better_response_id` (helpfulness); `safer_response_id` is the second label
    ("SafeRLHF", "prompt, response_0, response_1, better_response_id", has("better_response_id"), prompt_field,
     compared_answers("response_0", "response_1", lambda row: preference_by_number(row, "better_response_id"))),
    ("summarize_from_feedback", "info, summaries, choice",
     lambda row: has("info", "summaries")(row) and isinstance(row["info"], Mapping), _post_to_summarize, _summaries),
    # `labels` is 1 where A is preferred and 0 where B is (card of stanfordnlp/SHP, "Data Structure")
    ("SHP", "history, human_ref_A, human_ref_B, labels", has_any("human_ref_A", "human_ref_B"), _shp_post,
     compared_answers("human_ref_A", "human_ref_B",
               lambda row: -preference_by_number(row, "labels", "use 1 where A is preferred, 0 where B is"), id="post_id")),
    ("WebGPT", "question, answer_0, score_0, answer_1, score_1", has("question", "answer_0"), _webgpt_question,
     compared_answers("answer_0", "answer_1", lambda row: score_of(row, "score_0") - score_of(row, "score_1"))),
    # The preference strength is negative if the first response is better
    ("HelpSteer 2", "prompt, response_1, response_2, preference_strength", has("prompt", "preference_strength"),
     prompt_field, compared_answers("response_1", "response_2", lambda row: -score_of(row, "preference_strength"))),
    ("HelpSteer 3", "context, response1, response2, overall_preference", has("context", "overall_preference"),
     lambda row: {"prompt": row["context"], "category": text_or_none(row.get("domain"))},
     compared_answers("response1", "response2", lambda row: -score_of(row, "overall_preference"))),
    ("AlpacaEval", "instruction, output_1, output_2, preference", has("instruction", "output_1", "output_2"), TASK,
     alpaca_eval_answers),
    # Rankings of several answers
    ("qa-feedback", "question, prediction 1, ..., preference", has("question", "prediction 1", "preference"),
     qa_feedback_question, qa_feedback_answers),
    ("Nectar", "prompt, answers {answer, rank}", has("prompt", "answers"), prompt_field, _nectar),
    ("UltraFeedback", "instruction, completions", has("instruction", "completions"), instruction(category="source"),
     _ultrafeedback),
    ("scored answers", "question, answers {text, pm_score}", has("question", "answers"), _question, _scored_answers),
    # One rated answer per row
    ("HelpSteer", "prompt, response, helpfulness", has("prompt", "response", "helpfulness"), prompt_field,
     lambda row: {"response": row["response"], "rating": row["helpfulness"]}),
    ("KTO", "prompt, completion, label", lambda row: has("prompt", "completion")(row) and row.get("label") in (0, 1),
     prompt_field, lambda row: {"response": row["completion"], "rating": int(row["label"])}),
    ("LLaMA-Factory KTO", "instruction, output, kto_tag", _is_tagged, _tagged_prompt, _tagged),
)  # fmt: skip
_DEMONSTRATIONS: tuple[Entry, ...] = (
    ("ShareGPT", "conversations {from, value}", has("conversations", without=IN_PAIR),
     lambda row: {**id_and_category(row), "messages": _sharegpt_turns(row)}, lambda row: {}),
    ("Capybara", "conversation {input, output}", has("conversation", without=IN_PAIR), _capybara, lambda row: {}),
    ("UltraChat", "data [text, ...]", _is_ultrachat,
     lambda row: {**id_and_category(row), "messages": alternating_turns(row["data"], "data")}, lambda row: {}),
    ("GSM8K", "question, answer", has("question", "answer", without=("answers", "response")), _question,
     completion_of("answer")),
    ("OpenOrca", "question, response", has("question", "response"), _question, completion_of("response")),
    # Alpaca's `text` (all fields in a template) is ignored
    ("Alpaca", "instruction, input, output", has("instruction", "output"), TASK, completion_of("output")),
    ("Dolly", "instruction, context, response", has("instruction", "response", without=("completions", "chosen_response")),
     TASK, completion_of("response")),
)  # fmt: skip
PUBLISHED = tuple(
    published(name, kind, fields, matches, prompt, answers)
    for kind, layouts in ((Ranking, _RANKINGS), (Demonstration, _DEMONSTRATIONS))
    for name, fields, matches, prompt, answers in layouts
)
