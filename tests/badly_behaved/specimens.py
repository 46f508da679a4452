"""Badly behaved models: tiny models with the habits of published ones that the well-behaved built-in models lack.

Each specimen changes one built-in model, its tokenizer or the files of its folder. `write` makes the folder.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from align.model_registry.tiny import BOS, EOS, PAD

END_OF_TURN = "<|im_end|>"
"""An added token that ends a turn, beside the tokenizer's end of text."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")
"""DeepSeek-R1 and QwQ: the generation prompt opens a thought that recorded answers do not have."""
EMPTY_THOUGHT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen 3: the last recorded answer begins with an empty thought, which the generation prompt does not write."""
CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %} final{% endif %}\n"
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
"""gpt-oss: a recorded answer names its channel in the header, the generation prompt does not."""
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Phi-3's first template: system turns are dropped."""
REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Gemma: system turns raise, and white space around a message is cut."""
DATED = "Today is {{ strftime_now('%d %B %Y %H:%M:%S.%f') }}.\n" + CHATML
"""Llama 3.2 and SmolLM3, made worse: the text differs at every rendering."""


@dataclass(frozen=True)
class Specimen:
    """A habit of published models.

    Attributes:
        base: the built-in model that is changed.
        seen_in: published models that have it.
        change: edits model and tokenizer in memory and returns the tokenizer that is saved.
        edit: edits the saved folder, for what transformers refuses to save.
        refused: the message with which loading refuses it; empty: every stage trains it.
        core: whether `make test` takes it too. The habits of templates and tokenizers are in tests/tokenization, those of
            saved settings and dropout in tests/models.
    """

    name: str
    base: str
    seen_in: str
    change: Callable[[PreTrainedModel, PreTrainedTokenizerFast], None] = lambda model, tokenizer: None
    edit: Callable[[Path], None] = lambda folder: None
    refused: str = ""
    core: bool = False


def write(specimen: Specimen, folder: Path, base: str) -> Path:
    """Write a specimen's folder from that of the built-in model, with weights that are far from uniform."""
    auto = AutoModelForSeq2SeqLM if specimen.base == "tiny-t5" else AutoModelForCausalLM
    model, tokenizer = auto.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    specimen.change(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    specimen.edit(folder)
    return folder


def _with_template(template: str) -> Callable[[PreTrainedModel, PreTrainedTokenizerFast], None]:
    def change(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END_OF_TURN]})
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        tokenizer.chat_template = template

    return change


def _pad_is_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = model.generation_config.pad_token_id = EOS


def _no_pad(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.pad_token = None
    model.config.pad_token_id = model.generation_config.pad_token_id = None


def _no_template(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    _no_pad(model, tokenizer)
    tokenizer.chat_template = None


def _adds_both_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> <bos> $B <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )


def _adds_both_ends_without_template(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    _adds_both_ends(model, tokenizer)
    tokenizer.chat_template = None


def _list_of_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    _with_template(CHATML)(model, tokenizer)
    likely = 105  # a byte that tiny models write often
    ends = [EOS, tokenizer.convert_tokens_to_ids(END_OF_TURN), likely]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=PAD)


def _tied_and_padded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True), AddedToken(END_OF_TURN, special=True)])
    tokenizer.chat_template = CHATML
    model.config.tie_word_embeddings = True
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64, mean_resizing=False)
    model.tie_weights()


def _dropout(**rates: float) -> Callable[[PreTrainedModel, PreTrainedTokenizerFast], None]:
    def change(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        for name, rate in rates.items():
            assert hasattr(model.config, name)
            setattr(model.config, name, rate)

    return change


def _too_many_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.add_tokens([f"<extra_{number}>" for number in range(9)])


def _generation_config(**values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


SPECIMENS = (
    Specimen("as-built", "tiny-llama", "the control: a model that does nothing unusual"),
    Specimen("t5-as-built", "tiny-t5", "the control of encoder-decoders", core=True),
    Specimen("pad-is-eos", "tiny-llama", "Llama 2 fine-tunes, Mistral", _pad_is_end, core=True),
    Specimen("no-pad", "tiny-gpt2", "GPT-2, Pythia, Llama", _no_pad),
    Specimen("no-template", "tiny-gpt2", "GPT-2, Pythia", _no_template),
    Specimen("adds-bos-and-eos", "tiny-llama", "Llama with add_eos_token", _adds_both_ends),
    Specimen("adds-both-without-template", "tiny-llama", "Llama bases", _adds_both_ends_without_template),
    Specimen("t5-without-template", "tiny-t5", "T5, Flan-T5", lambda m, t: setattr(t, "chat_template", None)),
    Specimen("eos-list", "tiny-llama", "Llama 3 Instruct, Qwen 2.5", _list_of_ends, core=True),
    Specimen("opens-a-thought", "tiny-llama", "DeepSeek-R1 distillations, QwQ", _with_template(THINKING)),
    Specimen("empty-thought", "tiny-llama", "Qwen 3", _with_template(EMPTY_THOUGHT)),
    Specimen("channels", "tiny-llama", "gpt-oss", _with_template(CHANNELS)),
    Specimen("drops-system", "tiny-llama", "Phi-3", _with_template(NO_SYSTEM)),
    Specimen("refuses-system", "tiny-gpt2", "Gemma", _with_template(REFUSES_SYSTEM)),
    Specimen("prints-the-time", "tiny-llama", "Llama 3.2, SmolLM3", _with_template(DATED)),
    Specimen("tied-and-padded", "tiny-llama", "Qwen 2.5 0.5B, SmolLM2", _tied_and_padded, core=True),
    Specimen("functional-dropout", "tiny-llama", "Llama with attention_dropout", _dropout(attention_dropout=0.3)),
    Specimen("t5-dropout", "tiny-t5", "T5", _dropout(dropout_rate=0.3)),
    Specimen(
        "unused-sampling-settings", "tiny-llama", "Vicuna", edit=_generation_config(temperature=0.9, top_p=0.6, top_k=0)
    ),
    Specimen("unused-beam-settings", "tiny-t5", "BART", edit=_generation_config(early_stopping=True, length_penalty=2.0)),
    Specimen(
        "more-tokens-than-rows", "tiny-llama", "models with tokens added by hand", _too_many_tokens, refused="embedding"
    ),
)
