"""Tiny random models of the three supported architectures, with a byte-level tokenizer.

They are real transformers classes, small enough that a test trains one in a second. Every build produces the same bytes.
Their next-token distribution is nearly uniform: a test can predict the initial loss (log of the vocabulary's size).
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

SEED = 20_260_101
HIDDEN, LAYERS, HEADS, INNER, CONTEXT = 64, 2, 4, 128, 1024
# Distinct on purpose: code that confuses pad with EOS, or infers lengths from token values, fails on these models.
# The last ones pad the vocabulary to a multiple of 8.
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", *(f"<extra_id_{i}>" for i in range(5)))
PAD, EOS, BOS = 0, 1, 2
VOCABULARY = len(SPECIAL_TOKENS) + 256

# Every message is rendered independently and ends with a newline, so the rendering of the first k messages, and of a
# prompt with the generation prompt, are prefixes of the rendering of the full dialogue.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token + '\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'system' %}{{ 'System: ' + message['content'] + '\n' }}"
    "{% else %}{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)


def build(folder: Path, work: Path, architecture: str) -> None:
    """Write a tiny gpt2, llama or t5 model and its tokenizer. The caller's random state is preserved. `work` is unused."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(SEED)
        model = _model(architecture)
    model.save_pretrained(folder)
    byte_tokenizer(append_eos=architecture == "t5").save_pretrained(folder)


def byte_tokenizer(append_eos: bool = False) -> PreTrainedTokenizerFast:
    """Create a fast byte-level tokenizer with special tokens first. Decoding an encoded text returns it unchanged.

    With `append_eos`, `add_special_tokens` (the default of a call) appends the eos to the text, as in T5's tokenizer.
    """
    # ByteLevel shows each byte as a printable character. `alphabet` returns them in any order: sorted, the
    # ids are the same in every build (they are not in the order of the bytes' values).
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *letters))}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    # Without merges, splitting words by a regex is not needed.
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if append_eos:
        backend.post_processor = TemplateProcessing(
            single="$A <eos>", pair="$A <eos> $B <eos>", special_tokens=[("<eos>", EOS)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _model(architecture: str) -> PreTrainedModel:
    ids: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS}
    if architecture == "gpt2":
        sizes = {"n_positions": CONTEXT, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_inner": INNER}
        ids |= sizes | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"), 0.0)
        return GPT2LMHeadModel(GPT2Config(**ids, bos_token_id=BOS))
    if architecture == "llama":
        config = LlamaConfig(
            **ids,
            max_position_embeddings=CONTEXT,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            tie_word_embeddings=False,
            bos_token_id=BOS,
        )
        return LlamaForCausalLM(config)
    settings: dict[str, Any] = {
        "d_model": HIDDEN,
        "d_kv": HIDDEN // HEADS,
        "d_ff": INNER,
        "num_layers": LAYERS,
        "num_decoder_layers": LAYERS,
        "num_heads": HEADS,
        "dropout_rate": 0.0,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "decoder_start_token_id": PAD,
    }
    model = T5ForConditionalGeneration(T5Config(**ids, **settings))
    # v1.1 and Flan-T5 have a separate output matrix, but transformers 5 ties it in a new model (the setting above only turns
    # off a scaling of the output). With T5's standard deviation of 1 the logits would be +-8, far from uniform.
    model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.02)
    return model
