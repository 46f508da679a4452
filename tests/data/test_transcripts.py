"""Transcripts as in HH-RLHF, and text that only looks like one; sentences of a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.core.errors import UserError
from align.data.conversation import segment_ends
from align.data.formats import convert_row
from align.data.records import Demonstration, Prompt, Ranking
from tests.data.rows import assistant, user

ONE = (user("Name a moon."),)
THREE = (user("1"), assistant("2"), user("3"))
WAITING = [
    ("\n\nHuman: 1\n\nAssistant: 2\n\nHuman: 3\n\nAssistant:", THREE),  # HH-RLHF, Dahoas/rm-static
    ("Human: 1\r\n\r\nAssistant: 2\r\n\r\nHuman: 3\r\n\r\nAssistant:", THREE),
    ("Human: 1\n\nAssistant: 2\n\nHuman: 3", THREE),
    ("Human: Name a moon.\n\nAssistant:", ONE),
    ("\n\nHuman: Name a moon.", ONE),
    # a name that does not begin a turn is part of a message
    ("Human: a\nHuman: b\n\nAssistant: c\n\nHuman: d\n\nAssistant:", (user("a\nHuman: b"), assistant("c"), user("d"))),
    ("Human: Go on. Human: Hi Assistant: Yo\n\nAssistant:", (user("Go on. Human: Hi Assistant: Yo"),)),
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
    "Human: 1\nAssistant: 2\nHuman: 3\nAssistant:",  # without blank lines it may be prose
    " Human: Name a moon. Assistant:",
    "Human: a species.\nApe: a family.",
    "Human: hi\nAssistant: hello\n\nTranslate this conversation into French.",
    "Human: 1 Assistant: 2 Human: 3",
    "Assistant: I help.\nHuman: Who are you?",
    "hUMAN: 1 Assistant:",
]


@pytest.mark.parametrize("text", PROSE, ids=range(len(PROSE)))
def test_prose_is_one_message(text):
    assert convert_row({"prompt": text}, Prompt)[1] == [Prompt(prompt=(user(text),))]


def test_a_transcript_in_which_the_assistant_has_spoken_last_is_refused():
    with pytest.raises(UserError, match="field 'prompt': ends with an assistant turn"):
        convert_row({"prompt": "\n\nHuman: 1\n\nAssistant: 2\n\nAssistant:"}, Prompt)


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("A b. C d! E", ["A b.", "C d!", "E"]),
        ("One.\nTwo\n\n- three (four.) Five.  ", ["One.", "Two", "- three (four.)", "Five."]),
        ('"Yes." Pi is 3.14...', ['"Yes."', "Pi is 3.14..."]),
        ("今天。明天！后天", ["今天。", "明天！", "后天"]),
        ("هل؟ نعم.", ["هل؟", "نعم."]),
        (" \n ", []),
        ("", []),
    ],
)
def test_sentences_and_lines(text, segments):
    ends = segment_ends(text)
    assert [text[start:end].strip() for start, end in zip([0, *ends], ends, strict=False)] == segments


@given(st.text(alphabet=st.sampled_from(list("a.!? \n\"')。\u00a0é")), max_size=60))
def test_segments_cover_all_that_is_written(text):
    ends = segment_ends(text)
    assert ends == sorted(set(ends))
    assert (ends[-1] if ends else 0) == len(text.rstrip())
    assert all(text[end - 1].strip() for end in ends)
    assert all(text[start:end].strip() for start, end in zip([0, *ends], ends, strict=False))
