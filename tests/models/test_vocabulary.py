"""Whether a second model reads the policy's tokens: told by a stored vocabulary, never by an empty default tokenizer."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedModel,
    Qwen2Config,
    T5Config,
)

from align.core.errors import UserError
from align.core.files import read_json, write_json
from align.core.settings import ModelConfig
from align.model_registry.tiny import BOS, EOS, PAD, VOCABULARY, byte_tokenizer
from align.models.loading import from_objects
from align.models.vocabulary import require_vocabulary_of

IDS = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
    "decoder_start_token_id": PAD,
}
FIRST_LETTER = 8
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
HALVES = {f"{half}_{size}": 1 for half in ("encoder", "decoder") for size in ("layers", "attention_heads")}
CONFIGS = {
    "qwen2": Qwen2Config(**SMALL, **IDS, num_key_value_heads=2),
    "llama": LlamaConfig(**SMALL, **IDS),
    "gpt_neox": GPTNeoXConfig(**SMALL, **IDS),
    "gpt2": GPT2Config(**IDS, n_embd=16, n_layer=1, n_head=2),
    "opt": OPTConfig(**IDS, hidden_size=16, ffn_dim=24, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=16),
    "t5": T5Config(**IDS, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2),
    "bart": BartConfig(**IDS, **HALVES, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24),
}


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if CONFIGS[name].is_encoder_decoder else AutoModelForCausalLM
    return auto.from_config(CONFIGS[name])


@pytest.fixture(scope="module")
def policy():
    return from_objects(model_of("llama"), byte_tokenizer(), ModelConfig())


@pytest.mark.parametrize("stored", ["nothing", "tokenizer_config.json", "the same", "another"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_refused_only_for_a_stored_vocabulary_of_other_tokens(name, stored, policy, tmp_path):
    model = model_of(name)
    model.save_pretrained(tmp_path / "second")
    if stored == "tokenizer_config.json":
        (tmp_path / "second" / stored).write_text("{}")
    elif stored != "nothing":
        byte_tokenizer().save_pretrained(tmp_path / "second")
        if stored == "another":
            path = tmp_path / "second" / "tokenizer.json"
            settings = read_json(path)
            ids = settings["model"]["vocab"]
            letters = [token for token, id in ids.items() if id >= FIRST_LETTER]
            settings["model"]["vocab"] = ids | dict(zip(letters, [ids[token] for token in reversed(letters)], strict=True))
            write_json(path, settings)
    second = type(model).from_pretrained(tmp_path / "second")
    check = (policy.backbone.model, policy.tokenization, second, "reference")
    if stored == "another":
        with pytest.raises(UserError, match=r"reference: .* another vocabulary"):
            require_vocabulary_of(*check)
    else:
        require_vocabulary_of(*check)
