"""The beginning that all stages share: a run's folder, the model, what trains it, and `sequence_parallel`."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from align.batches.mixtures import TrainingData, data_name
from align.core.errors import UserError
from align.core.settings import StageConfig
from align.core.tensor_ops import Padded
from align.model_registry.registry import resolve_model
from align.models.backbone import Backbone
from align.models.backbone.attention import SDPA
from align.models.checkpoint import require_savable
from align.models.configs import base_of, load_config
from align.models.loading import LoadedModel, from_objects, load
from align.models.lora import with_lora_settings
from align.runtime.distributed import broadcast_trainable_weights, run_on_all, run_on_main, zero_stage
from align.runtime.sequence import share_rows
from align.runtime.sharding import sharded_loading
from align.training.engine import TrainEngine
from align.training.optimizer import ParamGroup
from align.training.run import Run

Model = str | Path | PreTrainedModel | PeftModel | LoadedModel
"""A trainer's model: a name or folder, a transformers model in memory, alone or in a `PeftModel`, or one that is loaded."""


def open_run(
    config: StageConfig,
    stage: str,
    model: Model,
    tokenizer: PreTrainedTokenizerBase | None = None,
    adapter: str = "policy",
    allow_reward_model: bool = False,
    frozen_copies: int = 0,
    peft_config: PeftConfig | None = None,
) -> tuple[Run, LoadedModel]:
    """Open a run's folder and take or load its model.

    Args:
        config: a stage's settings. In the run's copy, `model` and `dtype` are those of the given model.
        tokenizer: of a transformers model in memory.
        adapter: name of the trained adapter.
        allow_reward_model: whether a model may lack a vocabulary matrix.
        frozen_copies: copies of the model that the stage will keep; counted before a model is loaded.
        peft_config: of the adapter that is trained, in place of the settings of LoRA.

    Raises:
        UserError: if the folder holds another run, or the model cannot be loaded or does not fit.
    """
    if tokenizer is not None and not isinstance(model, PreTrainedModel | PeftModel):
        raise UserError("tokenizer: only a transformers model in memory takes one; leave it out")
    peft_settings = _peft_config_of(model, peft_config)
    if peft_settings is not None:
        config = with_lora_settings(config, peft_settings, peft_config is not None, _config_of(model).model_type)
    if isinstance(model, str | Path):
        model = str(model)
        run = Run(replace(config, model=model), stage)
        # One process of a machine makes a built-in model. An error is raised below, on all of them.
        with run.accelerator.local_main_process_first(), suppress(UserError, OSError):
            resolve_model(model)
        run_on_all(lambda: run.memory.check_before_load(frozen_copies), run.accelerator)
        with sharded_loading(run.accelerator):
            loaded = load(run.config, run.dtype, adapter, allow_reward_model, peft_config)
    elif isinstance(model, LoadedModel):
        if peft_config is not None:
            raise UserError("a LoadedModel has its adapter already: leave out peft_config")
        run, loaded = Run(config, stage), model
    else:
        run, loaded = _run_from_objects(config, stage, model, tokenizer, adapter, peft_config)
    run_on_main(lambda: require_savable(loaded), run.accelerator)
    run.print(long_rows_warning(loaded.backbone))
    return run, loaded


def _peft_config_of(model: Model, given: PeftConfig | None) -> PeftConfig | None:
    """Return the settings of the adapter that is trained: those of a PEFT model, or the given ones."""
    return model.peft_config[model.active_adapters[0]] if isinstance(model, PeftModel) else given


def _config_of(model: Model) -> PreTrainedConfig:
    """Return the config of a model, without loading its weights."""
    if isinstance(model, str | Path):
        return load_config(base_of(str(resolve_model(model)))[0])
    return model.backbone.model.config if isinstance(model, LoadedModel) else model.config


def _run_from_objects(
    config: StageConfig,
    stage: str,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase | None,
    adapter: str,
    peft_config: PeftConfig | None,
) -> tuple[Run, LoadedModel]:
    if tokenizer is None:
        raise UserError("a transformers model in memory needs its tokenizer: give tokenizer=...")
    name = model.config.name_or_path or "a model in memory"
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise UserError(f"the model is in {str(model.dtype).removeprefix('torch.')}: convert it to float32 or bfloat16")
    config = replace(config, model=name, dtype="float32" if model.dtype == torch.float32 else "bfloat16")
    run = Run(config, stage)
    with sharded_loading(run.accelerator):  # transformers has sharded the model under the launcher of ZeRO-3
        return run, from_objects(model, tokenizer, config, adapter, peft_config)


