"""Sentences of a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.data.conversation import segment_ends


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
