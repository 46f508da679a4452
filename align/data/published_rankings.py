"""Layouts of published rankings: pairs, comparisons of two answers, rankings of several, and ratings of single answers."""

import math
import re
from collections.abc import Callable, Mapping, Sequence

from align.data.conversation import check_conversation, check_prompt
from align.data.fields import check_list, check_score, check_text, field_error, required_field, short_repr, text_or_none
from align.data.layouts import id_and_category
from align.data.published import (
    IN_PAIR,
    Fields,
    PublishedLayout,
    Row,
    has,
    has_any,
    instruction,
    layouts_of,
    prompt_field,
    question,
    read_turn,
    read_turns,
)
from align.data.records import Ranking, evenly_spaced, ranks_from_scores

RANKINGS: list[PublishedLayout] = []
"""The first match counts."""
ranking = layouts_of(Ranking, RANKINGS)


# --- Comparisons of two answers ---


def _pair(row: Row, chosen: str, rejected: str) -> Fields:
    """A pair of texts in two fields."""
    texts = [check_text(row.get(name), name) for name in (chosen, rejected)]
    if texts[0] == texts[1]:
        raise field_error(rejected, f"is the same text as '{chosen}'", "remove the row")
    return {"chosen": texts[0], "rejected": texts[1], "margin": row.get("margin"), "labeler": row.get("labeler")}


def _is_text_pair(*prompt: str) -> Callable[[Row], bool]:
    """Whether a row has a pair of texts and one of these fields, and no `prompt`."""
    is_pair, asks = has(*IN_PAIR, without=("prompt",)), has_any(*prompt)
    return lambda row: is_pair(row) and asks(row) and isinstance(row["chosen"], str)


@ranking("Orca pair", "question, chosen, rejected", _is_text_pair("question", "input"), question)
@ranking("LLaMA-Factory pair", "instruction, chosen, rejected", _is_text_pair("instruction"), instruction("input"))
def _plain_pair(row: Row) -> Fields:
    return _pair(row, *IN_PAIR)


def _sharegpt_prompt(row: Row) -> Fields:
    return {**id_and_category(row), "prompt": read_turns(row)}


@ranking("ShareGPT pair", "conversations, chosen, rejected", has("conversations", *IN_PAIR), _sharegpt_prompt)
def _sharegpt_pair(row: Row) -> Fields:
    return {name: [read_turn(row[name], name)] for name in IN_PAIR}


_is_ultrafeedback_pair = has("instruction", "chosen_response")
_BINARIZED = "instruction, chosen_response, rejected_response"


@ranking("UltraFeedback pair", _BINARIZED, _is_ultrafeedback_pair, instruction(category="source"))
def _ultrafeedback_pair(row: Row) -> Fields:
    """The binarized form of argilla/ultrafeedback-binarized-preferences."""
    return {**_pair(row, "chosen_response", "rejected_response"), **id_and_category(row)}


@ranking("StackExchange pair", "question, response_j, response_k", has("question", "response_j"), question)
def _stack_pair(row: Row) -> Fields:
    """lvwerra/stack-exchange-paired: `response_j` was voted above `response_k`."""
    return _pair(row, "response_j", "response_k")


def _compared(row: Row, names: tuple[str, str], preference: float) -> Fields:
    """A ranking of the responses in two fields; the preference for the first is above, below or equal to 0."""
    ranks = (1, 1) if preference == 0 else (1, 2) if preference > 0 else (2, 1)
    return {"responses": [check_text(row.get(name), name) for name in names], "ranks": ranks}


PREFERENCES = {
    **dict.fromkeys(("a", "1", "first", "response_a", "answer_a", "model_a"), 1),
    **dict.fromkeys(("b", "2", "second", "response_b", "answer_b", "model_b"), -1),
    **dict.fromkeys(("tie", "tie_(bothbad)", "both", "neither", "same", "equal"), 0),
}
"""Words for the better of two answers: above 0 the first."""