def long_rows_warning(backbone: Backbone) -> str:
    """A line for models with LongRoPE (Phi-3.5, arXiv 2402.13753): a batch's longest row sets the frequencies of all."""
    config = backbone.model.config
    settings = getattr(config, "rope_parameters", None) or {}
    original = settings.get("original_max_position_embeddings")
    if settings.get("rope_type") != "longrope" or not original:
        return ""
    return (
        f"model type '{config.model_type}' has LongRoPE: a row of more than {original} tokens changes the log-probs of "
        f"every row in its batch; limit prompts and responses to {original} tokens together"
    )


def warn_if_prompts_are_reread(run: Run, backbone: Backbone, responses: Iterable[int]) -> None:
    """Warn that prompts are read again for each of their responses, of which `responses` has the numbers."""
    if not backbone.shares_prompts and max(responses, default=0) > 1:
        run.print("the model cannot read several responses in one row: each is read with its prompt, which is slower")


def build_engine(
    run: Run, module: nn.Module, total_steps: int, groups: Sequence[ParamGroup] = (), average_decay: float = 0.0
) -> TrainEngine:
    """Build a run's engine: DeepSpeed's where the launcher asked for it. Arguments are those of `TrainEngine`.

    Drawn weights (adapters, heads) become those of the first process. Raises a UserError for a mean of weights under ZeRO-3.
    """
    broadcast_trainable_weights(module, run.accelerator)
    if run.accelerator.state.deepspeed_plugin is None:
        return TrainEngine(run, module, total_steps, groups, average_decay)
    if average_decay and zero_stage(run.accelerator) == 3:
        raise UserError("a mean of the weights is not kept under ZeRO-3: set ema_decay to 0, or use ZeRO-1 or 2")
    from align.training.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(run, module, total_steps, groups, average_decay)


TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""By how much states may differ, as a share of their largest: what another order of sums changes in a few layers."""


Config = TypeVar("Config", bound=StageConfig)


def with_data_names(config: Config, **data: TrainingData) -> Config:
    """Return the settings with the names of the data that a trainer was given: a file's name, or the number of records."""
    return replace(config, **{name: data_name(given) for name, given in data.items()})  # type: ignore[arg-type]


def share_sequences(run: Run, backbone: Backbone, size: int) -> None:
    """Let each `size` processes read a part of the same rows each, after checking that only rounding changes.

    Raises:
        UserError: if the model or the number of processes does not allow it.
    """
    if size == 1:
        return
    config, processes = backbone.model.config, run.accelerator.num_processes
    heads = getattr(config, "num_attention_heads", 0)
    shared = getattr(config, "num_key_value_heads", None) or heads
    problem = ""
    if not backbone.causal:
        problem = f"only decoders share rows, and {config.model_type} is none"
    elif zero_stage(run.accelerator) == 3:
        problem = "under ZeRO-3 no process has a whole model to check it with; use ZeRO-1 or 2, or none"
    elif processes % size:
        problem = f"it must divide the number of processes, {processes}"
    elif heads % size or shared % size:
        problem = f"it must divide the model's {heads} heads of queries and {shared} of keys"
    elif config._attn_implementation != SDPA:
        problem = f"the attention of {config.model_type} is its own, and exchanges nothing"
    elif getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
        problem = f"{config.model_type} looks back over a window, which parts of a row do not know"
    if problem:
        raise UserError(f"sequence_parallel is {size}: {problem}; set it to 1")
    ids = torch.arange(2 * size + 1, device=backbone.device) % int(config.vocab_size)
    prompt, response = Padded.from_lists([ids[:2].tolist()]), Padded.from_lists([ids[2:].tolist()])
    prompt, response = prompt.to(backbone.device), response.to(backbone.device)
    with torch.no_grad():
        expected = backbone.hidden(prompt, response)
        # Each response has a row of its own: a shared one would need a mask.
        backbone.sequence, backbone.shares_prompts = share_rows(run.accelerator, size), False
        found = backbone.hidden(prompt, response)
    limit = TOLERANCE[backbone.model.dtype] * float(expected.abs().max())
    if not torch.allclose(found, expected, rtol=0, atol=limit):
        raise UserError(
            f"sequence_parallel is {size}: {config.model_type} computes something else from parts of a row; set it to 1"
        )
