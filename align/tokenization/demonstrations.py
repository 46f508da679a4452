"""Training examples of a demonstration: its assistant turns, in one row if the chat template allows it."""

from align.data.records import Conversation, Demonstration
from align.tokenization.base import Tokenization
from align.tokenization.encoded import EncodedDemonstration


def encode_demonstration(
    tokenization: Tokenization, demonstration: Demonstration, one_row: bool
) -> list[EncodedDemonstration]:
    """Return examples that teach each assistant turn of a demonstration's continuation.

    Args:
        one_row: put the whole continuation into one response with the user's turns masked. Otherwise, and for templates
            that rewrite earlier turns, each turn is an example.
    """
    messages = (*demonstration.prompt, *demonstration.continuation)
    assistant_turns = [i for i in range(len(demonstration.prompt), len(messages)) if messages[i]["role"] == "assistant"]
    if one_row and len(assistant_turns) > 1:
        joined = _example_of_all_turns(tokenization, messages, assistant_turns)
        if joined is not None:
            return [joined]
    return [_example_of_turn(tokenization, messages, i) for i in assistant_turns]


def _example_of_turn(tokenization: Tokenization, messages: Conversation, index: int) -> EncodedDemonstration:
    prompt, response = tokenization.answer_ids(messages[:index], messages[index]["content"])
    return EncodedDemonstration(prompt, response, [True] * len(response))


def _example_of_all_turns(
    tokenization: Tokenization, messages: Conversation, assistant_turns: list[int]
) -> EncodedDemonstration | None:
    """Return all turns in one row, or None if the template does not continue its own rendering token for token."""
    if tokenization.spells_special_token(messages):  # text between two answers would mix template and message
        return None
    joined = _join_texts(tokenization, messages, assistant_turns)
    return joined or _join_ids(tokenization, messages, assistant_turns)


def _join_texts(
    tokenization: Tokenization, messages: Conversation, assistant_turns: list[int]
) -> EncodedDemonstration | None:
    """Tokenize each text once; None if answers are not plain continuations of the prompt."""
    response: list[int] = []
    learn: list[bool] = []
    rendered = tokenization.render(messages[: assistant_turns[0]])
    for number, index in enumerate(assistant_turns):
        text = messages[index]["content"]
        words = tokenization.plain_continuation(rendered, tokenization.render(messages[: index + 1], False), text)
        if words is None:
            return None
        response, learn = response + words, learn + [True] * len(words)
        if number + 1 < len(assistant_turns):
            head = rendered + text + str(tokenization.tokenizer.decode(words[-1:]))
            following = tokenization.render(messages[: assistant_turns[number + 1]])
            if not following.startswith(head):
                return None
            between = tokenization.template_ids(following[len(head) :])
            response, learn, rendered = response + between, learn + [False] * len(between), following
    tokenization.require_turns(messages)
    return EncodedDemonstration(tokenization.prompt_ids(messages[: assistant_turns[0]]), response, learn)


def _join_ids(tokenization: Tokenization, messages: Conversation, assistant_turns: list[int]) -> EncodedDemonstration | None:
    """Join the ids of all turns; None if the last turn's row does not begin with those of the others."""
    turns = [tokenization.answer_ids(messages[:index], messages[index]["content"]) for index in assistant_turns]
    rows = [[*prompt, *response] for prompt, response in turns]
    if any(rows[-1][: len(row)] != row for row in rows):
        return None
    start = len(turns[0][0])
    learn = [False] * len(rows[-1])
    for prompt, response in turns:
        learn[len(prompt) : len(prompt) + len(response)] = [True] * len(response)
    return EncodedDemonstration(rows[-1][:start], rows[-1][start:], learn[start:])
