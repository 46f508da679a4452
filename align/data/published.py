"""Layouts of published data sets, as a table: how each is recognized, and its rows in this project's layout.

A converted row is a demonstration (`messages`, or `prompt` and `completion`), a ranking (`prompt`, `responses`, `ranks`), a
pair (`prompt`, `chosen`, `rejected`) or one rated answer (`prompt`, `response`, `rating`). The fields are those of the data
sets' cards.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from align.data.conversation import Message, check_conversation, check_prompt
from align.data.fields import check_list, check_score, check_text, field_error, required_field, short_repr
from align.data.layouts import id_and_category, instruction_prompt
from align.data.records import Demonstration, Ranking, Record, evenly_spaced, ranks_from_scores

Row = Mapping[str, Any]


class PublishedLayout(NamedTuple):
    """One layout: its name, the kind of record, its fields in words, its recognition, and its conversion."""

    name: str
    kind: type[Record]
    fields: str
    matches: Callable[[Row], bool]
    convert: Callable[[Row], dict[str, Any]]


def has(*fields: str, without: tuple[str, ...] = ()) -> Callable[[Row], bool]:
    """Whether a row has all `fields` and none of `without`; None counts as missing."""
    return lambda row: all(row.get(f) is not None for f in fields) and all(row.get(f) is None for f in without)


def _compared(row: Row, prompt: object, fields: tuple[str, str], preference: float, **more: object) -> dict[str, Any]:
    """A ranking of the responses in two fields; the preference for the first is above, below or equal to 0."""
    ranks = (1, 1) if preference == 0 else (1, 2) if preference > 0 else (2, 1)
    responses = [check_text(required_field(row, name, "add it"), name) for name in fields]
    return {**id_and_category(row), "prompt": prompt, "responses": responses, "ranks": ranks, **more}


# --- Conversations in other names: ShareGPT, LLaMA-Factory, Capybara, OpenOrca ---

SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}


def _turn(turn: object, field: str) -> dict[str, Any]:
    """A turn {from, value}; its other fields, such as `weight`, are kept."""
    if not isinstance(turn, Mapping):
        raise field_error(field, f"is {short_repr(turn)}, not a turn", "write {from, value}")
    speaker = turn.get("from")
    if speaker != "system" and speaker not in SHAREGPT_ROLES:
        raise field_error(f"{field}.from", f"is {short_repr(speaker)}", "use system, human or gpt")
    content = check_text(turn.get("value"), f"{field}.value", may_be_empty=speaker == "system")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {**others, "role": SHAREGPT_ROLES.get(speaker, "system"), "content": content}


def _turns(row: Row) -> list[dict[str, Any]]:
    turns = check_list(row["conversations"], "conversations")
    if all(isinstance(turn, Mapping) and "role" in turn for turn in turns):  # some copies use the usual names
        return turns
    return [_turn(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]


def sharegpt(row: Row) -> dict[str, Any]:
    return {**id_and_category(row), "messages": _turns(row)}


def capybara(row: Row) -> dict[str, Any]:
    turns: list[Message] = []
    for i, pair in enumerate(check_list(row["conversation"], "conversation")):
        if not isinstance(pair, Mapping):
            raise field_error(f"conversation[{i}]", f"is {short_repr(pair)}", "write {input, output}")
        for name, role in (("input", "user"), ("output", "assistant")):
            turns.append({"role": role, "content": check_text(pair.get(name), f"conversation[{i}].{name}")})
    return {**id_and_category(row), "messages": turns}


def openorca(row: Row) -> dict[str, Any]:
    return {**id_and_category(row), "prompt": row["question"], "completion": row["response"]}


# --- Pairs ---


def sharegpt_pair(row: Row) -> dict[str, Any]:
    answers = {name: [_turn(row[name], name)] for name in ("chosen", "rejected")}
    return {**id_and_category(row), "prompt": _turns(row), **answers}


def alpaca_pair(row: Row) -> dict[str, Any]:
    return {**instruction_prompt(row, "input"), "chosen": row["chosen"], "rejected": row["rejected"]}


def orca_pair(row: Row) -> dict[str, Any]:
    question = row.get("question") or row.get("input")
    return {**id_and_category(row), "prompt": question, "chosen": row["chosen"], "rejected": row["rejected"]}


PREFERENCES = {
    **dict.fromkeys(("a", "1", "first", "response_a", "answer_a", "model_a"), 1),
    **dict.fromkeys(("b", "2", "second", "response_b", "answer_b", "model_b"), -1),
    **dict.fromkeys(("tie", "tie_(bothbad)", "both", "equal", "0"), 0),
}
"""Words for the better of two answers: above 0 the first."""


def _preference(row: Row, field: str) -> int:
    word = str(required_field(row, field, "write a, b or tie")).strip().lower().replace(" ", "_")
    if word not in PREFERENCES:
        raise field_error(field, f"is {short_repr(row[field])}", "use a, b or tie")
    return PREFERENCES[word]


def preferred(row: Row) -> dict[str, Any]:
    """This project's form for spreadsheets: two answers, and a column that names the better one."""
    more = {name: row[name] for name in ("labeler",) if row.get(name) is not None}
    prompt = required_field(row, "prompt", "write the text that both responses answer")
    return _compared(row, prompt, ("response_a", "response_b"), _preference(row, "preferred"), **more)


