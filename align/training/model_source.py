"""The model that a stage trains, before it is loaded: a name or folder, or objects in memory."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from peft import PeftConfig, PeftModel
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.model_registry.registry import resolve_model
from align.models.backbone import Backbone
from align.models.checkpoint import require_savable
from align.models.folders import base_of, changed_weights, load_config, unsaved_generation_settings
from align.models.loading import LoadedModel, from_objects, load, widen_float16
from align.models.lora import with_lora_settings
from align.models.quantization import quantization_of, require_adapter
from align.runtime.distributed import run_on_all, run_on_main
from align.runtime.sharding import sharded_loading
from align.training.run import Run

Model = str | Path | PreTrainedModel | PeftModel | LoadedModel
"""A trainer's model: a name or folder, a transformers model or `PeftModel` in memory, or a `LoadedModel`."""

Config = TypeVar("Config", bound=ModelConfig)


@dataclass(frozen=True)
class ModelSource:
    """A trainer's model with its tokenizer and the settings of its adapter.

    A stage gets its settings from the source, opens its `Run` with them, and then loads the model:

        run = Run(source.settings(config), "sft")
        loaded = source.load(run)

    Attributes:
        tokenizer: tokenizer of a transformers model in memory.
        peft_config: PEFT config of the trained adapter, instead of the LoRA settings.
        prefix_lm: whether to make the model a prefix language model.

    Raises:
        UserError: if the arguments are inconsistent, or the model's dtype cannot be trained.
    """

    model: Model
    tokenizer: PreTrainedTokenizerBase | None = None
    peft_config: PeftConfig | None = None
    prefix_lm: bool = False

    def __post_init__(self) -> None:
        """Reject inconsistent objects."""
        model = self.model
        if self.tokenizer is not None and not isinstance(model, PreTrainedModel | PeftModel):
            raise UserError("tokenizer: only a transformers model in memory takes one; leave it out")
        if isinstance(model, LoadedModel):
            if self.peft_config is not None:
                raise UserError("a LoadedModel has its adapter already: leave out peft_config")
        elif not isinstance(model, str | Path):
            if self.tokenizer is None:
                raise UserError("a transformers model in memory needs its tokenizer: give tokenizer=...")
            widen_float16(model, "model")

    def settings(self, config: Config) -> Config:
        """Return a stage's settings with the model's name, and its dtype and adapter if given.

        Raise a UserError if the settings also describe an adapter, or the adapter is not supported.
        """
        model, adapter = self.model, self.peft_config
        if isinstance(model, PeftModel):
            adapter = model.peft_config[model.active_adapters[0]]
        trains_adapter = adapter is not None or bool(config.lora_r) or isinstance(model, LoadedModel)
        require_adapter(self._quantization(config), str(getattr(model, "name_or_path", model)), trains_adapter)
        if adapter is not None:
            model_config: PreTrainedConfig
            if isinstance(model, str | Path):
                model_config = load_config(base_of(str(resolve_model(model)))[0])  # without loading its weights
            else:
                model_config = model.backbone.model.config if isinstance(model, LoadedModel) else model.config
            config = with_lora_settings(config, adapter, self.peft_config is not None, str(model_config.model_type))
        if isinstance(model, str | Path):
            return replace(config, model=str(model))
        if isinstance(model, LoadedModel):
            return config
        name = model.config.name_or_path or "a model in memory"
        return replace(config, model=name, dtype="float32" if model.dtype == torch.float32 else "bfloat16")

    def _quantization(self, config: ModelConfig) -> str:
        """Return the quantization format of the model's base, before its weights are loaded."""
        if not isinstance(self.model, str | Path):
            return "" if isinstance(self.model, LoadedModel) else quantization_of(self.model.config)
        if config.quantization:
            return config.quantization
        with suppress(UserError):  # loading reports a model that cannot be found
            return quantization_of(load_config(base_of(str(resolve_model(str(self.model))))[0]))
        return ""

    def load(
        self,
        run: Run,
        adapter: str = "policy",
        allow_reward_model: bool = False,
        frozen_copies: int = 0,
        is_trained: bool = True,
    ) -> LoadedModel:
        """Load the model with the settings of a run, or take the one in memory.

        Args:
            adapter: name of the trained adapter.
            allow_reward_model: whether the model may lack a vocabulary matrix.
            frozen_copies: number of frozen copies that the stage will keep. They count in the memory check before loading.
            is_trained: False for a teacher, whose weights may be frozen.

        Raises:
            UserError: if the model cannot be loaded, does not fit, or has no trainable weight.
        """
        model, config = self.model, run.model_config
        adapter = adapter if self.peft_config is None else "default"  # the name at which PEFT saves into the folder itself
        if isinstance(model, LoadedModel):
            loaded = model
        elif isinstance(model, str | Path):
            # One process of a machine makes a built-in model. An error is raised below, on all of them.
            with run.accelerator.local_main_process_first(), suppress(UserError, OSError):
                resolve_model(str(model))
            run_on_all(lambda: run.memory.check_before_load(frozen_copies), run.accelerator)
            with sharded_loading(run.accelerator):
                loaded = load(config, run.dtype, adapter, allow_reward_model, self.peft_config, self.prefix_lm)
            run.models.add(str(model))
        else:
            assert self.tokenizer is not None
            with sharded_loading(run.accelerator):  # transformers has sharded the model under the launcher of ZeRO-3
                loaded = from_objects(model, self.tokenizer, config, adapter, self.peft_config, self.prefix_lm)
            resumes = run.checkpoint is not None and run.stage in ("ppo", "dpo")
            run.print(changed_weights_warning(loaded, resumes))
        if is_trained:
            run.print(frozen_warning(loaded.backbone, gets_head=allow_reward_model))
        run_on_main(lambda: require_savable(loaded), run.accelerator)
        if is_trained and not allow_reward_model:
            run.print(generation_warning(loaded))
        run.print(long_rows_warning(loaded.backbone))
        return loaded


