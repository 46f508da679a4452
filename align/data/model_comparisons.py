"""Layouts that compare models: Chatbot Arena, MT-bench, Arena-Hard, AlpacaEval and qa-feedback."""

import json
from collections.abc import Mapping
from itertools import combinations

from align.data.answers import (
    alternating_turns,
    compared_answers,
    named_models,
    preference_in_words,
    ranks_of_two,
    score_of,
)
from align.data.conversation import Conversation, check_conversation, check_prompt
from align.data.fields import check_list, check_text, field_error, id_or_none, required_field, short_repr, text_or_none
from align.data.layouts import Fields, Row
from align.data.records import ranks_from_scores


def is_question_turns(row: Row) -> bool:
    """Return whether a row is an MT-bench or Arena-Hard question."""
    return isinstance(row.get("turns"), list | tuple) and bool(row["turns"]) and row.get("choices") is None


def question_turn(row: Row) -> Fields:
    """Return the first turn of an MT-bench or Arena-Hard question. Later turns depend on an answer."""
    first = row["turns"][0]
    text = first.get("content") if isinstance(first, Mapping) else first
    id = id_or_none(row.get("question_id")) or id_or_none(row.get("uid"))
    return {"prompt": check_prompt(text, "turns[0]"), "id": id, "category": text_or_none(row.get("category"))}


def arena_questions(row: Row) -> Fields:
    """Read the turns before the judged answers."""
    turns = _arena_side(row, "conversation_a")
    id = id_or_none(row.get("question_id")) or id_or_none(row.get("id"))
    return {"prompt": turns[:-1] if turns[-1]["role"] == "assistant" else turns, "id": id}


def _arena_side(row: Row, field: str) -> Conversation:
    """Return a conversation up to the judged turn. MT-bench rows that judge `turn` 1 contain both turns."""
    turns = check_conversation(_decoded(row.get(field)), field)
    judged = row.get("turn")
    return turns[: 2 * judged] if isinstance(judged, int) and not isinstance(judged, bool) and judged > 0 else turns


def _decoded(value: object) -> object:
    """Decode a value if it is a JSON list in a string."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _arena_55k_texts(row: Row, field: str) -> list[str]:
    """Decode a column of lmsys-arena-human-preference-55k, which contains JSON lists."""
    texts = _decoded(required_field(row, field, "write the texts"))
    entries = [texts] if isinstance(texts, str) else check_list(texts, field)
    if not entries:
        raise field_error(field, "is empty", "add the texts or remove the row")
    return [check_text(text, f"{field}[{i}]") for i, text in enumerate(entries)]


def arena_55k_questions(row: Row) -> Fields:
    """Return the conversation up to the last answer of the first model."""
    questions, answered = _arena_55k_texts(row, "prompt"), _arena_55k_texts(row, "response_a")
    if len(questions) != len(answered):
        wrong = f"has {len(answered)} texts for {len(questions)} of 'prompt'"
        raise field_error("response_a", wrong, "remove the row or set skip_bad_rows")
    before = [text for pair in zip(questions[:-1], answered[:-1], strict=True) for text in pair]
    return {"prompt": alternating_turns([*before, questions[-1]], "prompt"), "id": id_or_none(row.get("id"))}


def qa_feedback_question(row: Row) -> Fields:
    """Return the question followed by its passages (title and sentences), separated by blank lines."""
    text, passages = check_text(row["question"], "question"), []
    for i, passage in enumerate(check_list(row.get("passages") or [], "passages")):
        _, *sentences = check_list(passage, f"passages[{i}]")
        passages.append(" ".join(check_text(sentence, f"passages[{i}]") for sentence in sentences))
    return {"prompt": "\n\n".join([text, *passages])}


def arena_answers(row: Row) -> Fields:
    """Compare two conversations with the same questions. Conversations that diverge before the last answer are rejected."""
    sides = [_arena_side(row, name) for name in ("conversation_a", "conversation_b")]
    if sides[0][:-1] != sides[1][:-1] or sides[0][-1]["role"] != "assistant":
        wrong = "differs from 'conversation_a' before its last turn"
        raise field_error("conversation_b", wrong, "remove the row or set skip_bad_rows")
    texts, models = [side[-1]["content"] for side in sides], named_models(row, "model_a", "model_b")
    return {"responses": texts, "ranks": ranks_of_two(preference_in_words(row, "winner")), "model": models}


def arena_55k_answers(row: Row) -> Fields:
    """Return the last answers of two models. In multi-turn rows, earlier answers must be identical."""
    sides = [_arena_55k_texts(row, name) for name in ("response_a", "response_b")]
    if sides[0][:-1] != sides[1][:-1]:
        wrong = "differs from 'response_a' before its last turn"
        raise field_error("response_b", wrong, "remove the row or set skip_bad_rows")
    flags = [str(row.get(f"winner_{name}")).strip().lower() for name in ("model_a", "model_b", "tie")]
    won = [flag in ("1", "1.0", "true") for flag in flags]
    if sum(won) != 1:
        raise field_error("winner_model_a", f"with the other winner fields is {', '.join(flags)}", "set exactly one to 1")
    texts = [side[-1] for side in sides]
    return {"responses": texts, "ranks": ranks_of_two(won[0] - won[1]), "model": named_models(row, "model_a", "model_b")}


def _alpaca_eval_preference(row: Row) -> float:
    """Return a positive number if the first output is better. `preference` is 1 (first) to 2 (second), 1.5 or 0 if tied."""
    value = score_of(row, "preference")
    if value and not 1 <= value <= 2:
        raise field_error("preference", f"is {value:g}", "use 1 for output_1, 2 for output_2, 1.5 for a tie")
    return 1.5 - value if value else 0.0


def alpaca_eval_answers(row: Row) -> Fields:
    """Read two outputs, the preferred one and its annotator."""
    compared = compared_answers("output_1", "output_2", _alpaca_eval_preference, labeler="annotator")(row)
    labeler = text_or_none(compared["labeler"])
    return {**compared, "labeler": labeler, "model": named_models(row, "generator_1", "generator_2")}


QA_PREDICTIONS = tuple(f"prediction {number}" for number in (1, 2, 3, 4))


def qa_feedback_answers(row: Row) -> Fields:
    """Rank four answers by the preferences for the pairs 12, 13, 14, 23, 24, 34 (0 equal, 1 first, 2 second).

    Pairwise preferences may form a cycle, so responses are ranked by their number of wins. A tie counts as half a win.
    """
    texts = [check_text(row.get(name), name) for name in QA_PREDICTIONS]
    preferences = check_list(row["preference"], "preference")
    pairs = list(combinations(range(len(texts)), 2))
    if len(preferences) != len(pairs) or any(choice not in (0, 1, 2) for choice in preferences):
        raise field_error("preference", f"is {short_repr(preferences)}", "use 0, 1 or 2 for each of the 6 pairs")
    wins, matrix = [0.0] * len(texts), [[0.0] * len(texts) for _ in texts]
    for (i, j), choice in zip(pairs, preferences, strict=True):
        wins[i] += (0.5, 1.0, 0.0)[choice]
        wins[j] += (0.5, 0.0, 1.0)[choice]
        matrix[i][j], matrix[j][i] = float(choice == 1), float(choice == 2)
    return {"responses": texts, "ranks": ranks_from_scores(wins), "preferences": matrix}
