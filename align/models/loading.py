"""Loading of models: folders, hub names, built-in models, LoRA adapters, models in memory; never by pickle."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from align.core.errors import UserError, first_line
from align.core.files import read_json
from align.core.settings import ModelConfig
from align.model_registry.registry import resolve_model
from align.models.adapters import copy_adapter, faster_lora, load_adapter, match_dtype, merge_adapter
from align.models.backbone import Backbone, wrap
from align.models.backbone.contract import refuse_language_model
from align.models.backbone.kinds import (
    attention_kernel,
    has_separate_encoder,
    is_encoder,
    make_prefix_lm,
    prepare_model,
    use_block_attention,
)
from align.models.folders import (
    adapter_quantization,
    base_of,
    end_ids,
    load_config,
    load_weights,
    make_on_meta,
    reads_prompts_whole,
    require_finite,
    stored_generation_config,
    tokenizer_source,
    valid_generation_config,
)
from align.models.lora import (
    START_ADAPTER,
    new_lora_config,
    prepared_lora_config,
    require_same_lora,
    tied_adapter_warning,
    train_active_adapter,
)
from align.models.quantization import (
    dequantized,
    prepare_quantized,
    quantization_of,
    require_adapter,
)
from align.models.vocabulary import require_rows, require_vocabulary, require_vocabulary_of, rows_of_texts, vocabulary_rows
from align.runtime.distributed import compute_dtype, computes_on_cpu, print_once
from align.tokenization import ConversationError, PairTokenization, Tokenization


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be trained or sampled from.

    Attributes:
        base: name or folder of the base weights.
        adapter: the trained adapter, or None if all weights are trained.
        initial_adapter: frozen adapter from which training starts. If None, training starts from the base.
    """

    backbone: Backbone
    tokenization: Tokenization
    base: str
    adapter: str | None = None
    initial_adapter: str | None = None


def load(
    config: ModelConfig,
    dtype: torch.dtype,
    adapter: str = "policy",
    allow_reward_model: bool = False,
    peft_config: PeftConfig | None = None,
    prefix_lm: bool = False,
) -> LoadedModel:
    """Load a model and its tokenizer, with a trainable adapter if the config sets one.

    If the checkpoint is an adapter, a frozen copy is kept as the initial model (PPO's reference), and another copy is
    trained. If all weights are to be trained, the adapter is merged into its base.

    Args:
        adapter: name of the trained adapter.
        allow_reward_model: accept encoders and saved reward models, which have no LM head.
        peft_config: PEFT config of a new adapter, instead of the config's LoRA settings.
        prefix_lm: make the model a prefix language model. A saved prefix language model does not need it.

    Raises:
        UserError: if the model cannot be loaded, its architecture is not supported, or it is an adapter whose LoRA settings
            differ from the config.
    """
    require_adapter(config.quantization, config.model, bool(config.lora_r or peft_config))
    how = (config.chat_template, allow_reward_model, prefix_lm)
    stored = _read(config.model, dtype, *how, quantization=config.quantization, dequantizes=not config.lora_r)
    model, tokenization, folder, base, is_adapter = stored
    if not is_adapter:
        return _with_fresh_adapter(model, tokenization, base, config, adapter, peft_config=peft_config)
    if peft_config is not None:
        raise UserError(f"model '{config.model}' is an adapter, which training continues: leave out peft_config")
    if not config.lora_r:
        return _finish(config, _whole(stored))
    print_other_base(folder, model)
    peft_model = load_adapter(model, folder, START_ADAPTER)
    require_same_lora(config, model, peft_model.peft_config[START_ADAPTER])
    copy_adapter(peft_model, START_ADAPTER, adapter)
    return _finish(config, LoadedModel(wrap(model, faster_lora(peft_model)), tokenization, base, adapter, START_ADAPTER))


def load_whole(
    name: str,
    dtype: torch.dtype,
    chat_template: str = "auto",
    allow_reward_model: bool = False,
    quantization: str = "",
    merges: bool = False,
) -> LoadedModel:
    """Load a frozen model. A saved adapter is merged into its base, which is dequantized for this.

    Args:
        quantization: quantization format of the base; an adapter is then not merged. If "", the stored format.
        merges: whether to dequantize and merge even a base that is stored quantized.

    Raises the errors of `load`.
    """
    how = (chat_template, allow_reward_model)
    return _whole(_read(name, dtype, *how, quantization=quantization, dequantizes=merges or None))


