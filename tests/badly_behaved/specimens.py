"""Badly behaved models: tiny models with the habits of published ones that the well-behaved built-in models lack.

Each changes one built-in model, its tokenizer or the files of its folder. Habits of templates alone are in
tests/tokenization/test_published_templates.py.
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
EMPTY_THOUGHT = CHATML.replace(
    "\n{{ m.content }}", "\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
)
"""Qwen 3: the last recorded answer begins with an empty thought, which the generation prompt does not write."""


@dataclass(frozen=True)
class Specimen:
    """A habit of published models.

    Attributes:
        base: the built-in model that is changed.
        seen_in: published models that have it.
        change: edits model and tokenizer in memory.
        edit: edits the saved folder, for what transformers refuses to save.
        refused: the message with which loading refuses it; empty: every stage trains it.
        core: whether `make test` takes it too.
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


def _with_template(template: str, rows: int | None = None) -> Callable[[PreTrainedModel, PreTrainedTokenizerFast], None]:
    """A template with its tokens; the embedding has a multiple of so many rows."""

    def change(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", END_OF_TURN)])
        tokenizer.chat_template = template
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=rows, mean_resizing=False)

    return change


def _pad_is_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = model.generation_config.pad_token_id = EOS


def _no_pad_and_no_template(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.pad_token = tokenizer.chat_template = None
    model.config.pad_token_id = model.generation_config.pad_token_id = None


def _adds_both_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> <bos> $B <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )


def _list_of_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    _with_template(CHATML)(model, tokenizer)
    likely = 105  # a byte that tiny models write often
    ends = [EOS, tokenizer.convert_tokens_to_ids(END_OF_TURN), likely]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=PAD)


def _tied_and_padded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    model.config.tie_word_embeddings = True
    _with_template(CHATML, 64)(model, tokenizer)
    model.tie_weights()


def _dropout(name: str) -> Callable[[PreTrainedModel, PreTrainedTokenizerFast], None]:
    return lambda model, tokenizer: model.config.update({name: 0.3})


def _too_many_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.add_tokens([f"<extra_{number}>" for number in range(9)])


def _unused_settings(folder: Path) -> None:
    path = folder / "generation_config.json"
    unused = {"temperature": 0.9, "top_p": 0.6, "top_k": 0, "early_stopping": True, "length_penalty": 2.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | unused))


SPECIMENS = (
    Specimen("t5-as-built", "tiny-t5", "the control of encoder-decoders", core=True),
    Specimen("pad-is-eos", "tiny-llama", "Llama 2 fine-tunes, Mistral", _pad_is_end, core=True),
    Specimen("no-pad-no-template", "tiny-gpt2", "GPT-2, Pythia", _no_pad_and_no_template),
    Specimen("adds-bos-and-eos", "tiny-llama", "Llama with add_eos_token", _adds_both_ends),
    Specimen("t5-without-template", "tiny-t5", "T5, Flan-T5", lambda m, t: setattr(t, "chat_template", None)),
    Specimen("eos-list", "tiny-llama", "Llama 3 Instruct, Qwen 2.5", _list_of_ends, core=True),
    Specimen("empty-thought", "tiny-llama", "Qwen 3", _with_template(EMPTY_THOUGHT)),
    Specimen("tied-and-padded", "tiny-llama", "Qwen 2.5 0.5B, SmolLM2", _tied_and_padded, core=True),
    Specimen("functional-dropout", "tiny-llama", "Llama with attention_dropout", _dropout("attention_dropout")),
    Specimen("t5-dropout", "tiny-t5", "T5", _dropout("dropout_rate")),
    Specimen("unused-sampling-settings", "tiny-llama", "Vicuna, BART", edit=_unused_settings),
    Specimen("more-tokens-than-rows", "tiny-llama", "tokens added by hand", _too_many_tokens, refused="embedding"),
)
