"""GGUF files as models: converted once, with the weights and the tokenizer of the file."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.model_registry.registry import fetch_model
from align.models.loading import load

HIDDEN, INNER, HEADS = 32, 48, 2
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "\u0120", "ab"]
TOKENS = ["<unk>", "<s>", "</s>", *LETTERS]


def write_gguf(path: Path) -> np.ndarray:
    """Write a tiny Llama; returns its embedding."""
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * len(LETTERS)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    square, inner = (HIDDEN, HIDDEN), (INNER, HIDDEN)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output": (len(TOKENS), HIDDEN)}
    shapes |= {f"blk.0.{name}": square for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {"blk.0.ffn_gate": inner, "blk.0.ffn_up": inner, "blk.0.ffn_down": (HIDDEN, INNER)}
    tensors = {name: (0.1 * generator.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    for name, tensor in (tensors | {name: np.ones(HIDDEN, np.float32) for name in norms}).items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors["token_embd"]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ALIGN_CACHE", str(tmp_path / "cache"))


def test_a_gguf_file_is_a_model(own_cache, tmp_path):
    embedding = write_gguf(tmp_path / "tiny.gguf")
    folder = fetch_model(tmp_path / "tiny.gguf")
    assert folder == fetch_model(str(tmp_path / "tiny.gguf")), "converted once"
    loaded = load(ModelConfig(model=str(tmp_path / "tiny.gguf"), chat_template="raw"), torch.float32)
    weight = loaded.backbone.model.get_input_embeddings().weight
    assert torch.equal(weight, torch.from_numpy(embedding).bfloat16().float())
    assert loaded.tokenization.tokenizer.decode(loaded.tokenization.text_ids("hello")) == "hello"


def test_a_file_that_is_no_gguf_is_one_line(own_cache, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"broken\.gguf: transformers cannot read this GGUF file") as caught:
        fetch_model(tmp_path / "broken.gguf")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"missing\.gguf': no such file"):
        fetch_model(tmp_path / "missing.gguf")