def arena(row: Row) -> dict[str, Any]:
    """Two conversations about the same questions; those that part before the last answer cannot be compared."""
    sides = [check_conversation(row.get(name), name) for name in ("conversation_a", "conversation_b")]
    if sides[0][:-1] != sides[1][:-1] or sides[0][-1]["role"] != "assistant":
        wrong = "differs from 'conversation_a' before its last turn"
        raise field_error("conversation_b", wrong, "remove the row, or use skip_bad_rows")
    last = {name: side[-1]["content"] for name, side in zip("ab", sides, strict=True)}
    models = [row.get("model_a"), row.get("model_b")]
    named = {"model": models} if all(isinstance(model, str) for model in models) else {}
    identified = {"id": row.get("question_id"), **named}
    return _compared(last, sides[0][:-1], ("a", "b"), _preference(row, "winner"), **identified)


def webgpt(row: Row) -> dict[str, Any]:
    question = row["question"]
    text = question.get("full_text") if isinstance(question, Mapping) else question
    scores = [check_score(row.get(name), name) for name in ("score_0", "score_1")]
    return _compared(row, check_prompt(text, "question.full_text"), ("answer_0", "answer_1"), scores[0] - scores[1])


def safe_rlhf(row: Row) -> dict[str, Any]:
    """By `better_response_id`, the more helpful one; `safer_response_id` is the second label."""
    better = row["better_response_id"]
    if better not in (0, 1) or isinstance(better, bool):
        raise field_error("better_response_id", f"is {short_repr(better)}", "use 0 or 1")
    return _compared(row, row["prompt"], ("response_0", "response_1"), 1 - 2 * better)


def helpsteer_2(row: Row) -> dict[str, Any]:
    """The preferences of HelpSteer 2: the strength is below 0 where the first response is better."""
    strength = check_score(row["preference_strength"], "preference_strength")
    return _compared(row, row["prompt"], ("response_1", "response_2"), -strength)


def helpsteer_3(row: Row) -> dict[str, Any]:
    """As in HelpSteer 2; the prompt is a list of turns."""
    preference = check_score(row["overall_preference"], "overall_preference")
    return _compared(row, row["context"], ("response1", "response2"), -preference, category=row.get("domain"))


# --- Rankings of several ---


def nectar(row: Row) -> dict[str, Any]:
    """Seven answers with ranks, 1 for the best."""
    answers = _answers(row["answers"], "answers")
    ranks = [check_score(answer.get("rank"), f"answers[{i}].rank") for i, answer in enumerate(answers)]
    kept = evenly_spaced(len(answers))
    return {
        **id_and_category(row),
        "prompt": row["prompt"],
        "responses": [answers[i].get("answer") for i in kept],
        "ranks": ranks_from_scores([-ranks[i] for i in kept]),
        "model": [answers[i].get("model") for i in kept] if all(answer.get("model") for answer in answers) else None,
    }


def _answers(value: object, field: str) -> Sequence[Row]:
    answers = check_list(value, field)
    for i, answer in enumerate(answers):
        if not isinstance(answer, Mapping):
            raise field_error(f"{field}[{i}]", f"is {short_repr(answer)}", "write an object for each answer")
    return answers


def summarize(row: Row) -> dict[str, Any]:
    """Two summaries of a Reddit post or a news article, in the text form of Stiennon et al. 2020, appendix B."""
    info, summaries = row["info"], _answers(row["summaries"], "summaries")
    if len(summaries) != 2 or row.get("choice") not in (0, 1):
        raise field_error("choice", f"is {short_repr(row.get('choice'))} of {len(summaries)}", "use 0 or 1 of 2 summaries")
    post = [f"SUBREDDIT: r/{info.get('subreddit')}", f"TITLE: {info.get('title')}", f"POST: {info.get('post')}"]
    shown = post if info.get("post") else [f"Article:\n{check_text(info.get('article'), 'info.article')}"]
    texts = {f"summaries[{i}].text": summary.get("text") for i, summary in enumerate(summaries)}
    prompt = "\n\n".join([*shown, "TL;DR:"])
    first, second = texts
    more = {"id": info.get("id"), "labeler": row.get("worker")}
    return _compared(texts, prompt, (first, second), 1 - 2 * row["choice"], **more)


