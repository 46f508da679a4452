"""Tiny random language models of every architecture that docs/models.md names; the tests and the page are made from it."""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from align.models.backbone.decoder import sliding_window
from align.models.backbone.kinds import attention_kernel

VOCABULARY = 264
"""Of the byte-level tokenizer of the tiny models."""


class Architecture(NamedTuple):
    """One row of the table."""

    name: str
    examples: str
    """Published models of this form."""
    config: PreTrainedConfig
    cached: int
    """Numbers of a token that sampling keeps: 2 x layers x heads of keys x their width."""
    packed: bool = True
    """Whether responses share one reading of their prompt."""

    @property
    def prefix_lm(self) -> bool:
        """Whether it can be a prefix language model; tested, as all of this."""
        return self.packed and sliding_window(self.config) is None and not self.config.is_encoder_decoder

    @property
    def in_vllm(self) -> bool:
        """Whether vLLM lists its class."""
        return AutoModelForCausalLM._model_mapping[type(self.config)].__name__ in VLLM_CLASSES


VLLM_REGISTRY = "https://github.com/vllm-project/vllm/blob/0002bff0b6cb/vllm/model_executor/models/registry.py"
VLLM_CLASSES = {
    *("BloomForCausalLM", "CohereForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM"),
    *("GPTJForCausalLM", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM"),
    *("GraniteForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "MptForCausalLM"),
    *("OPTForCausalLM", "Olmo2ForCausalLM", "OlmoeForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM"),
    *("Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM"),
}
"""Of the classes below, those in its table of text generation models, of a version after 0.12: the newest
that was at hand. vLLM itself was run with Llama alone."""


IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1}
BASE = IDS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = BASE | {"intermediate_size": 48, "max_position_embeddings": 256}
GROUPED = WIDE | {"num_key_value_heads": 2}
GPT2 = IDS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
OPT = BASE | {"ffn_dim": 48, "max_position_embeddings": 256}
GEMMA = GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
HALF = ["sliding_attention", "full_attention"]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
SMALL_EXPERTS = EXPERTS | {"moe_intermediate_size": 16, "decoder_sparse_step": 1}
T5 = IDS | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
BART = {f"{half}_{part}": n for half in ("encoder", "decoder") for part, n in (("layers", 2), ("attention_heads", 4))}
BART |= IDS | {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32, "max_position_embeddings": 256}
BART |= {"decoder_start_token_id": 1, "bos_token_id": 2, "forced_eos_token_id": None}

DECODERS = (
    Architecture("GPT-2", "gpt2, distilgpt2", hf.GPT2Config(**GPT2), 128),
    Architecture(
        "GPT-Neo",
        "EleutherAI/gpt-neo-1.3B",
        hf.GPTNeoConfig(
            **(IDS | {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48, "window_size": 8}),
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=256,
        ),
        128,
        packed=False,
    ),
    Architecture("GPT-J (parallel layers)", "EleutherAI/gpt-j-6b", hf.GPTJConfig(**GPT2, rotary_dim=4), 128),
    Architecture("GPT-NeoX (parallel layers)", "EleutherAI/pythia-1b", hf.GPTNeoXConfig(**WIDE), 128),
    Architecture("OPT", "facebook/opt-1.3b", hf.OPTConfig(**OPT, word_embed_proj_dim=32), 128),
    Architecture(
        "OPT, norms behind",
        "facebook/opt-350m",
        hf.OPTConfig(**OPT, word_embed_proj_dim=16, do_layer_norm_before=False),
        128,
    ),
    Architecture(
        "Bloom", "bigscience/bloom-1b1", hf.BloomConfig(**IDS, hidden_size=32, n_layer=2, n_head=4), 128, packed=False
    ),
    Architecture("MPT", "mosaicml/mpt-7b", hf.MptConfig(**IDS, d_model=32, n_heads=4, n_layers=2), 128, packed=False),
    Architecture("Falcon, multi-query", "tiiuae/falcon-7b", hf.FalconConfig(**BASE, multi_query=True, alibi=False), 32),
    Architecture(
        "Falcon, grouped",
        "tiiuae/falcon-40b",
        hf.FalconConfig(**BASE, num_kv_heads=2, new_decoder_architecture=True, alibi=False),
        128,
    ),
    Architecture(
        "Falcon, ALiBi",
        "tiiuae/falcon-rw-1b",
        hf.FalconConfig(**BASE, multi_query=False, alibi=True, parallel_attn=False, bias=True),
        128,
        packed=False,
    ),
    Architecture("GPT-BigCode, multi-query", "bigcode/santacoder", hf.GPTBigCodeConfig(**GPT2, multi_query=True), 32),
    Architecture("Llama 1, 2", "meta-llama/Llama-2-7b-hf", hf.LlamaConfig(**WIDE), 128),
    Architecture(
        "Llama 3",
        "meta-llama/Llama-3.2-1B",
        hf.LlamaConfig(
            **GROUPED, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32}, tie_word_embeddings=True
        ),
        64,
    ),
    Architecture("Mistral, sliding window", "mistralai/Mistral-7B-v0.1", hf.MistralConfig(**GROUPED, sliding_window=8), 64),
    Architecture("Qwen 2", "Qwen/Qwen2.5-0.5B", hf.Qwen2Config(**GROUPED), 64),
    Architecture("Qwen 3", "Qwen/Qwen3-0.6B", hf.Qwen3Config(**GROUPED, head_dim=8), 64),
    Architecture("Gemma", "google/gemma-2b", hf.GemmaConfig(**GROUPED, head_dim=8), 64),
    Architecture("Gemma 2", "google/gemma-2-2b", hf.Gemma2Config(**GEMMA, final_logit_softcapping=2.0), 64),
    Architecture("Gemma 3", "google/gemma-3-1b-pt", hf.Gemma3TextConfig(**GEMMA, layer_types=HALF), 64),
    Architecture("Phi", "microsoft/phi-2", hf.PhiConfig(**WIDE), 128),
    Architecture("Phi 3", "microsoft/Phi-3-mini-4k-instruct", hf.Phi3Config(**GROUPED), 64),
    Architecture("OLMo 2", "allenai/OLMo-2-0425-1B", hf.Olmo2Config(**GROUPED), 64),
    Architecture("SmolLM 2", "HuggingFaceTB/SmolLM2-135M", hf.LlamaConfig(**GROUPED, tie_word_embeddings=True), 64),
    Architecture("SmolLM 3", "HuggingFaceTB/SmolLM3-3B", hf.SmolLM3Config(**GROUPED, no_rope_layers=[1, 0]), 64),
    Architecture("Cohere", "CohereForAI/c4ai-command-r-v01", hf.CohereConfig(**GROUPED), 64),
    Architecture("Granite", "ibm-granite/granite-3.0-2b-base", hf.GraniteConfig(**GROUPED, logits_scaling=2.0), 64),
    Architecture("StableLM", "stabilityai/stablelm-2-1_6b", hf.StableLmConfig(**GROUPED), 64),
    Architecture("StarCoder 2", "bigcode/starcoder2-3b", hf.Starcoder2Config(**GROUPED), 64),
    Architecture(
        "Mixtral, experts",
        "mistralai/Mixtral-8x7B-v0.1",
        hf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
        64,
    ),
    Architecture(
        "Qwen 2 MoE, experts",
        "Qwen/Qwen1.5-MoE-A2.7B",
        hf.Qwen2MoeConfig(**GROUPED, **SMALL_EXPERTS, shared_expert_intermediate_size=24),
        64,
    ),
    Architecture("Qwen 3 MoE, experts", "Qwen/Qwen3-30B-A3B", hf.Qwen3MoeConfig(**GROUPED, **SMALL_EXPERTS, head_dim=8), 64),
    Architecture("OLMoE, experts", "allenai/OLMoE-1B-7B-0924", hf.OlmoeConfig(**GROUPED, **EXPERTS), 64),
)
ENCODER_DECODERS = (
    Architecture("T5 v1.0", "google-t5/t5-small", hf.T5Config(**T5, feed_forward_proj="relu"), 128),
    Architecture(
        "T5 v1.1, flan-T5",
        "google/flan-t5-small",
        hf.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        128,
    ),
    Architecture("mT5", "google/mt5-small", hf.MT5Config(**T5), 128),
    Architecture("UMT5", "google/umt5-small", hf.UMT5Config(**T5), 128),
    Architecture(
        "LongT5, local",
        "google/long-t5-local-base",
        hf.LongT5Config(**T5, encoder_attention_type="local", local_radius=4),
        128,
    ),
    Architecture(
        "LongT5, transient global",
        "google/long-t5-tglobal-base",
        hf.LongT5Config(**T5, encoder_attention_type="transient-global", local_radius=4, global_block_size=4),
        128,
    ),
    Architecture("BART", "facebook/bart-base", hf.BartConfig(**BART), 128),
    Architecture("mBART", "facebook/mbart-large-50", hf.MBartConfig(**BART), 128),
    Architecture("Pegasus", "google/pegasus-xsum", hf.PegasusConfig(**BART), 128),
    Architecture("Blenderbot", "facebook/blenderbot-400M-distill", hf.BlenderbotConfig(**BART), 128),
    Architecture("Marian", "Helsinki-NLP/opus-mt-en-de", hf.MarianConfig(**BART), 128),
    Architecture(
        "Switch, experts",
        "google/switch-base-8",
        hf.SwitchTransformersConfig(
            **T5, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=2
        ),
        128,
    ),
)
ARCHITECTURES = {architecture.name: architecture for architecture in (*DECODERS, *ENCODER_DECODERS)}
PATHS = {
    "GPT-2": "a table of positions; matrices that are stored transposed",
    "GPT-J (parallel layers)": "attention of its own, without SDPA",
    "GPT-Neo": "a window in columns of the row: a row for each response",
    "OPT, norms behind": "states that are projected before the vocabulary matrix",
    "Bloom": "ALiBi: a row for each response",
    "Falcon, multi-query": "one head of keys for all",
    "Llama 3": "grouped heads, scaled RoPE, tied matrices",
    "Mistral, sliding window": "a window: long texts get rows of their own",
    "Gemma 2": "capped logits; windows in half of the layers",
    "SmolLM 3": "a list in the config with an entry for each layer",
    "Cohere": "logits times a scale; no classifier",
    "Granite": "logits divided by a scale",
    "Mixtral, experts": "routers of a decoder",
    "Qwen 2 MoE, experts": "an expert that all tokens go through",
    "T5 v1.0": "a tied matrix: states are scaled",
    "T5 v1.1, flan-T5": "a vocabulary matrix of its own",
    "LongT5, local": "an encoder that reads blocks",
    "BART": "a table of positions for each half",
    "Marian": "logits with a bias",
    "Switch, experts": "routers of an encoder-decoder; a capacity without effect",
}
"""What of align/models each one stands for, in `make test` and where all stages are run; the others repeat one of them."""


def marked(names: Iterable[str]) -> list[Any]:
    """Names as parameters of a test, slow where another architecture stands for their code."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in PATHS)) for name in names]


def make_model(name: str, countable: bool = False) -> PreTrainedModel:
    """A random model; `sharpen` it where numbers are compared.

    Args:
        countable: with attention and experts as plain products, which torch's counter of FLOPs knows.
    """
    config = copy.deepcopy(ARCHITECTURES[name].config)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return auto.from_config(config, **(plain if countable else {"attn_implementation": attention_kernel(config)})).eval()


def has_classifier(name: str) -> bool:
    """Whether a reward model of this architecture can be saved: an encoder-decoder's as the language model it is."""
    config = ARCHITECTURES[name].config
    return config.is_encoder_decoder or type(config) in AutoModelForSequenceClassification._model_mapping
