import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from align.batches.encoding import (
    Limits,
    encode_demonstrations,
    encode_prompts,
    encode_rankings,
    tie_equal_responses,
)
from align.core.errors import UserError
from align.data import Ranking
from align.model_registry.tiny import byte_tokenizer
from align.models.loading import LoadedModel
from align.tokenization import Tokenization
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
    with pytest.raises(UserError, match=r"rows.jsonl: all demonstrations exceed the limits"):
        encode_demonstrations(source, loaded, Limits(100, 50, "drop"), False)


def prompts_of(lengths):
    return [{"prompt": "x" * length} for length in lengths]


def test_what_drop_leaves_out_is_counted_by_limit(load_sharp, write, caplog):
    rows = [{"prompt": "Hi", "completion": "x" * n} for n in (1, 50, 60)] + [{"prompt": "y" * 90, "completion": "x" * 70}]
    source = write(*rows)
    found = encode_demonstrations(source, load_sharp("tiny-gpt2"), Limits(90, 40, "drop"), False)
    assert len(found) == 1
    over = "3 over max_response_tokens 40, 1 over max_prompt_tokens 90"
    assert caplog.messages == [f"{source}: dropped 3 of 4 demonstrations ({over})"]


def test_what_truncate_shortens_is_counted(load_sharp, caplog):
    loaded = load_sharp("tiny-gpt2")
    assert len(encode_prompts(prompts_of([1] * 3 + [90] * 97), loaded, Limits(80, 9, "truncate"), False)) == 100
    assert caplog.messages == ["prompts in memory: truncated 97 of 100 prompts (97 over max_prompt_tokens 80)"]


def test_drop_that_leaves_less_than_a_tenth_is_an_error(load_sharp):
    loaded, limits = load_sharp("tiny-gpt2"), Limits(80, 9, "drop")
    assert len(encode_prompts(prompts_of([1] + [90] * 9), loaded, limits, False)) == 1
    assert refusal(encode_prompts, prompts_of([1] + [90] * 10), loaded, limits, False) == (
        "prompts in memory: overlong drop leaves 1 of 11 prompts (10 over max_prompt_tokens 80), fewer than 10%; "
        "raise the limit, set overlong to truncate, or remove the long rows"
    )


