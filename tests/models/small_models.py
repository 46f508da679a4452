"""Small models whose architectures read positions, windows and attention heads in different ways."""

from transformers import (
    BartConfig,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    MistralConfig,
    Qwen2Config,
)

from tests.conftest import TINY

WIDTH = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = WIDTH | {"num_key_value_heads": 2}
BART = {f"{half}_{part}": n for half in ("encoder", "decoder") for part, n in (("layers", 2), ("attention_heads", 4))}
BART |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32, "vocab_size": 64, "dropout": 0.0}
GPT_NEO = {"hidden_size": 32, "vocab_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
# Windows of 8 tokens on rows of up to 13: a path that forgets the window cannot pass.
CONFIGS = {
    "gpt-neox": GPTNeoXConfig(**WIDTH, max_position_embeddings=64),
    "qwen2": Qwen2Config(**GROUPED, max_position_embeddings=64),
    "mistral": MistralConfig(**GROUPED, max_position_embeddings=64, sliding_window=None),
    "mistral-window": MistralConfig(**GROUPED, max_position_embeddings=64, sliding_window=8),
    "gemma2": Gemma2Config(**GROUPED, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=2.0),
    "gemma2-window": Gemma2Config(**GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=8),
    "gpt-neo-window": GPTNeoConfig(**GPT_NEO, attention_types=[[["global", "local"], 1]], window_size=8),
    # 13 tokens fit a context of 16; the shared row of prompt 0 is longer, but its positions restart.
    "gpt2-short": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16),
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
    "bart": BartConfig(**BART, max_position_embeddings=16),
}
NAMES = (*TINY, *CONFIGS)