def print_other_base(folder: str, model: PreTrainedModel) -> None:
    """Print a line if an adapter was trained on a quantized base and is loaded onto another format."""
    trained_on, quantization = adapter_quantization(folder), quantization_of(model.config)
    if not trained_on or trained_on == quantization:
        return
    flag = "load_in_8bit" if trained_on == "int8" else "load_in_4bit"
    print_once(
        f"warning: adapter '{folder}' was trained on a {trained_on} base, but its base is {quantization or 'not quantized'} "
        f"here, which changes its outputs; set {flag} true"
    )


class _Stored(NamedTuple):
    """A model as it is stored: the weights of its folder, or of the base if the folder is an adapter."""

    model: PreTrainedModel
    tokenization: Tokenization
    folder: str
    base: str
    is_adapter: bool


def _read(
    name: str,
    dtype: torch.dtype,
    chat_template: str,
    allow_reward_model: bool = False,
    prefix_lm: bool = False,
    on_meta: bool = False,
    quantization: str = "",
    dequantizes: bool | None = False,
) -> _Stored:
    """Read a model with its tokenizer.

    If an adapter was trained on a quantized base, `dequantizes` loads the base with dequantized weights, into which the
    adapter can be merged. If None, this is done unless the base is stored as it was in training.
    """
    folder = str(resolve_model(name))
    base, is_adapter = base_of(folder)
    if not allow_reward_model and is_encoder(settings := load_config(base)):
        refuse_language_model(settings.model_type, name)
    if (
        is_adapter
        and not allow_reward_model
        and read_json(Path(folder) / "adapter_config.json").get("task_type") == "SEQ_CLS"
    ):
        raise UserError(
            f"model '{name}': it is the adapter of a classifier, such as a reward model: it cannot generate text"
        )
    if on_meta:
        model = make_on_meta(base, dtype, quantization)
    elif is_adapter and not quantization and dequantizes is not False:
        model = _base_of_training(name, folder, base, dtype, dequantizes is True)
    else:
        model = load_weights(base, dtype, quantization)
    if model.get_output_embeddings() is None and not allow_reward_model:
        raise UserError(f"model '{name}': it is a reward model without an LM head, so it cannot generate text")
    if prefix_lm or (is_adapter and reads_prompts_whole(folder)):
        make_prefix_lm(model.config, name)
    tokenization = load_tokenization(name, chat_template, model.config)
    require_vocabulary(model, tokenization, name)
    return _Stored(model, tokenization, folder, base, is_adapter)


def _base_of_training(name: str, folder: str, base: str, dtype: torch.dtype, always: bool) -> PreTrainedModel:
    """Load the base of an adapter as in training, dequantized if it was quantized then but is not stored quantized."""
    stored = quantization_of(load_config(base))
    trained_on = stored or adapter_quantization(folder)
    if not trained_on or (stored and not always):
        return load_weights(base, dtype)
    print_once(f"model '{name}': its base was quantized ({trained_on}) in training; its dequantized weights are merged")
    return dequantized(load_weights(base, dtype, trained_on), dtype)


def _whole(stored: _Stored) -> LoadedModel:
    model = stored.model
    if stored.is_adapter and quantization_of(model.config):
        print_other_base(stored.folder, model)
        peft_model = faster_lora(load_adapter(model, stored.folder, START_ADAPTER))
        return LoadedModel(wrap(model, peft_model), stored.tokenization, stored.base, START_ADAPTER)
    if stored.is_adapter:
        merged = merge_adapter(load_adapter(model, stored.folder, "merged"), stored.folder)
        model = merged.requires_grad_(True)  # PEFT had frozen the base
    return LoadedModel(wrap(model), stored.tokenization, stored.base)


def load_frozen(
    model: str,
    dtype: str = "auto",
    chat_template: str = "auto",
    device: torch.device | None = None,
    quantization: str = "",
) -> LoadedModel:
    """Load a model without gradients, in evaluation mode, on a device (default: the GPU if there is one)."""
    loaded = load_whole(model, compute_dtype(dtype), chat_template, quantization=quantization)
    loaded.backbone.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval().requires_grad_(False)
    return loaded


