"""The model behind lm_eval_truthful.json: SmolLM2's tokenizer on two random layers, so that lm-eval takes a minute.

python -m tests.eval.parity_model FOLDER
python -m benchmarks.eval_parity --model FOLDER --python ... \
    --fixture tests/eval/lm_eval_truthful.json
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from align.model_registry.registry import resolve_model


def build(folder: Path) -> Path:
    """Write the model, the same weights every time, so large that its probabilities are far from uniform."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(**shape, **ends, vocab_size=len(tokenizer), max_position_embeddings=2048, tie_word_embeddings=True)
    model, generator = LlamaForCausalLM(config), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.dim() < 2:
                weight.copy_(1 + 0.1 * drawn)
            else:
                weight.copy_(drawn * (0.4 if "embed" in name else 1.5 / weight.shape[-1] ** 0.5))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