def frozen_warning(backbone: Backbone, gets_head: bool) -> str:
    """Return a line for a model without trainable weights, of which only a new head is trained; "" for other models.

    Raise a UserError if it gets no head.
    """
    if any(weight.requires_grad for weight in backbone.model.parameters()):
        return ""
    frozen = "all weights of the model are frozen, as merge_and_unload() leaves them"
    if not gets_head:
        raise UserError(f"{frozen}: call requires_grad_(True) on it")
    return f"warning: {frozen}: only its head is trained"


def changed_weights_warning(loaded: LoadedModel, resumes: bool) -> str:
    """Return a line if weights in memory differ from the folder's, which an adapter or a resumed run needs; or ""."""
    changed = changed_weights(loaded.backbone.model) if loaded.adapter or resumes else []
    if not changed:
        return ""
    what = f"warning: {len(changed)} weights of the model in memory ('{changed[0]}' for one) are not those of {loaded.base}"
    if loaded.adapter:
        return f"{what}, which the saved adapter names as its base: save the model, and load it from there"
    return f"{what}: if this run has trained them, load the model again, or the reference is a trained one"


def generation_warning(loaded: LoadedModel) -> str:
    """Return a line for a model whose generation config has settings that sampling ignores; "" for other models."""
    generation = getattr(loaded.backbone.model, "generation_config", None)
    names = ", ".join(sorted(unsaved_generation_settings(generation))) if generation is not None else ""
    if not names:
        return ""
    saved = "generate on the adapter's base still applies them" if loaded.adapter else "the saved model does not keep them"
    return f"the model's generation_config has settings that sampling does not apply: {names}; {saved}"


def long_rows_warning(backbone: Backbone) -> str:
    """Return a line for LongRoPE (Phi-3.5, arXiv 2402.13753): the longest row of a batch sets the frequencies of all."""
    config = backbone.model.config
    settings = getattr(config, "rope_parameters", None) or {}
    original = settings.get("original_max_position_embeddings")
    if settings.get("rope_type") != "longrope" or not original:
        return ""
    return (
        f"model type '{config.model_type}' has LongRoPE: a row of more than {original} tokens changes the log-probs of "
        f"every row in its batch; limit prompts and responses to {original} tokens together"
    )
