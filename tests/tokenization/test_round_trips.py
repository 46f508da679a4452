"""Sampled ids through text and back: the same ids, or `reads_back` is False and `align sample` says so."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.errors import UserError
from align.model_registry.tiny import byte_tokenizer
from align.tokenization import ConversationError, Tokenization
from align.tokenization.encoded import SampledResponse
from tests.tokenization.test_published_templates import CASES, DEEPSEEK_R1, QWEN_3, USER, published
from tests.tokenization.test_special_tokens import merging_tokenizer

THINKING = (  # Nemotron's kind: opens the thought for sampling, and writes recorded answers as they are
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}"
    "{% else %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
TEMPLATES = {name: case[:2] for name, case in CASES.items()} | {"nemotron": (THINKING, "<|im_end|>")}
KEPT = ("nemotron", "llama-3", "bytes", "plain", "raw", "merges")
"""Templates that write a recorded answer as it is, after the prompt of sampling."""


def tokenization_of(name):
    if name in TEMPLATES:
        return Tokenization(published(*TEMPLATES[name]))
    if name == "merges":
        return Tokenization(merging_tokenizer())
    return Tokenization(byte_tokenizer(), "auto" if name == "bytes" else name)


TOKENIZATIONS = {name: tokenization_of(name) for name in (*TEMPLATES, "bytes", "plain", "raw", "merges")}
PIECES = ["Hi", " there", "\n", "\n\n", "<think>", "</think>", "2 + 2", "`</think>`", ".", "é", "🤖", "Human:", "  "]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)


def sampled(found, ids, ended):
    return SampledResponse((USER,), found.prompt_ids((USER,)), ids, found.text(ids), ended)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(TOKENIZATIONS)), TEXTS, st.booleans(), st.data())
def test_sampled_ids_are_read_back_or_reported(name, text, ended, data):
    found = TOKENIZATIONS[name]
    ids = found.text_ids(text)
    ids = [*ids, found.end_id] if ended else ids[: data.draw(st.integers(1, len(ids)))]
    response = sampled(found, ids, ended)
    try:
        prompt, answer = found.answer_ids((USER,), response.text, ended=ended)
        is_same = prompt + answer == response.prompt_ids + ids
    except ConversationError:
        is_same = False
    assert found.reads_back(response) == is_same
    kept = found.tokenizer.decode(ids, skip_special_tokens=True)
    outer = kept != kept.strip() if not found._begun else kept != kept.rstrip()
    canonical = found.text_ids(kept) == ids[: len(ids) - ended]
    if name in KEPT and kept.strip() and not outer and canonical:
        assert is_same, f"{name}: {response.text!r}"


def test_a_text_begins_with_the_thought_that_its_prompt_has_opened():
    found = TOKENIZATIONS["nemotron"]
    for thought in ("Two and two.\n</think>\n\nIt is 4.", "Two and", "It quotes <think> and </think>.\n</think>4"):
        ids = found.text_ids(thought)
        assert found.text(ids) == "<think>\n" + thought
        assert found.reads_back(sampled(found, ids, False))
        assert found.reads_back(sampled(found, [*ids, found.end_id], True))


def test_a_thought_that_a_template_drops_is_reported():
    found = Tokenization(published(DEEPSEEK_R1))
    assert not found.reads_back(sampled(found, [*found.text_ids("Two.</think>4"), found.end_id], True))
    assert found.reads_back(sampled(found, found.text_ids("Two and"), False))


def test_a_header_with_special_tokens_is_no_part_of_the_text():
    """gpt-oss writes a channel before its answer."""
    found = TOKENIZATIONS["gpt-oss"]
    header = found.chat.template_ids("<|channel|>final<|message|>")
    ids = [*header, *found.text_ids("It is 4."), found.end_id]
    assert found.text(ids) == "It is 4."
    assert found.reads_back(sampled(found, ids, True))
    assert not found.reads_back(sampled(found, ids[len(header) :], True))


def rendered(found, **variables):
    return found.tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True, **variables)


def test_variables_of_a_template_are_part_of_it(tmp_path):
    tokenizer = published(THINKING, "<|im_end|>")
    expected = rendered(Tokenization(tokenizer), enable_thinking=False)
    found = Tokenization(published(THINKING, "<|im_end|>"), "auto[enable_thinking=false]")
    assert rendered(found) == expected
    assert expected.endswith("<think></think>")
    found.tokenizer.save_pretrained(tmp_path)
    assert rendered(Tokenization(type(tokenizer).from_pretrained(tmp_path))) == expected
    (tmp_path / "own.jinja").write_text(THINKING)
    assert rendered(Tokenization(byte_tokenizer(), f"{tmp_path}/own.jinja[enable_thinking=False]")) == expected


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("auto[thinking=false]", "'thinking'"),
        ("auto[enable_thinking]", "auto[enable_thinking=false]"),
        ("plain[enable_thinking=false]", "'enable_thinking'"),
    ],
)
def test_a_variable_that_is_not_used_is_refused(name, said):
    with pytest.raises(UserError) as error:
        Tokenization(published(THINKING, "<|im_end|>"), name)
    assert said in str(error.value)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([True, False, None, 3, 0.5, "high", 'it\'s "so"', "é\\n"]))
def test_values_of_variables_are_those_that_are_given(value):
    template = QWEN_3 + "{{ level | string }}"
    written = (
        {True: "true", False: "false", None: "null"}.get(value, str(value)) if not isinstance(value, int | float) else value
    )
    given = Tokenization(
        published(template, "<|im_end|>"), f"auto[level={str(written).lower() if value is True else written}]"
    )
    assert rendered(given).endswith(str(value))


def test_a_tokenizer_with_several_templates_and_no_default_needs_a_name():
    def tokenizer():
        made = byte_tokenizer()
        made.chat_template = {"chat": made.chat_template, "rag": THINKING}
        return made

    with pytest.raises(UserError, match="chat, rag"):
        Tokenization(tokenizer())
    assert rendered(Tokenization(tokenizer(), "rag")).endswith("<think>\n")
    assert rendered(Tokenization(tokenizer(), "rag[enable_thinking=false]")).endswith("<think></think>")
    with pytest.raises(UserError, match="chat, rag"):
        Tokenization(tokenizer(), "rga")
