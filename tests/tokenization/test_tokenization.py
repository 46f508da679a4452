import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.errors import UserError
from align.data.records import Demonstration
from align.model_registry.tiny import BOS, EOS, byte_tokenizer
from align.models.loading import load_tokenization
from align.tokenization import Tokenization, encode_demonstration
from align.tokenization.encoded import EncodedDemonstration
from tests.refusals import refusal

USER = ({"role": "user", "content": "Hi"},)
TALK = (
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "And?"},
)


def shown(tokenization, ids):
    """The text of ids, special tokens included."""
    return tokenization.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def tokenization(template="auto", own=True, append_eos=False, **settings):
    tokenizer = byte_tokenizer(append_eos)
    if not own:
        tokenizer.chat_template = None
    return Tokenization(tokenizer, template, **settings)


DIALOGUE = "System:\nBe kind.\n\nHuman:\nHi\n\nAssistant:\nHello<eos>\n\nHuman:\nAnd?\n\nAssistant:\n"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "System: Be kind.\nUser: Hi\nAssistant: Hello<eos>\nUser: And?\nAssistant: "),  # the tokenizer's own
        ({"own": False}, DIALOGUE),
        ({"template": "plain"}, DIALOGUE),
        ({"template": "raw"}, "Be kind.\nHi\nHello<eos>\nAnd?"),
    ],
    ids=str,
)
def test_templates(settings, text):
    found = tokenization(**settings)
    assert shown(found, found.prompt_ids(TALK)) == text


@pytest.fixture
def of_file(tmp_path):
    """`of_file(text)`: the tokenization of a template in a file."""

    def made(text):
        (tmp_path / "own.jinja").write_text(text)
        return tokenization(str(tmp_path / "own.jinja"))

    return made


def test_a_template_can_come_from_a_file(of_file):
    found = of_file("{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}>")
    assert shown(found, found.prompt_ids(USER)) == "[user] Hi >"
    assert refusal(tokenization, "no/such.jinja").startswith("chat_template 'no/such.jinja': No such file")


def test_a_tokenizer_without_an_end_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no EOS token"):
        Tokenization(tokenizer)


def test_the_end_of_a_turn_is_what_the_template_puts_behind_it_or_end_of_sequence(of_file):
    turn = "{{ m.role }}: {{ m.content }}<extra_id_3>\n"
    opening = "{% if add_generation_prompt %}assistant: {% endif %}"
    found = of_file("{% for m in messages %}" + turn + "{% endfor %}" + opening)
    ids = found.tokenizer.convert_tokens_to_ids(["<extra_id_3>"])
    assert [found.end_id] == ids
    assert found.end_ids == {ids[0], EOS}
    assert found.response_ids("ok")[-1] == ids[0]
    assert of_file("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}").end_id == EOS
    assert tokenization(extra_end_ids=(7, EOS)).end_ids == {EOS, 7}


def test_padding_is_never_the_end_unless_there_is_no_other():
    found = tokenization()
    assert found.pad_id == 0
    assert found.pad_id not in found.end_ids
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    assert Tokenization(tokenizer).pad_id == EOS


@pytest.mark.parametrize("text", ["Hello", "", "two\nlines", "Übung 🤖 中文", "a  b"])
def test_a_response_survives_the_way_to_ids_and_back(text):
    found = tokenization()
    ids = found.response_ids(text)
    assert ids[-1] == EOS
    assert len(ids) == len(text.encode()) + 1  # one token a byte, and the end
    assert found.text(ids) == text
    assert found.text([0, BOS, *found.response_ids(f"  {text} \n"), 0, 0]) == text  # without special tokens and outer space


CONVERSATION = Demonstration(
    prompt=TALK[:2],
    continuation=(
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "More"},
    ),
)


def test_one_row_holds_all_turns_with_the_users_masked():
    found = tokenization()
    (turn,) = encode_demonstration(found, CONVERSATION, one_row=True)
    assert shown(found, turn.prompt) == "System: Be kind.\nUser: Hi\nAssistant: "
    assert shown(found, turn.response) == "Hello<eos>\nUser: And?\nAssistant: More<eos>"
    learned = [token for token, learn in zip(turn.response, turn.loss_mask, strict=True) if learn]
    assert shown(found, learned) == "Hello<eos>More<eos>"
    # "Hello" and its end are 6 tokens, "\nUser: And?\nAssistant: " are 23 bytes, "More" and its end are 5 tokens.
    assert turn.loss_mask == [True] * 6 + [False] * 23 + [True] * 5


def contexts(turns):
    """Each learned token with everything that is read before it."""
    return [
        (tuple(turn.prompt + turn.response[:place]), token)
        for turn in turns
        for place, (token, learn) in enumerate(zip(turn.response, turn.loss_mask, strict=True))
        if learn
    ]


