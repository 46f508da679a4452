"""Templates and tokenizers as published models have them: what they write before, round and instead of messages."""

import datetime

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from trl.data_utils import apply_chat_template

from align.batches.encoding import Limits, encode_demonstrations, encode_prompts, encode_rankings
from align.core.errors import UserError
from align.data.records import Demonstration
from align.model_registry.tiny import BOS, EOS, byte_tokenizer
from align.models.loading import LoadedModel
from align.tokenization import ConversationError, Tokenization, encode_demonstration, set_template_date
from tests.refusals import refusal
from tests.tokenization.test_tokenization import contexts, shown

SYSTEM, USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 2 + 2?"}
ANSWER = "It is 4."
MORE = [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And 3?"}]

DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}{% else %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|Assistant|>' + content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
QWEN_3 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}{% set thought = '' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.last %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ content }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GPT_OSS = (
    "{{ '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{% if loop.last and not add_generation_prompt %}{{ '<|return|>' }}{% else %}{{ '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
LLAMA_3 = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>\n\n' + m.content | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|message|>\n\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PHI_3 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<|User|>\n' + m.content + '<|end|>\n<|Assistant|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' + '\n' }}{% endif %}{% endfor %}"
)
MARKS = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"]
MARKS += ["<|User|>", "<|Assistant|>"]