def load_tokenization(model: str, chat_template: str = "auto", config: PreTrainedConfig | None = None) -> Tokenization:
    """Load the tokenization of a model without its weights. `config` is the model's config, if known."""
    source = str(resolve_model(model))
    base, _ = base_of(source)
    generation = stored_generation_config(source)
    if generation is None and base != source:
        generation = stored_generation_config(base)
    config = config or load_config(base)
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_source(source, base))
        return make_tokenization(tokenizer, chat_template, config, generation)
    except ConversationError as error:
        raise UserError(f"model '{model}': {error}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"model '{model}': its tokenizer cannot be loaded ({first_line(error)})") from error


def make_tokenization(
    tokenizer: PreTrainedTokenizerBase, chat_template: str, config: PreTrainedConfig, generation: GenerationConfig | None
) -> Tokenization:
    """Return the tokenization of a model with these configs; an encoder reads prompt and response as a pair."""
    kind = PairTokenization if is_encoder(config) else Tokenization
    return kind(tokenizer, chat_template, end_ids(generation, config, tokenizer), has_separate_encoder(config))


def load_on_meta(
    config: ModelConfig,
    dtype: torch.dtype,
    adapter: str = "policy",
    allow_reward_model: bool = False,
    prefix_lm: bool = False,
) -> LoadedModel:
    """Return a model as `load` would, with shapes but no data, for estimates of models of any size.

    Responses are assumed to share a row with their prompt, unless the model is an encoder.
    """
    require_adapter(config.quantization, config.model, bool(config.lora_r))
    how = (config.chat_template, allow_reward_model, prefix_lm)
    stored = _read(config.model, dtype, *how, on_meta=True, quantization=config.quantization)
    with torch.device("meta"):
        loaded = _with_fresh_adapter(stored.model, stored.tokenization, stored.base, config, adapter, check=False)
    loaded.backbone.shares_prompts = not is_encoder(stored.model.config)
    return loaded


def from_objects(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    config: ModelConfig,
    adapter: str = "policy",
    peft_config: PeftConfig | None = None,
    prefix_lm: bool = False,
) -> LoadedModel:
    """Take a transformers model in memory, as `load` would have loaded it from its folder.

    The model is changed in place: dropout is disabled, the attention kernel is chosen, adapters are added, and unused
    generation settings are unset. Its dtype is kept. The active adapter of a `PeftModel` is trained, and a frozen copy of
    it is kept as the initial model. The tokenizer is copied because its chat template changes.

    Args:
        peft_config: PEFT config of a new adapter, instead of the config's LoRA settings.
        prefix_lm: make the model a prefix language model.

    Raises:
        UserError: if the architecture or the adapter is not supported.
    """
    peft_model = model if isinstance(model, PeftModel) else None
    if peft_model is not None:
        if peft_config is not None:
            raise UserError("the model is a PeftModel, whose adapter is trained: leave out peft_config")
        model = cast(PreTrainedModel, peft_model.get_base_model())
    elif getattr(model, "peft_config", None):
        raise UserError(
            "the model carries PEFT adapters of transformers: load its folder by one of PEFT's AutoPeftModel classes, which "
            "make a PeftModel"
        )
    assert isinstance(model, PreTrainedModel)
    _prepare_object(model)
    if prefix_lm:
        make_prefix_lm(model.config, model.config.name_or_path or "in memory")
    prepare_model(model)
    generation = valid_generation_config(model.generation_config) if model.can_generate() else None
    if generation is not None:
        model.generation_config = generation
    tokenization = make_tokenization(copy.deepcopy(tokenizer), config.chat_template, model.config, generation)
    base = model.config.name_or_path or "a model in memory"
    require_vocabulary(model, tokenization, base)
    require_finite(model.named_parameters(), f"model '{base}'")
    if peft_model is None:
        return _with_fresh_adapter(model, tokenization, base, config, adapter, peft_config=peft_config)
    name = train_active_adapter(peft_model)
    backbone = wrap(model, faster_lora(peft_model))
    return _finish(config, LoadedModel(backbone, tokenization, base, name, START_ADAPTER))


def read_by_ids_of(
    policy: LoadedModel,
    model: PreTrainedModel,
    role: str,
    gradient_checkpointing: bool = False,
    reads_text_alone: bool = False,
) -> Backbone:
    """Take a second model in memory that reads the policy's token ids. The model is changed in place as in `from_objects`.

    Args:
        role: name of the model in error messages.
        reads_text_alone: whether to leave out ids without text, which its embedding matrix may lack.

    Raises:
        UserError: if its vocabulary or its context is too small, or its architecture or dtype is not supported.
    """
    if isinstance(model, PeftModel) or getattr(model, "peft_config", None):
        raise UserError(
            f"{role}: the model carries PEFT adapters; merge them first, by merge_and_unload() on a model that was loaded "
            "by peft.AutoPeftModelForSequenceClassification"
        )
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"{role}: {type(model).__name__} is no model of transformers, and other modules are not supported")
    widen_float16(model, role)
    if is_encoder(model.config):
        raise UserError(f"{role}: {type(model).__name__} is an encoder, which cannot read the policy's token ids")
    _prepare_object(model)
    require_vocabulary_of(policy.backbone.model, policy.tokenization, model, role)
    sampled = vocabulary_rows(policy.backbone.model)
    require_rows(model, rows_of_texts(policy.tokenization, sampled) if reads_text_alone else sampled, role)
    require_finite(model.named_parameters(), role)
    backbone = wrap(model)
    if gradient_checkpointing:
        recompute_activations(backbone)
    return backbone


