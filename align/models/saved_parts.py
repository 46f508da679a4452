"""Tensors and tokenizer files of a saved model that transformers and PEFT do not write."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from peft.utils import get_peft_model_state_dict
from torch import Tensor
from transformers import PreTrainedModel

from align.core.errors import UserError
from align.models.folders import base_of, load_config, stored_file
from align.models.loading import LoadedModel

ORIGINAL_TOKENIZERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm")
"""SentencePiece files, which transformers reads but does not write."""


def copy_tokenizer_files(base: str, folder: Path) -> None:
    """Copy the files from which a base's tokenizer was converted, if `save_pretrained` has not written them.

    transformers writes tokenizer.json only. Converters for llama.cpp and others read the original file.
    """
    for name in ORIGINAL_TOKENIZERS:
        source = stored_file(base_of(base)[0], name)
        if source is not None and not (folder / name).exists():
            shutil.copyfile(source, folder / name)


def separate_untied(model: PreTrainedModel, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return weights in which a vocabulary matrix that the config does not tie shares no memory with the embedding.

    It was tied in memory. The config does not tie it on loading, and transformers writes shared memory once.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight or model.config.get_text_config().tie_word_embeddings:
        return state
    (name,) = (f"{name}.weight" for name, module in model.named_modules() if module is head)
    return {**state, name: state[name].clone()}


def adapter_weights(loaded: LoadedModel, name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of one adapter under PEFT's full names; none share memory, which safetensors rejects.

    Raises:
        UserError: if the adapter has no weights.
    """
    peft_model = loaded.backbone.peft
    assert peft_model is not None
    full = {f"base_model.model.{key}": value for key, value in state.items()}
    # By default PEFT would also save the base's embedding matrices under adapters, twice if they are tied.
    found = get_peft_model_state_dict(
        peft_model, state_dict=full, adapter_name=name, save_embedding_layers=_has_resized_embedding(loaded)
    )
    if not found:
        raise UserError(f"adapter '{name}' holds no weights: nothing was saved")
    weights: dict[str, Tensor] = {}
    seen = set[int]()
    for key, value in found.items():
        storage = value.untyped_storage().data_ptr()
        weights[key] = value.clone() if storage in seen else value
        seen.add(storage)
    return weights


def _has_resized_embedding(loaded: LoadedModel) -> bool:
    """Return whether the base in memory and in its folder differ in vocabulary size. The adapter then stores the rows."""
    with suppress(UserError):
        config = load_config(base_of(loaded.base)[0]).get_text_config()
        return bool(config.vocab_size != loaded.backbone.model.config.get_text_config().vocab_size)
    return False