@pytest.mark.parametrize(("template", "rows"), [("auto", 1), ("plain", 1), ("raw", 2)])
def test_one_row_and_split_turns_teach_the_same_tokens_in_the_same_context(template, rows):
    """Raw text is split too: it continues a prompt without a break."""
    found = tokenization(template)
    joined, split = (encode_demonstration(found, CONVERSATION, one_row=one_row) for one_row in (True, False))
    assert (len(joined), len(split)) == (rows, 2)
    assert contexts(joined) == contexts(split)
    if template == "raw":
        assert [shown(found, turn.prompt) for turn in joined] == ["Be kind.\nHi", "Be kind.\nHi\nHello<eos>\nAnd?"]


def test_turns_are_split_where_the_template_rewrites_earlier_ones(of_file):
    found = of_file(  # writes earlier answers in capitals
        "{% for m in messages %}{{ m.role }}: {{ m.content if m.role == 'user' or loop.last else m.content | upper }} "
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    turns = encode_demonstration(found, CONVERSATION, one_row=True)
    second = "system: BE KIND. user: Hi assistant: HELLO user: And? assistant: "
    assert [shown(found, turn.prompt) for turn in turns] == ["system: BE KIND. user: Hi assistant: ", second]
    assert [shown(found, turn.response) for turn in turns] == ["Hello<eos>", "More<eos>"]


def test_an_earlier_answer_in_the_prompt_is_not_learned():
    demonstration = Demonstration(prompt=TALK, continuation=({"role": "assistant", "content": "More"},))
    found = tokenization()
    (turn,) = encode_demonstration(found, demonstration, one_row=True)
    assert turn == EncodedDemonstration(found.prompt_ids(TALK), found.response_ids("More"), [True] * 5)


def test_t5_reads_every_earlier_turn_with_its_encoder(sharp_folders):
    found = load_tokenization(sharp_folders["tiny-t5"])
    first, second = encode_demonstration(found, CONVERSATION, one_row=False)
    assert first.prompt[-1] == second.prompt[-1] == EOS
    assert shown(found, second.prompt).endswith("Hello<eos>\nUser: And?\nAssistant: <eos>")
    assert shown(found, second.response) == "More<eos>"


def test_a_tokenizer_that_is_missing_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    message = refusal(load_tokenization, str(tmp_path))
    assert message.startswith(f"{tmp_path}: ")
    assert "no tokenizer" in message


def test_a_completed_template_leaves_the_tokenizers_other_templates():
    tokenizer = byte_tokenizer()
    own, tools = tokenizer.chat_template, "{{ messages }}"
    tokenizer.chat_template = {"default": own, "tool_use": tools}
    found = Tokenization(tokenizer)
    assert found.prompt_ids(TALK) == tokenization().prompt_ids(TALK)
    assert tokenizer.chat_template == {"default": own, "tool_use": tools}
    assert found.reads_alike(tokenization())


WITHOUT_THOUGHTS = (
    "{% for m in messages %}{% set text = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}"
    "{{ '<extra_id_1>' + m.role + text }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<extra_id_1>assistant' }}{% endif %}"
)
WITH_EVERY_THOUGHT = (
    "{% for m in messages %}{{ '<extra_id_1>' + m.role }}{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}"
    "{{ '<think>' + (parts[0].split('<think>')[-1].strip() if parts|length > 1 else '') + '</think>' }}"
    "{{ parts[-1].strip() + eos_token }}{{ '\\n' }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<extra_id_1>assistant' }}{% endif %}"
)
PARTS = st.lists(st.sampled_from(["<think>", "</think>", "x", "eos", "assistant", " ", "\n", "Yes."]), max_size=6)


@pytest.mark.parametrize("template", [WITHOUT_THOUGHTS, WITH_EVERY_THOUGHT], ids=["without thoughts", "with thoughts"])
@given(parts=PARTS)
@settings(max_examples=50, deadline=None)
def test_a_turn_that_was_cut_off_is_the_beginning_of_the_finished_one(template, parts):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    found, text = Tokenization(tokenizer), "".join(parts)
    turns = [found.whole_turn_ids(USER, text, ended) for ended in (False, True)]
    cut, finished = ([*prompt, *response] for prompt, response in turns)
    assert cut == finished[: finished.index(EOS)]


def test_the_text_of_an_encoder_decoders_response_has_no_part_of_its_prompt(sharp_folders):
    tokenization = load_tokenization(sharp_folders["tiny-t5"])
    assert tokenization.text(tokenization.response_ids("fine")) == "fine"
