"""Convert GGUF files, as used by llama.cpp and Ollama, to bfloat16 transformers folders."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from align.core.errors import UserError, reason


def build(folder: Path, _work: Path, file: str) -> None:
    """Convert the model and tokenizer of a GGUF file into a folder.

    Raises:
        UserError: if transformers cannot read the file.
    """
    path = Path(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        quantized = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
        model = plain_copy(quantized)
    except Exception as error:  # the file may be invalid in any way
        raise UserError(f"{file}: transformers cannot read this GGUF file ({reason(error)})") from error
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def plain_copy(quantized: PreTrainedModel) -> PreTrainedModel:
    """Copy the weights of a model loaded from GGUF into one that can be saved. The original counts as quantized."""
    config = quantized.config
    for name in ("quantization_config", "_model_name_or_path"):
        vars(config).pop(name, None)
    with torch.device("meta"):  # skip the random initialization
        model: PreTrainedModel = type(quantized)(config)
    model.load_state_dict(quantized.state_dict(), strict=True, assign=True)
    model.tie_weights()
    model.config.dtype = quantized.dtype
    return model