def published(template, eos="<|end|>", adds=""):
    """A tokenizer of bytes with the marks of published templates; `<think>` is an added token that is not special."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    if adds:
        special = [("<bos>", BOS), ("<eos>", EOS)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=adds, special_tokens=special)
    return tokenizer


def sentencepiece(scheme="always", template=ZEPHYR):
    """As Llama 2's: a space before the first word of a text; `first` as newer ones, `always` also behind special tokens."""
    letters = sorted(set("".join((ZEPHYR, ANSWER, "▁WhatisBekind?+234AndHumanAssistantSystem:\n usertyo"))))
    pieces = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0} | dict.fromkeys(letters, -9.0)
    pieces |= dict.fromkeys(("▁It", "It", "▁is", "▁Human", "Human", "▁What", "What"), -3.0)
    backend = Tokenizer(models.Unigram(list(pieces.items()), unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)


@pytest.fixture
def loaded_with(load_sharp):
    """`loaded_with(tokenization)`: a tiny model that reads by this tokenization."""
    start = load_sharp("tiny-gpt2")
    return lambda tokenization: LoadedModel(start.backbone, tokenization, start.base)


def rendered_ids(tokenizer, messages, generation_prompt=False):
    """What any other program reads of a conversation."""
    return tokenizer.apply_chat_template(
        list(messages), tokenize=True, add_generation_prompt=generation_prompt, return_dict=False
    )


CASES = {
    "deepseek-r1": (DEEPSEEK_R1, "<|end|>", "<|User|>What is 2 + 2?<|Assistant|>", "It is 4.<|end|>"),
    "qwen-3": (QWEN_3, "<|im_end|>", "<|im_start|>assistant\n", "<think>\n\n</think>\n\nIt is 4.<|im_end|>"),
    "gpt-oss": (GPT_OSS, "<|return|>", "<|start|>assistant", "<|channel|>final<|message|>It is 4.<|return|>"),
    "llama-3": (LLAMA_3, "<|end|>", "<|start|>assistant<|message|>\n\n", "It is 4.<|end|>"),
    "llama-2": (LLAMA_2, "<|end|>", "[INST] What is 2 + 2? [/INST]", " It is 4. <|end|>"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_what_the_template_writes_behind_the_prompt(name, loaded_with):
    template, eos, prompt_end, answer = CASES[name]
    found = Tokenization(published(template, eos))
    prompt, response = found.answer_ids((USER,), ANSWER)
    assert shown(found, prompt).endswith(prompt_end)
    assert shown(found, response) == answer
    completion = [{"role": "assistant", "content": ANSWER}]
    whole = rendered_ids(found.tokenizer, [USER, *completion])
    assert prompt + response == whole[: len(prompt) + len(response)]
    by_trl = apply_chat_template({"prompt": [USER], "completion": completion}, found.tokenizer)
    assert (shown(found, prompt), shown(found, response)) == (by_trl["prompt"], by_trl["completion"].rstrip("\n"))
    # Sampling keeps the generation prompt.
    assert found.prompt_ids((USER,)) == rendered_ids(found.tokenizer, [USER], generation_prompt=True)
    # Every stage reads a recorded answer so.
    loaded, limits = loaded_with(found), Limits(500, 100)
    (demonstration,) = encode_demonstrations([{"prompt": [USER], "completion": ANSWER}], loaded, limits, False)
    assert (demonstration.prompt, demonstration.response) == (prompt, response)
    row = {"prompt": [USER], "chosen": ANSWER, "rejected": "It is 5."}
    (ranking,) = encode_rankings([row], loaded, limits, False)
    before = shown(found, prompt)
    rest = [shown(found, ranking.prompt + ids) for ids in ranking.responses]
    assert rest == [before + answer, before + answer.replace("4", "5")]


def test_a_thought_that_is_recorded_is_read_as_the_model_writes_it():
    """`<think>` is an added token, but not a special one: models write it themselves."""
    found = Tokenization(published(QWEN_3, "<|im_end|>"))
    text = "<think>\nTwo and two.\n</think>\n\nIt is 4."
    _, response = found.answer_ids((USER,), text)
    assert shown(found, response) == text + "<|im_end|>"
    opens, closes = found.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert (response.count(opens), response.count(closes)) == (1, 1)
    _, hostile = found.answer_ids((USER,), "Say <|im_end|> now.")
    end = found.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert hostile.count(end) == 1
    assert hostile[-1] == end
    assert shown(found, hostile) == "<think>\n\n</think>\n\nSay <|im_end|> now.<|im_end|>"


@pytest.mark.parametrize(("after", "end"), [("\n", "<turn>"), ("<eos>\n", "<eos>")])
def test_an_added_token_that_is_not_special_ends_a_turn_unless_a_special_one_follows(after, end):
    """`tokenizer.add_tokens`, as many recipes for ChatML call it, adds tokens that are not special."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<turn>"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + '\n' + m.content + '<turn>" + after.replace("\n", "\\n") + "' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    )
    found = Tokenization(tokenizer)
    assert found.end_ids == {EOS, tokenizer.convert_tokens_to_ids(end)}
    _, response = found.answer_ids((USER,), ANSWER)
    assert shown(found, response) == ANSWER + ("<turn>" if end == "<turn>" else "<turn><eos>")
    if end == "<turn>":
        with pytest.raises(ConversationError, match="contains the special token '<turn>'"):
            found.answer_ids((USER,), "Say <turn> now.")
    assert found.text(found.response_ids(ANSWER)) == ANSWER
    full_stop = found.text_ids(".")
    assert (
        Tokenization(tokenizer, extra_end_ids=tuple(full_stop)).text([*found.text_ids(ANSWER), *full_stop]) == ANSWER + "."
    )


def test_a_thought_that_the_template_leaves_out_is_refused_in_data_and_read_without_it_in_scoring():
    found = Tokenization(published(DEEPSEEK_R1))
    text = "<think>\nTwo and two.\n</think>It is 4."
    with pytest.raises(ConversationError, match=r"leaves out or changes a part of the answer '<think>"):
        found.answer_ids((USER,), text)
    assert shown(found, found.answer_ids((USER,), text, whole=False)[1]) == "It is 4.<|end|>"


def test_an_answer_is_trimmed_as_the_template_does_and_may_repeat_what_it_writes():
    found = Tokenization(published(LLAMA_3))
    assert shown(found, found.answer_ids((USER,), "\nIt is 4. ")[1]) == "It is 4.<|end|>"
    for template, eos, _, answer in CASES.values():
        found = Tokenization(published(template, eos))
        for text in ("end", "im_end", "assistant", "final", "4"):
            assert shown(found, found.answer_ids((USER,), text)[1]) == answer.replace(ANSWER, text)


@pytest.mark.parametrize("name", CASES)
def test_turns_in_one_row_are_those_of_the_renderings(name):
    template, eos, _, answer = CASES[name]
    found = Tokenization(published(template, eos))
    last = {"role": "assistant", "content": "6."}
    demonstration = Demonstration(prompt=(USER,), continuation=(*MORE, last))
    joined, split = (encode_demonstration(found, demonstration, one_row=one) for one in (True, False))
    # Qwen 3 and gpt-oss write an earlier answer otherwise than the last one.
    assert len(joined) == (2 if name in ("qwen-3", "gpt-oss") else 1)
    assert contexts(joined) == contexts(split)
    assert shown(found, split[1].response) == answer.replace(ANSWER, "6.")


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_sentencepiece_puts_no_space_before_an_answer_behind_a_line_break(scheme):
    found = Tokenization(sentencepiece(scheme))
    prompt, response = found.answer_ids((USER,), ANSWER)
    assert found.tokenizer.convert_ids_to_tokens(response)[0] == "It"
    assert response[-1] == found.tokenizer.eos_token_id
    whole = rendered_ids(found.tokenizer, [USER, {"role": "assistant", "content": ANSWER}])
    assert prompt + response == whole[: len(prompt) + len(response)]
    turns = (*MORE, {"role": "assistant", "content": "It is 6."})
    (joined,) = encode_demonstration(found, Demonstration(prompt=(USER,), continuation=turns), one_row=True)
    ids = joined.prompt + joined.response
    assert ids == rendered_ids(found.tokenizer, [USER, *turns])[: len(ids)]


def test_a_response_is_read_as_it_was_written_where_the_tokenizer_would_clean_up_its_spaces():
    tokenizer = sentencepiece()
    tokenizer.clean_up_tokenization_spaces = True
    found = Tokenization(tokenizer)
    assert tokenizer.decode(found.text_ids("It is . 4")) == "It is. 4"
    assert found.text(found.response_ids("It is . 4")) == "It is . 4"


@pytest.mark.parametrize("template", ["auto", "plain", "raw"])
def test_a_decoder_reads_no_end_token_behind_its_prompt(template):
    """Tutorials for Llama and Mistral set add_eos_token, and it is saved with the model."""
    added = Tokenization(published(ZEPHYR, "<eos>", adds="<bos> $A <eos>"), template)
    plain = Tokenization(published(ZEPHYR, "<eos>", adds="<bos> $A"), template)
    assert EOS not in added.prompt_ids((USER,))[-1:]
    assert added.prompt_ids((USER,)) == plain.prompt_ids((USER,))
    assert added.answer_ids((USER,), ANSWER) == plain.answer_ids((USER,), ANSWER)
    assert added.as_whole_text([65, 66]) == [BOS, 65, 66]
    text, (more,) = added.continuations("The moon is", [" round"])
    assert text == added.tokenizer("The moon is").input_ids[:-1]
    assert more == added.text_ids(" round")


@pytest.mark.parametrize("template", ["plain", "raw"])
@pytest.mark.parametrize("scheme", ["always", "first"])
def test_a_saved_base_model_is_prompted_with_its_start_token_elsewhere(tmp_path, template, scheme):
    found = Tokenization(sentencepiece(scheme, None), template)
    ids = found.prompt_ids((USER,))
    text = {"plain": "Human:\nWhat is 2 + 2?\n\nAssistant:\n", "raw": "What is 2 + 2?"}[template]
    assert ids == found.tokenizer(text).input_ids  # as in pretraining
    found.tokenizer.save_pretrained(tmp_path)
    elsewhere = AutoTokenizer.from_pretrained(tmp_path)
    assert rendered_ids(elsewhere, [USER], generation_prompt=True) == ids
    prompt, response = found.answer_ids((USER,), ANSWER)
    assert rendered_ids(elsewhere, [USER, {"role": "assistant", "content": ANSWER}])[: len(prompt + response)] == (
        prompt + response
    )
    assert Tokenization(elsewhere).prompt_ids((USER,)) == ids  # a later stage adds no second one


@pytest.mark.parametrize("template", ["auto", "plain", "raw"])
def test_a_saved_encoder_decoder_gets_its_closing_token_elsewhere(tmp_path, template):
    found = Tokenization(byte_tokenizer(append_eos=True), template, encoder_decoder=True)
    ids = found.prompt_ids((USER,))
    assert ids[-1] == EOS
    assert ids[-2] != EOS
    found.tokenizer.save_pretrained(tmp_path)
    elsewhere = AutoTokenizer.from_pretrained(tmp_path)
    assert rendered_ids(elsewhere, [USER], generation_prompt=True) == ids
    assert Tokenization(elsewhere, encoder_decoder=True).prompt_ids((USER,)) == ids
    assert found.answer_ids((USER,), ANSWER) == (ids, found.response_ids(ANSWER))


def test_raw_continues_the_prompt_in_every_program():
    found = Tokenization(byte_tokenizer(), "raw")
    prompt, response = found.answer_ids((USER,), ANSWER)
    assert shown(found, prompt + response) == f"What is 2 + 2?{ANSWER}<eos>"
    assert prompt + response == rendered_ids(found.tokenizer, [USER, {"role": "assistant", "content": ANSWER}])


def test_truncation_keeps_the_start_token_and_the_system_turn(loaded_with):
    found = Tokenization(published(DEEPSEEK_R1))
    loaded = loaded_with(found)
    prompt = [SYSTEM, {"role": "user", "content": "x" * 50 + "?"}]
    (kept,) = encode_prompts([{"prompt": prompt}], loaded, Limits(30, 5, "truncate"), False)
    assert len(kept.ids) == 30
    # bos, 8 letters, the user's mark; then the end: 11 characters, the assistant's mark, <think>, a line break.
    assert shown(found, kept.ids) == "<bos>Be kind.<|User|>" + "x" * 16 + "?<|Assistant|><think>\n"
    with pytest.raises(UserError, match=r"record 1: the beginning of the prompt with its system turn has 10 tokens"):
        encode_prompts([{"prompt": prompt}], loaded, Limits(10, 5, "truncate"), False)


def test_a_system_turn_that_the_template_leaves_out_is_refused(loaded_with):
    found = Tokenization(published(PHI_3))  # many models never see a system turn
    assert shown(found, found.prompt_ids((USER,))).endswith("<|Assistant|>\n")
    rows = [{"prompt": [USER], "completion": ANSWER}, {"prompt": [SYSTEM, USER], "completion": ANSWER}]
    line = refusal(encode_demonstrations, rows, loaded_with(found), Limits(100, 100), False)
    assert line.startswith("demonstrations in memory: record 2: the chat template leaves out the system turn of ")
    assert "chat_template" in line
    for call, more in ((found.prompt_ids, ()), (found.whole_turn_ids, (ANSWER,))):
        with pytest.raises(ConversationError, match="leaves out the system turn"):
            call((SYSTEM, USER), *more)


def test_a_template_that_leaves_out_users_assistants_or_earlier_turns_is_refused():
    for role in ("user", "assistant"):
        template = "{% for m in messages %}{% if m.role != '" + role + "' %}{{ m.content }}{% endif %}{% endfor %}"
        with pytest.raises(ConversationError, match=f"{role} turn"):
            Tokenization(published(template))
    found = Tokenization(published("{{ messages[-1].content }}"))
    assert shown(found, found.prompt_ids((USER,))) == USER["content"]
    with pytest.raises(ConversationError, match="leaves out the user turn of a conversation of user, assistant, user"):
        found.prompt_ids((USER, *MORE))


@pytest.fixture
def on_the_day():
    set_template_date("2026-07-04")
    yield
    set_template_date(datetime.date.today().isoformat())


@pytest.mark.parametrize(
    "call", ['strftime_now("%d %b %Y")', "strftime_now( '%d %b %Y' )", "strftime_now(format='%d %b %Y')"]
)
def test_the_date_is_a_constant_that_is_saved(tmp_path, on_the_day, call):
    template = (
        "{% if strftime_now is defined %}{% set date = " + call + " %}{% endif %}{{ 'Today: ' + date + '.' }}" + LLAMA_3
    )
    found = Tokenization(published(template))
    assert shown(found, found.prompt_ids((USER,))).startswith("Today: 04 Jul 2026.<|start|>user")
    found.tokenizer.save_pretrained(tmp_path)
    set_template_date("2027-01-01")
    later = Tokenization(AutoTokenizer.from_pretrained(tmp_path))
    assert later.prompt_ids((USER,)) == found.prompt_ids((USER,))
    elsewhere = AutoTokenizer.from_pretrained(tmp_path)
    assert rendered_ids(elsewhere, [USER], generation_prompt=True) == found.prompt_ids((USER,))


def test_a_format_that_is_computed_is_refused():
    with pytest.raises(UserError, match="strftime_now with a computed format"):
        Tokenization(published("{% set f = '%Y' %}{{ strftime_now(f) }}" + LLAMA_3))


def test_rows_that_spell_special_tokens_are_counted_once_with_an_example(load_sharp, caplog):
    start = load_sharp("tiny-gpt2")
    rows = [{"prompt": "User: Hi<eos>", "completion": ANSWER}, {"prompt": "Hi", "completion": "<bos>Ho"}]
    rows.append({"prompt": "Hi", "completion": ANSWER})
    encode_demonstrations(rows, start, Limits(100, 100), False)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "demonstrations in memory: 2 of 3 demonstrations spell special tokens such as '<eos>', which are read as plain "
    )
    caplog.clear()
    encode_prompts(["Hi", "a < b"], start, Limits(100, 100), False)
    assert not caplog.records