def _prepare_object(model: PreTrainedModel) -> None:
    """Prepare a model in memory as if it had been saved and loaded by this package."""
    model.eval()
    model.config.architectures = [type(model).__name__]  # as `save_pretrained` writes it
    model.set_attn_implementation(attention_kernel(model.config))
    prepare_quantized(model, model.dtype)


def widen_float16(model: PreTrainedModel | PeftModel, role: str) -> None:
    """Convert a float16 model in place, to bfloat16 if the hardware multiplies it, else to float32.

    Raises:
        UserError: if the dtype is not float32, bfloat16 or float16.
    """
    if model.dtype in (torch.float32, torch.bfloat16):
        return
    number_format = str(model.dtype).removeprefix("torch.")
    if model.dtype != torch.float16:
        raise UserError(f"{role}: the model is in {number_format}; convert it to float32 or bfloat16")
    dtype = compute_dtype("auto")
    for value in (*model.parameters(), *model.buffers()):  # `to` rejects a quantized model with int8 weights
        if value.dtype == torch.float16:
            value.data = value.data.to(dtype)
    model.config.dtype = dtype
    print_once(f"{role}: the model is in float16, and was converted to {str(dtype).removeprefix('torch.')}")


def freeze_unused_lm_head(backbone: Backbone) -> None:
    """Freeze an untied vocabulary matrix, because rewards and values give it no gradient."""
    if not isinstance(backbone.model, PreTrainedModel):  # a user's module
        return
    vocabulary, embedding = backbone.model.get_output_embeddings(), backbone.model.get_input_embeddings()
    if vocabulary is not None and vocabulary.weight is not embedding.weight:
        vocabulary.requires_grad_(False)


def _with_fresh_adapter(
    model: PreTrainedModel,
    tokenization: Tokenization,
    base: str,
    config: ModelConfig,
    adapter: str,
    check: bool = True,
    peft_config: PeftConfig | None = None,
) -> LoadedModel:
    """Return a model with all weights trained, or with a new adapter. For `check`, see `wrap`."""
    if not (config.lora_r or peft_config):
        require_adapter(quantization_of(model.config), base, has_adapter=False)
        if config.lora:
            raise UserError("lora is given, but lora_r is 0, which trains all weights: set lora_r, or leave out lora")
        return _finish(config, LoadedModel(wrap(model, check=check), tokenization, base))
    lora = prepared_lora_config(peft_config, model, base) if peft_config else new_lora_config(config, model, base)
    try:
        peft_model = get_peft_model(model, lora, adapter_name=adapter, autocast_adapter_dtype=False)
    except ValueError as error:
        where = "peft_config" if peft_config else f"lora_target_modules '{config.lora_target_modules}'"
        raise UserError(f"{where}: {first_line(error)}") from error
    match_dtype(peft_model, adapter)
    print_once(tied_adapter_warning(model))
    backbone = wrap(model, faster_lora(peft_model), check)
    return _finish(config, LoadedModel(backbone, tokenization, base, adapter))


def _finish(config: ModelConfig, loaded: LoadedModel) -> LoadedModel:
    if config.block_attention:
        if computes_on_cpu():
            raise UserError("block_attention: FlexAttention has no gradient on a processor; set block_attention to false")
        use_block_attention(loaded.backbone)
    if config.gradient_checkpointing:
        recompute_activations(loaded.backbone)
    return loaded


def recompute_activations(backbone: Backbone) -> None:
    """Enable gradient checkpointing. Raise a UserError if the architecture does not support it."""
    if not backbone.model.supports_gradient_checkpointing:
        kind = backbone.model.config.model_type
        raise UserError(f"gradient_checkpointing: transformers does not support it for model type '{kind}'; set it to false")
    backbone.recomputes = True