def _preference(row: Row, field: str) -> int:
    word = str(required_field(row, field, "write a, b or tie")).strip().lower().replace(" ", "_")
    if word in ("0", "0.0"):  # a column of 0 and 1 may count from 0, or tell whether the first answer is better
        raise field_error(field, f"is {short_repr(row[field])}, and a code of 0 and 1 is ambiguous", "write a, b or tie")
    if word not in PREFERENCES:
        raise field_error(field, f"is {short_repr(row[field])}", "use a, b or tie")
    return PREFERENCES[word]


@ranking("preferred", "prompt, response_a, response_b, preferred", has_any("response_a", "response_b"), prompt_field)
def _preferred(row: Row) -> Fields:
    """This project's form for spreadsheets: two answers, and a column that names the better one."""
    return {**_compared(row, ("response_a", "response_b"), _preference(row, "preferred")), "labeler": row.get("labeler")}


def _arena_questions(row: Row) -> Fields:
    turns = check_conversation(row["conversation_a"], "conversation_a")
    return {"prompt": turns[:-1] if turns[-1]["role"] == "assistant" else turns, "id": row.get("question_id")}


@ranking("Chatbot Arena", "conversation_a, conversation_b, winner", has("conversation_a", "winner"), _arena_questions)
def _arena(row: Row) -> Fields:
    """Two conversations about the same questions; those that part before the last answer cannot be compared."""
    sides = [check_conversation(row.get(name), name) for name in ("conversation_a", "conversation_b")]
    if sides[0][:-1] != sides[1][:-1] or sides[0][-1]["role"] != "assistant":
        wrong = "differs from 'conversation_a' before its last turn"
        raise field_error("conversation_b", wrong, "remove the row, or use skip_bad_rows")
    models = [row.get("model_a"), row.get("model_b")]
    last = {name: side[-1]["content"] for name, side in zip("ab", sides, strict=True)}
    found = _compared(last, ("a", "b"), _preference(row, "winner"))
    return {**found, "model": models if all(isinstance(model, str) for model in models) else None}


def _one_of_two(row: Row, field: str, value: object) -> int:
    if value not in (0, 1) or isinstance(value, bool):
        raise field_error(field, f"is {short_repr(value)}", "use 0 or 1")
    return 1 if value == 0 else -1


@ranking("SafeRLHF", "prompt, response_0, response_1, better_response_id", has("better_response_id"), prompt_field)
def _safe_rlhf(row: Row) -> Fields:
    """By `better_response_id`, the more helpful one; `safer_response_id` is the second label."""
    better = _one_of_two(row, "better_response_id", row["better_response_id"])
    return _compared(row, ("response_0", "response_1"), better)


def _post_to_summarize(row: Row) -> Fields:
    """A Reddit post or a news article, in the text form of Stiennon et al. 2020, appendix B."""
    info = row["info"]
    post = [f"SUBREDDIT: r/{info.get('subreddit')}", f"TITLE: {info.get('title')}", f"POST: {info.get('post')}"]
    shown = post if info.get("post") else [f"Article:\n{check_text(info.get('article'), 'info.article')}"]
    return {"prompt": "\n\n".join([*shown, "TL;DR:"]), "id": info.get("id")}


def _is_summarized(row: Row) -> bool:
    return has("info", "summaries")(row) and isinstance(row["info"], Mapping)


@ranking("summarize_from_feedback", "info, summaries, choice", _is_summarized, _post_to_summarize)
def _summaries(row: Row) -> Fields:
    texts = {f"summaries[{i}].text": entry.get("text") for i, entry in enumerate(_objects(row["summaries"], "summaries"))}
    if len(texts) != 2:
        raise field_error("summaries", f"is a list of {len(texts)}", "give two summaries")
    first, second = texts
    better = _one_of_two(row, "choice", row.get("choice"))
    return {**_compared(texts, (first, second), better), "labeler": row.get("worker")}


