"""Transcripts in the spellings of published data, and text that only looks like one."""

import pytest

from align.core.errors import UserError
from align.data.formats import convert_row
from align.data.records import Demonstration, Prompt, Ranking
from tests.data.rows import assistant, system, user

ONE = (user("Name a moon."),)
THREE = (user("1"), assistant("2"), user("3"))
WAITING = [
    ("\n\nHuman: 1\n\nAssistant: 2\n\nHuman: 3\n\nAssistant:", THREE),  # HH-RLHF, Dahoas/rm-static
    (" Human: Name a moon. Assistant:", ONE),  # DeepSpeed-Chat, raw_datasets.py
    ("Human: Name a moon. Assistant:", ONE),  # DeepSpeed-Chat, a data set of local JSON files
    ("Human: 1 Assistant: 2 Human: 3 Assistant:", THREE),
    ("Human: Name a moon.\nAssistant:", ONE),
    ("Human: 1\nAssistant: 2\nHuman: 3\nAssistant: ", THREE),
    ("Human: 1\r\nAssistant: 2\r\nHuman: 3\r\nAssistant:", THREE),
    ("Human: 1\nAssistant: 2\nHuman: 3", THREE),
    ("Human: Name a moon.\n\nAssistant:", ONE),
    ("\n\nHuman: Name a moon.", ONE),
    ("User: 1\nAssistant: 2\nUser: 3\nAssistant:", THREE),
    ("USER: 1 ASSISTANT: 2 USER: 3 ASSISTANT:", THREE),
    ("prompter: 1\nassistant: 2\nprompter: 3\nassistant:", THREE),
    ("Human: Name a moon.\nAI:", ONE),
    ("### Human: 1### Assistant: 2### Human: 3### Assistant:", THREE),
    ("### Human: Name a moon.\n### Assistant:", ONE),
    # a name that does not begin a turn in this spelling is part of a message
    ("Human: a\nHuman: b\n\nAssistant: c\n\nHuman: d\n\nAssistant:", (user("a\nHuman: b"), assistant("c"), user("d"))),
    ("Human: What does User: mean?\nAssistant:", (user("What does User: mean?"),)),
    ("Human: Go on. Human: Hi Assistant: Yo Assistant:", (user("Go on. Human: Hi Assistant: Yo"),)),
]


@pytest.mark.parametrize(("text", "prompt"), WAITING, ids=range(len(WAITING)))
def test_a_prompt_is_read_as_turns(text, prompt):
    assert convert_row({"prompt": text}, Prompt)[1] == [Prompt(prompt=prompt)]
    (demonstration,) = convert_row({"prompt": text, "completion": " Yes."}, Demonstration)[1]
    assert demonstration == Demonstration(prompt=prompt, continuation=(assistant(" Yes."),))
    (ranking,) = convert_row({"prompt": text, "chosen": " Yes.", "rejected": " No."}, Ranking)[1]
    assert ranking == Ranking(prompt=prompt, responses=(" Yes.", " No."), ranks=(1, 2))


PROSE = [
    "What is a Human: in this list?\n\nHuman: 1\n\nAssistant: 2\n\nAssistant:",
    "Explain the difference. Human: mortal. Assistant:",
    "Humans: a history. Assistant:",
    "User: the word for a person who uses something. Define it.",
    "Human: a species.\nApe: a family.",
    "Human: hi\nAssistant: hello\n\nTranslate this conversation into French.",
    "Human: 1 Assistant: 2 Human: 3",  # without a line break or an end, it may be prose
    "Assistant: I help.\nHuman: Who are you?",
    "hUMAN: 1 Assistant:",
]


@pytest.mark.parametrize("text", PROSE, ids=range(len(PROSE)))
def test_prose_is_one_message(text):
    assert convert_row({"prompt": text}, Prompt)[1] == [Prompt(prompt=(user(text),))]


@pytest.mark.parametrize(
    ("before", "good", "bad"),
    [
        ("\n\nHuman: 1\n\nAssistant: 2\n\nHuman: 3\n\nAssistant:", " yes", " no"),
        ("Human: 1\nAssistant: 2\nHuman: 3\nAssistant:", " yes", " no"),
        (" Human: 1 Assistant: 2 Human: 3 Assistant:", " yes", " no"),
        ("prompter: 1\nassistant: 2\nprompter: 3\nassistant:", " yes", " no"),
    ],
)
def test_pairs_of_transcripts(before, good, bad):
    row = {"chosen": before + good, "rejected": before + bad}
    assert convert_row(row, Ranking)[1] == [Ranking(prompt=THREE, responses=("yes", "no"), ranks=(1, 2))]
    assert convert_row(row, Prompt)[1] == [Prompt(prompt=THREE)]


def test_a_transcript_in_which_the_assistant_has_spoken_last_is_refused():
    with pytest.raises(UserError, match="field 'prompt': ends with an assistant turn"):
        convert_row({"prompt": "\n\nHuman: 1\n\nAssistant: 2\n\nAssistant:"}, Prompt)


MESSAGES = [
    ([user("1"), assistant("2"), user("3")], THREE),
    ([user("1"), assistant("2"), user("3"), assistant("4")], THREE),
    ([system("s"), user("1"), assistant("2"), user("3"), assistant("4"), user("5")],
     (system("s"), *THREE, assistant("4"), user("5"))),
    ([system("s"), user("1"), assistant("2")], (system("s"), user("1"))),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "prompt"), MESSAGES, ids=range(len(MESSAGES)))
def test_the_prompt_of_messages_ends_with_the_last_user_turn(messages, prompt):
    assert convert_row({"messages": messages}, Prompt)[1] == [Prompt(prompt=prompt)]
