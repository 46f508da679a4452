"""The parts of a demonstration that are learned: the assistant's turns, in one row if the chat template allows it."""

from align.data.records import Conversation, Demonstration
from align.examples import EncodedDemonstration
from align.tokenization.base import Tokenization


def encode_demonstration(
    tokenization: Tokenization, demonstration: Demonstration, one_row: bool
) -> list[EncodedDemonstration]:
    """Examples that teach each assistant turn of a demonstration's continuation.

    Args:
        one_row: True puts the whole continuation into one response with the user's turns masked, so that nothing is
            read twice; False (and templates that rewrite earlier turns) makes an example of each turn.
    """
    messages = (*demonstration.prompt, *demonstration.continuation)
    assistant_turns = [i for i in range(len(demonstration.prompt), len(messages)) if messages[i]["role"] == "assistant"]
    if one_row and len(assistant_turns) > 1:
        joined = _example_of_all_turns(tokenization, messages, assistant_turns)
        if joined is not None:
            return [joined]
    return [_example_of_turn(tokenization, messages, i) for i in assistant_turns]


def _example_of_turn(tokenization: Tokenization, messages: Conversation, index: int) -> EncodedDemonstration:
    response = tokenization.response_ids(messages[index]["content"])
    return EncodedDemonstration(tokenization.prompt_ids(messages[:index]), response, [True] * len(response))


def _example_of_all_turns(
    tokenization: Tokenization, messages: Conversation, assistant_turns: list[int]
) -> EncodedDemonstration | None:
    """All turns in one row; None if the template does not continue its own rendering word for word.

    None also if a message spells a token: the text between two answers is a mix of template and message.
    """
    if tokenization.spells_special_token(messages):
        return None
    response: list[int] = []
    learn: list[bool] = []
    end = str(tokenization.tokenizer.decode([tokenization.end_id]))
    rendered = tokenization.render(messages[: assistant_turns[0]])
    for number, index in enumerate(assistant_turns):
        words = tokenization.response_ids(messages[index]["content"])
        response, learn = response + words, learn + [True] * len(words)
        if number + 1 < len(assistant_turns):
            head = rendered + messages[index]["content"] + end
            following = tokenization.render(messages[: assistant_turns[number + 1]])
            if not following.startswith(head):
                return None
            between = tokenization.template_ids(following[len(head) :])
            response, learn, rendered = response + between, learn + [False] * len(between), following
    return EncodedDemonstration(tokenization.prompt_ids(messages[: assistant_turns[0]]), response, learn)