def _shp_post(row: Row) -> Fields:
    """The post is `history`, title and body; its forum, without the split that `domain` ends with, is the category."""
    domain = text_or_none(row.get("domain"))
    forum = re.sub("_(train|validation|test)$", "", domain) if domain else None
    return {"prompt": check_prompt(row.get("history"), "history"), "category": forum}


@ranking("SHP", "history, human_ref_A, human_ref_B, labels", has_any("human_ref_A", "human_ref_B"), _shp_post)
def _shp(row: Row) -> Fields:
    """Two comments; `labels` is 1 where A is preferred and 0 where B is (card of stanfordnlp/SHP, "Data Structure")."""
    label = row.get("labels")
    found = _compared(row, ("human_ref_A", "human_ref_B"), 1 if label == 1 else -1)
    if label not in (0, 1) or isinstance(label, bool):
        raise field_error("labels", f"is {short_repr(label)}", "use 1 where A is preferred, 0 where B is")
    return {**found, "id": text_or_none(row.get("post_id"))}


def _webgpt_question(row: Row) -> Fields:
    asked = row["question"]
    return {"prompt": check_prompt(asked.get("full_text") if isinstance(asked, Mapping) else asked, "question.full_text")}


@ranking("WebGPT", "question, answer_0, score_0, answer_1, score_1", has("question", "answer_0"), _webgpt_question)
def _webgpt(row: Row) -> Fields:
    scores = [check_score(row.get(name), name) for name in ("score_0", "score_1")]
    return _compared(row, ("answer_0", "answer_1"), scores[0] - scores[1])


_HELPSTEER_2 = "prompt, response_1, response_2, preference_strength"
_HELPSTEER_3 = "context, response1, response2, overall_preference"


@ranking("HelpSteer 2", _HELPSTEER_2, has("prompt", "preference_strength"), prompt_field)
def _helpsteer_2(row: Row) -> Fields:
    """The strength of the preference is below 0 where the first response is better."""
    strength = check_score(row["preference_strength"], "preference_strength")
    return _compared(row, ("response_1", "response_2"), -strength)


def _context(row: Row) -> Fields:
    return {"prompt": row["context"], "category": text_or_none(row.get("domain"))}


@ranking("HelpSteer 3", _HELPSTEER_3, has("context", "overall_preference"), _context)
def _helpsteer_3(row: Row) -> Fields:
    return _compared(row, ("response1", "response2"), -check_score(row["overall_preference"], "overall_preference"))


# --- Rankings of several answers ---


def _objects(value: object, field: str, wanted: str = "{text, ...}") -> Sequence[Row]:
    entries = check_list(value, field)
    for i, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise field_error(f"{field}[{i}]", f"is {short_repr(entry)}", f"write {wanted}")
    return entries


@ranking("Nectar", "prompt, answers {answer, rank}", has("prompt", "answers"), prompt_field)
def _nectar(row: Row) -> Fields:
    """Seven answers with ranks, 1 for the best."""
    answers = _objects(row["answers"], "answers", "{answer, rank}")
    ranks = [check_score(answer.get("rank"), f"answers[{i}].rank") for i, answer in enumerate(answers)]
    texts = [check_text(answer.get("answer"), f"answers[{i}].answer") for i, answer in enumerate(answers)]
    models = [text_or_none(answer.get("model")) for answer in answers]
    return _ranked(texts, [-rank for rank in ranks], models)


@ranking("UltraFeedback", "instruction, completions", has("instruction", "completions"), instruction(category="source"))
def _ultrafeedback(row: Row) -> Fields:
    """The raw form (openbmb/UltraFeedback): ranked by the mean of their aspect scores, or else by `overall_score`.

    The mean comes first because `overall_score` was wrong for many rows (a 1 stored as 10; card of
    argilla/ultrafeedback-binarized-preferences). The mean goes from 1 to 5 and `overall_score` to 10: if one completion has
    no mean (null, or NaN in the published files), all are ranked by the latter.
    """
    completions = _objects(row["completions"], "completions", "{response, overall_score, ...}")
    has_means = not any(_is_missing(completion.get("fine-grained_score")) for completion in completions)
    name = "fine-grained_score" if has_means else "overall_score"
    scores = [check_score(entry.get(name), f"completions[{i}].{name}") for i, entry in enumerate(completions)]
    texts = [check_text(entry.get("response"), f"completions[{i}].response") for i, entry in enumerate(completions)]
    return _ranked(texts, scores, [text_or_none(completion.get("model")) for completion in completions])