# --- One rated answer a row ---


def helpsteer(row: Row) -> dict[str, Any]:
    return {"prompt": row["prompt"], "response": row["response"], "rating": row["helpfulness"]}


def kto(row: Row) -> dict[str, Any]:
    return {**id_and_category(row), "prompt": row["prompt"], "response": row["completion"], "rating": int(row["label"])}


def llama_factory_kto(row: Row) -> dict[str, Any]:
    rating = int(row["kto_tag"])
    if row.get("instruction") is not None:
        return {**instruction_prompt(row, "input"), "response": row.get("output"), "rating": rating}
    turns = _turns(row) if row.get("conversations") is not None else check_list(row.get("messages"), "messages")
    return {**id_and_category(row), "prompt": turns[:-1], "response": turns[-1:], "rating": rating}


def _is_preferred(row: Row) -> bool:
    """Any of its fields: the error then names the missing one."""
    return any(row.get(field) is not None for field in ("response_a", "response_b"))


def _is_kto(row: Row) -> bool:
    return has("prompt", "completion")(row) and isinstance(row.get("label"), bool)


def _is_llama_factory_kto(row: Row) -> bool:
    answered = has("instruction", "output")(row) or has("conversations")(row) or has("messages")(row)
    return answered and isinstance(row.get("kto_tag"), bool)


def _is_orca_pair(row: Row) -> bool:
    return has("chosen", "rejected", without=("prompt", "instruction"))(row) and (
        has("question")(row) or (has("input")(row) and isinstance(row["chosen"], str))
    )


_is_helpsteer_2, _is_helpsteer_3 = has("prompt", "preference_strength"), has("context", "overall_preference")
_in_pair = ("chosen", "rejected")
PUBLISHED = (
    PublishedLayout(
        "ShareGPT", Demonstration, "conversations {from, value}", has("conversations", without=_in_pair), sharegpt
    ),
    PublishedLayout(
        "Capybara", Demonstration, "conversation {input, output}", has("conversation", without=_in_pair), capybara
    ),
    PublishedLayout("OpenOrca", Demonstration, "question, response", has("question", "response"), openorca),
    PublishedLayout("preferred", Ranking, "prompt, response_a, response_b, preferred", _is_preferred, preferred),
    PublishedLayout("KTO", Ranking, "prompt, completion, label", _is_kto, kto),
    PublishedLayout("LLaMA-Factory KTO", Ranking, "instruction, output, kto_tag", _is_llama_factory_kto, llama_factory_kto),
    PublishedLayout(
        "LLaMA-Factory pair", Ranking, "instruction, chosen, rejected", has("instruction", "chosen", "rejected"), alpaca_pair
    ),
    PublishedLayout(
        "ShareGPT pair", Ranking, "conversations, chosen, rejected", has("conversations", *_in_pair), sharegpt_pair
    ),
    PublishedLayout("Orca pair", Ranking, "question, chosen, rejected", _is_orca_pair, orca_pair),
    PublishedLayout("Nectar", Ranking, "prompt, answers {answer, rank}", has("prompt", "answers"), nectar),
    PublishedLayout(
        "WebGPT", Ranking, "question, answer_0, score_0, answer_1, score_1", has("question", "answer_0", "answer_1"), webgpt
    ),
    PublishedLayout("summarize_from_feedback", Ranking, "info, summaries, choice", has("info", "summaries"), summarize),
    PublishedLayout(
        "SafeRLHF", Ranking, "prompt, response_0, response_1, better_response_id", has("better_response_id"), safe_rlhf
    ),
    PublishedLayout(
        "HelpSteer 2", Ranking, "prompt, response_1, response_2, preference_strength", _is_helpsteer_2, helpsteer_2
    ),
    PublishedLayout(
        "HelpSteer 3", Ranking, "context, response1, response2, overall_preference", _is_helpsteer_3, helpsteer_3
    ),
    PublishedLayout(
        "HelpSteer", Ranking, "prompt, response, helpfulness", has("prompt", "response", "helpfulness"), helpsteer
    ),
    PublishedLayout(
        "Chatbot Arena", Ranking, "conversation_a, conversation_b, winner", has("conversation_a", "conversation_b"), arena
    ),
)
"""The first match counts."""
