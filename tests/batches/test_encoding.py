"""Records within the limits: what is too long, what becomes of it, and that an error names the record."""

import json

import pytest

from align.batches.encoding import Limits, encode_demonstrations, encode_prompts
from align.errors import UserError

LIMITS = Limits(3, 2)


def test_what_fits_is_returned_as_it_is():
    assert LIMITS.apply([1, 2, 3], [4, 5], "here") == ([1, 2, 3], [4, 5])


def test_too_long_is_an_error_that_names_record_length_limit_and_remedy():
    with pytest.raises(UserError) as error:
        LIMITS.apply([1, 2, 3, 4], [5], "data.jsonl: record 7")
    assert str(error.value) == (
        "data.jsonl: record 7: the prompt has 4 tokens, max_prompt_tokens is 3; "
        "raise the limit, or set overlong to drop or truncate"
    )
    with pytest.raises(UserError, match="the response has 3 tokens, max_response_tokens is 2"):
        LIMITS.apply([1], [5, 6, 7], "here")


def test_too_long_can_be_dropped_or_truncated():
    drop, truncate = Limits(3, 2, "drop"), Limits(3, 2, "truncate")
    assert drop.apply([1, 2, 3, 4], [5], "") is None
    assert drop.apply([1], [5, 6, 7], "") is None
    # A prompt's end is nearest to the answer; a response is learned from its beginning.
    assert truncate.apply([1, 2, 3, 4], [5, 6, 7], "") == ([2, 3, 4], [5, 6])


@pytest.fixture
def write(tmp_path):
    def write_rows(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write_rows


def test_prompts_keep_what_was_read_and_leave_room_for_the_response(load_sharp, write):
    loaded = load_sharp("tiny-gpt2")  # a context of 1,024 tokens, one a byte
    rows = {"prompt": "Hi", "id": "a", "category": "greeting"}, {"prompt": "x" * 200}
    (found,) = encode_prompts(write(*rows), loaded, Limits(100, 900, "drop"), False)
    assert (found.id, found.category, found.conversation) == ("a", "greeting", ({"role": "user", "content": "Hi"},))
    assert found.ids == loaded.tokenization.prompt_ids(found.conversation)
    with pytest.raises(UserError, match=r"rows.jsonl: record 2: \d+ prompt and 900 response tokens do not fit"):
        encode_prompts(write(*rows), loaded, Limits(1000, 900), False)


def test_an_error_names_a_record_by_its_id_or_else_by_its_place(load_sharp, write):
    loaded, long = load_sharp("tiny-gpt2"), {"prompt": "Hi", "completion": "x" * 50}
    with pytest.raises(UserError, match=r"rows.jsonl: record 2: the response has 51 tokens"):
        encode_demonstrations(write({"prompt": "Hi", "completion": "x"}, long), loaded, Limits(100, 50), False)
    with pytest.raises(UserError, match=r"rows.jsonl: record seven: the response"):
        encode_demonstrations(write(long | {"id": "seven"}), loaded, Limits(100, 50), False)


def test_a_truncated_turn_keeps_its_mask_in_step(load_sharp, write):
    source = write({"prompt": "Hi", "completion": "x" * 50})
    (turn,) = encode_demonstrations(source, load_sharp("tiny-gpt2"), Limits(100, 50, "truncate"), False)
    assert len(turn.response) == len(turn.loss_mask) == 50


def test_nothing_left_is_an_error(load_sharp, write):
    with pytest.raises(UserError, match=r"rows.jsonl: no demonstration is left within the limits; raise them"):
        encode_demonstrations(
            write({"prompt": "Hi", "completion": "x" * 50}), load_sharp("tiny-gpt2"), Limits(100, 50, "drop"), False
        )