def _is_missing(score: object) -> bool:
    return score is None or (isinstance(score, float) and math.isnan(score))


@ranking("scored answers", "question, answers {text, pm_score}", has("question", "answers"), question)
def _scored_answers(row: Row) -> Fields:
    """Answers with votes: {text, pm_score}, or lists by column ({"text": [...], "score": [...]}).

    HuggingFaceH4/stack-exchange-preferences: log2 of 1 + votes, 1 more if accepted, -1 for a negative number.
    """
    answers = _by_row(row["answers"]) if isinstance(row["answers"], Mapping) else row["answers"]
    answers = _objects(answers, "answers", "{text, pm_score}")
    texts = [check_text(answer.get("text"), f"answers[{i}].text") for i, answer in enumerate(answers)]
    scores = []
    for i, answer in enumerate(answers):
        name = next((field for field in ("pm_score", "score", "votes") if answer.get(field) is not None), "pm_score")
        scores.append(check_score(answer.get(name), f"answers[{i}].{name}"))
    return _ranked(texts, scores, [])


def _by_row(answers: Row) -> list[Row]:
    columns = {name: check_list(column, f"answers.{name}") for name, column in answers.items()}
    count = max(map(len, columns.values()), default=0)
    if any(len(column) != count for column in columns.values()):
        raise field_error("answers", "has columns of different lengths", "give one entry for each answer")
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def _ranked(texts: Sequence[str], scores: Sequence[float], models: Sequence[str | None]) -> Fields:
    """Responses by their scores; of more than nine, nine evenly spaced by rank, in the order of the file."""
    order = sorted(range(len(texts)), key=lambda i: -scores[i])
    kept = sorted(order[i] for i in evenly_spaced(len(order)))
    ranks = ranks_from_scores([scores[i] for i in kept])
    named = [models[i] for i in kept] if models and all(models) else None
    return {"responses": [texts[i] for i in kept], "ranks": ranks, "model": named}


# --- One rated answer a row ---


@ranking("HelpSteer", "prompt, response, helpfulness", has("prompt", "response", "helpfulness"), prompt_field)
def _helpful(row: Row) -> Fields:
    return {"response": row["response"], "rating": row["helpfulness"]}


def _is_kto(row: Row) -> bool:
    return has("prompt", "completion")(row) and row.get("label") in (0, 1)


@ranking("KTO", "prompt, completion, label", _is_kto, prompt_field)
def _kto(row: Row) -> Fields:
    return {"response": row["completion"], "rating": int(row["label"])}


def _is_tagged(row: Row) -> bool:
    answered = has("instruction", "output")(row) or has("conversations")(row) or has("messages")(row)
    return answered and row.get("kto_tag") in (0, 1)


def _tagged_turns(row: Row) -> list[Fields]:
    return read_turns(row) if row.get("conversations") is not None else check_list(row["messages"], "messages")


def _tagged_prompt(row: Row) -> Fields:
    if row.get("instruction") is not None:
        return instruction("input")(row)
    return {**id_and_category(row), "prompt": _tagged_turns(row)[:-1]}


@ranking("LLaMA-Factory KTO", "instruction, output, kto_tag", _is_tagged, _tagged_prompt)
def _tagged(row: Row) -> Fields:
    response = row["output"] if row.get("instruction") is not None else _tagged_turns(row)[-1:]
    return {"response": response, "rating": int(row["kto_tag"])}
