import pytest

from align.batches.encoding import Limits, encode_demonstrations, encode_prompts, encode_rankings
from align.core.errors import UserError
from tests.files import write_rows
from tests.refusals import refusal

LIMITS = Limits(3, 2)


def test_what_is_too_long_is_an_error_dropped_or_truncated():
    assert refusal(LIMITS.apply, [1, 2, 3, 4], [5], "data.jsonl: record 7") == (
        "data.jsonl: record 7: the prompt has 4 tokens, max_prompt_tokens is 3; "
        "raise the limit, or set overlong to drop or truncate"
    )
    assert "the response has 3 tokens, max_response_tokens is 2" in refusal(LIMITS.apply, [1], [5, 6, 7], "here")
    drop, truncate = Limits(3, 2, "drop"), Limits(3, 2, "truncate")
    assert LIMITS.apply([1, 2, 3], [4, 5], "") == drop.apply([1, 2, 3], [4, 5], "") == ([1, 2, 3], [4, 5])
    assert drop.apply([1, 2, 3, 4], [5], "") is None
    assert drop.apply([1], [5, 6, 7], "") is None
    # A prompt's end is nearest to the answer; a response is learned from its beginning.
    assert truncate.apply([1, 2, 3, 4], [5, 6, 7], "") == ([2, 3, 4], [5, 6])


@pytest.fixture
def write(tmp_path):
    return lambda *rows: write_rows(tmp_path / "rows.jsonl", rows)


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


def test_a_truncated_turn_keeps_its_mask_in_step_and_nothing_left_is_an_error(load_sharp, write):
    source, loaded = write({"prompt": "Hi", "completion": "x" * 50}), load_sharp("tiny-gpt2")
    (turn,) = encode_demonstrations(source, loaded, Limits(100, 50, "truncate"), False)
    assert len(turn.response) == len(turn.loss_mask) == 50
    with pytest.raises(UserError, match=r"rows.jsonl: no demonstration is left within the limits; raise them"):
        encode_demonstrations(source, loaded, Limits(100, 50, "drop"), False)


def prompts_of(lengths):
    return [{"prompt": "x" * length} for length in lengths]


def test_what_drop_leaves_out_is_counted_by_limit(load_sharp, write, caplog):
    rows = [{"prompt": "Hi", "completion": "x" * n} for n in (1, 50, 60)] + [{"prompt": "y" * 90, "completion": "x" * 70}]
    source = write(*rows)
    found = encode_demonstrations(source, load_sharp("tiny-gpt2"), Limits(90, 40, "drop"), False)
    assert len(found) == 1
    over = "3 over max_response_tokens 40, 1 over max_prompt_tokens 90"
    assert caplog.messages == [f"{source}: overlong drop left out 3 of 4 demonstrations ({over})"]


def test_what_truncate_shortens_is_counted(load_sharp, caplog):
    loaded = load_sharp("tiny-gpt2")
    assert len(encode_prompts(prompts_of([1] * 3 + [90] * 97), loaded, Limits(80, 9, "truncate"), False)) == 100
    assert caplog.messages == [
        "prompts in memory: overlong truncate shortened 97 of 100 prompts (97 over max_prompt_tokens 80)"
    ]


def test_drop_that_leaves_less_than_a_tenth_is_an_error(load_sharp):
    loaded, limits = load_sharp("tiny-gpt2"), Limits(80, 9, "drop")
    assert len(encode_prompts(prompts_of([1] + [90] * 9), loaded, limits, False)) == 1
    assert refusal(encode_prompts, prompts_of([1] + [90] * 10), loaded, limits, False) == (
        "prompts in memory: overlong drop leaves 1 of 11 prompts (10 over max_prompt_tokens 80), less than 10%; "
        "raise the limit, set overlong to truncate, or remove the long rows"
    )


def test_turns_that_drop_takes_from_a_conversation_are_counted(load_sharp, caplog):
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    rows = [{"messages": [*turns, {"role": "assistant", "content": "x" * 50}]}]
    found = encode_demonstrations(rows, load_sharp("tiny-t5"), Limits(200, 10, "drop"), False)
    assert len(found) == 1  # the first answer; an encoder-decoder reads each turn apart
    assert caplog.messages[0].startswith(
        "demonstrations in memory: overlong drop dropped turns of 1 of 1 demonstrations (1 over max_response_tokens 10)"
    )


def test_nothing_is_reported_where_all_records_fit_and_by_other_processes(load_sharp, caplog, monkeypatch):
    encode_prompts(prompts_of([1, 2]), load_sharp("tiny-gpt2"), Limits(80, 9, "drop"), False)
    monkeypatch.setenv("RANK", "1")
    encode_prompts(prompts_of([1, 90]), load_sharp("tiny-gpt2"), Limits(80, 9, "drop"), False)
    assert not caplog.messages


def test_ties_of_all_responses_are_left_out_and_counted(load_sharp, write, caplog):
    tie = {"prompt": "Hi", "responses": ["a", "b"], "ranks": [1, 1]}
    path = write({"prompt": "Hi", "chosen": "a", "rejected": "b"}, tie, tie)
    loaded, limits = load_sharp("tiny-gpt2"), Limits(100, 100)
    assert [item.ranks for item in encode_rankings(path, loaded, limits, False)] == [[1, 2]]
    assert caplog.messages == [f"{path}: left out 2 rankings with all responses tied: ties add nothing to a loss"]
    with pytest.raises(UserError, match="each of its 2 rankings ties all responses; there is nothing to learn"):
        encode_rankings(write(tie, tie), loaded, limits, False)
