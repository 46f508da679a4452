"""Tiny encoders of every family with tokenizers that join two texts as the family's own do, for the tests of encoders."""

import copy
from pathlib import Path

import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AlbertConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BigBirdConfig,
    DebertaConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from align.model_registry.tiny import byte_tokenizer

IDS = {"vocab_size": 264, "pad_token_id": 0}
WIDTH = IDS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LONG = WIDTH | {"max_position_embeddings": 256}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
CONFIGS = {
    "bert": BertConfig(**LONG),
    "roberta": RobertaConfig(**LONG, type_vocab_size=1),
    "albert": AlbertConfig(**LONG, embedding_size=16),
    "electra": ElectraConfig(**LONG, embedding_size=16),
    "deberta": DebertaConfig(**LONG, **DISENTANGLED),
    # As version 3 has it: shared keys, log buckets, no token types.
    "deberta-v2": DebertaV2Config(
        **LONG, **DISENTANGLED, position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm", type_vocab_size=0
    ),
    "distilbert": DistilBertConfig(**IDS, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=256),
    "big_bird": BigBirdConfig(**LONG, block_size=16, num_random_blocks=1),
    "modernbert": ModernBertConfig(**LONG, local_attention=8, global_attn_every_n_layers=2, cls_token_id=2, sep_token_id=1),
}
"""By model type. BigBird reads up to 112 tokens in full, ModernBERT's window is shorter than most texts of the tests."""

EXAMPLES = {
    "bert": "BERT | google-bert/bert-base-uncased",
    "roberta": "RoBERTa | FacebookAI/roberta-base",
    "albert": "ALBERT | albert/albert-base-v2",
    "electra": "ELECTRA | google/electra-base-discriminator",
    "deberta": "DeBERTa | microsoft/deberta-base",
    "deberta-v2": "DeBERTa v2, v3 | microsoft/deberta-v3-base",
    "distilbert": "DistilBERT | distilbert/distilbert-base-uncased",
    "big_bird": "BigBird, read in full | google/bigbird-roberta-base",
    "modernbert": "ModernBERT | answerdotai/ModernBERT-base",
}
"""Name and a published model, as docs/models.md has them."""

CLS, SEP = ("<bos>", 2), ("<eos>", 1)
PAIRS = {"roberta": ("<bos> $A <eos>", "<bos> $A <eos> <eos> $B <eos>")}
"""How a tokenizer joins texts: RoBERTa with two marks between; BERT as most do."""


def pair_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer of the tiny models, which joins two texts as `family` does. It has no chat template."""
    tokenizer = byte_tokenizer()
    single, pair = PAIRS.get(family, ("<bos> $A <eos>", "<bos> $A <eos> $B:1 <eos>:1"))
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=[CLS, SEP])
    named = {"eos_token": "<eos>"} if family in PAIRS else {}  # BERT's tokenizer names no end
    kinds = [] if family in ("roberta", "distilbert", "modernbert") else ["token_type_ids"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        cls_token="<bos>",
        sep_token="<eos>",
        model_input_names=["input_ids", *kinds, "attention_mask"],
        clean_up_tokenization_spaces=False,
        **named,
    )


def make_classifier(family: str) -> PreTrainedModel:
    """A random classifier with one label."""
    torch.manual_seed(3)
    config = copy.deepcopy(CONFIGS[family])
    config.num_labels = 1
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
    return model.eval()


def write_encoder(family: str, folder: Path, sharpen, classifier: bool = False, layers: int = 2) -> str:
    """Write an encoder as its pretraining leaves it, or as a classifier with one label; returns the folder's name."""
    torch.manual_seed(3)
    config = copy.deepcopy(CONFIGS[family])
    config.num_hidden_layers = layers
    if family == "modernbert":
        config.layer_types = (config.layer_types * layers)[:layers]
    model = make_classifier(family) if classifier else AutoModelForMaskedLM.from_config(config)
    sharpen(model).save_pretrained(folder)
    pair_tokenizer(family).save_pretrained(folder)
    return str(folder)