def test_turns_that_drop_takes_from_a_conversation_are_counted(load_sharp, caplog):
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    rows = [{"messages": [*turns, {"role": "assistant", "content": "x" * 50}]}]
    found = encode_demonstrations(rows, load_sharp("tiny-t5"), Limits(200, 10, "drop"), False)
    assert len(found) == 1  # the first answer; an encoder-decoder reads each turn apart
    assert caplog.messages[0].startswith(
        "demonstrations in memory: dropped turns of 1 of 1 demonstrations (1 over max_response_tokens 10)"
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
    (line,) = caplog.messages
    assert line.startswith(f"{path}: skipped 2 rankings with all responses tied")
    with pytest.raises(UserError, match="all 2 rankings are fully tied"):
        encode_rankings(write(tie, tie), loaded, limits, False)


def cut_rows(*reasons):
    return [{"prompt": "Hi", "completion": "One, two", "finish_reason": reason} for reason in reasons]


@pytest.mark.parametrize(("reason", "is_cut"), [("length", True), ("MAX_TOKENS", True), ("stop", False), (None, False)])
def test_a_demonstration_that_was_cut_has_no_end_token_and_is_counted(load_sharp, caplog, reason, is_cut):
    loaded = load_sharp("tiny-gpt2")
    (found,) = encode_demonstrations(cut_rows(reason), loaded, Limits(100, 100), False)
    whole = loaded.tokenization.response_ids("One, two")
    assert found.response == (whole[:-1] if is_cut else whole)
    assert len(found.loss_mask) == len(found.response)
    assert [("1 of 1" in line and "no EOS" in line) for line in caplog.messages] == [True] * is_cut


def test_only_the_last_turn_of_a_conversation_was_cut(load_sharp):
    loaded = load_sharp("tiny-gpt2")
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b")) * 2]
    end = loaded.tokenization.end_id
    (complete,) = encode_demonstrations([{"messages": turns}], loaded, Limits(100, 100), False)
    (cut,) = encode_demonstrations([{"messages": turns, "finish_reason": "length"}], loaded, Limits(100, 100), False)
    assert complete.response == [*cut.response, end]
    assert cut.response.count(end) == 1


RESPONSES = st.lists(st.text("ab", max_size=6), min_size=2, max_size=5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(responses=RESPONSES, data=st.data(), limit=st.integers(2, 5), scored=st.booleans())
def test_responses_with_equal_ids_after_truncation_are_ties(load_sharp, responses, data, limit, scored):
    """And a score is read at the end token of each, which a language model learns after complete ones alone."""
    loaded = load_sharp("tiny-gpt2")
    end = loaded.tokenization.end_id
    rank_of = {text: data.draw(st.integers(1, 4), label=text) for text in responses}
    reasons = [data.draw(st.sampled_from(["stop", "length"])) for _ in responses]
    row = {"prompt": "Hi", "responses": responses, "ranks": [rank_of[text] for text in responses], "finish_reason": reasons}
    other = {"prompt": "Hi", "responses": ["c", "d"], "ranks": [1, 2]}
    found, *more = encode_rankings([row, other], loaded, Limits(100, limit, "truncate"), False, scored=scored)
    if not more:  # all responses are ties
        assert len({text[: limit - scored] for text in responses}) < len(responses) or len(set(row["ranks"])) == 1
        return
    assert max(map(len, found.responses)) <= limit
    pairs = [(i, j) for i in range(len(responses)) for j in range(i)]
    for i, j in pairs:
        if found.responses[i] == found.responses[j]:
            assert found.ranks[i] == found.ranks[j]
    for text, ids, reason in zip(responses, found.responses, reasons, strict=True):
        is_complete = len(text) < limit and (reason == "stop" or not text)
        assert (ids[-1] == end) == (scored or is_complete)
    if scored:
        counts = [len(ids) - (len(text) >= limit or reason == "length") for text, ids, reason in
                  zip(responses, found.responses, reasons, strict=True)]  # fmt: skip
        assert found.written_tokens == counts
    if len(set(map(tuple, found.responses))) == len(responses):
        levels = sorted(set(row["ranks"]))
        assert found.ranks == [levels.index(rank) + 1 for rank in row["ranks"]]


def test_best_and_worst_of_three_that_are_equal_say_nothing_of_the_third(load_sharp, caplog):
    row = {"prompt": "Hi", "responses": ["aaaa1", "b", "aaaa2"], "ranks": [1, 2, 3]}
    more = {"prompt": "Hi", "responses": ["aaaa1", "aaaa2", "b"], "ranks": [1, 2, 3]}
    loaded = load_sharp("tiny-gpt2")
    (found,) = encode_rankings([row, more], loaded, Limits(100, 4, "truncate"), False)
    assert found.ranks == [1, 1, 2]
    assert sum("2 rankings have responses with identical token ids" in line for line in caplog.messages) == 1


def test_preferences_between_equal_responses_are_ties():
    matrix = ((0.0, 0.9, 0.6), (0.1, 0.0, 0.2), (0.3, 0.7, 0.0))
    record = Ranking(
        prompt=({"role": "user", "content": "Hi"},), responses=("a", "b", "c"), ranks=(1, 2, 3), preferences=matrix
    )
    ranks, preferences = tie_equal_responses([[5], [6], [5]], record)
    assert ranks == [1, 1, 1]
    assert preferences == ((0.0, 0.9, 0.0), (0.1, 0.0, 0.2), (0.0, 0.7, 0.0))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_all_overlong_records_are_counted_in_one_error(load_sharp, lengths):
    rows = [{"prompt": "Hi", "completion": "x" * length} for length in lengths]
    loaded, limits = load_sharp("tiny-gpt2"), Limits(100, 20)
    over = [length + 1 for length in lengths if length + 1 > 20]
    if not over:
        assert len(encode_demonstrations(rows, loaded, limits, False)) == len(rows)
        return
    said = refusal(encode_demonstrations, rows, loaded, limits, False)
    assert f"record {next(i for i, n in enumerate(lengths, 1) if n + 1 > 20)}: the response has {over[0]} tokens" in said
    if len(over) > 1:
        assert f"{len(over)} of {len(rows)} demonstrations are too long: {len(over)} over max_response_tokens 20" in said
        assert f"the longest {max(over)}" in said


def test_a_row_that_the_template_refuses_is_skipped_and_counted(load_sharp, caplog):
    loaded = load_sharp("tiny-gpt2")
    refusing = loaded.tokenization.tokenizer.chat_template
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + refusing
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = refusing
    loaded = LoadedModel(loaded.backbone, Tokenization(tokenizer), loaded.base)
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    rows = [{"prompt": turns, "completion": "a"}, {"prompt": "Hi", "completion": "b"}]
    assert "record 1: the chat template fails" in refusal(encode_demonstrations, rows, loaded, Limits(100, 100), False)
    (found,) = encode_demonstrations(rows, loaded, Limits(100, 100), True)
    assert found.response == loaded.tokenization.response_ids("b")
    assert "skipped 1 bad row of 2:" in caplog.text
    assert "no system turn" in caplog.text
    said = refusal(encode_demonstrations, rows[:1], loaded, Limits(100, 100), True)
    assert "no usable demonstration" in said
    assert "no system turn" in said
