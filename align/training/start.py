"""The beginning that all stages share: a run's folder, and the model that it trains."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from align.builtin.zoo import resolve_model
from align.core.errors import UserError
from align.core.settings import ModelConfig, RunConfig
from align.models.backbone import Backbone
from align.models.checkpoint import require_savable
from align.models.loading import LoadedModel, from_objects, load
from align.runtime.distributed import run_on_all, run_on_main
from align.runtime.sharding import sharded_loading
from align.training.run import Run

Model = str | Path | PreTrainedModel | LoadedModel
"""What a trainer takes as its model: a name or folder, a transformers model in memory, or one that is loaded already."""


def open_run(
    config: RunConfig,
    stage: str,
    model: Model,
    tokenizer: PreTrainedTokenizerBase | None = None,
    adapter: str = "policy",
    allow_reward_model: bool = False,
    frozen_copies: int = 0,
) -> tuple[Run, LoadedModel]:
    """Open a run's folder and take or load its model.

    Args:
        config: a stage's settings, which hold those of `ModelConfig` too. In the run's own copy, `model` and
            `dtype` are those of the given model.
        stage: `sft`, `reward`, `rules`, `attributes`, `ppo`, `dpo` or `distill`.
        tokenizer: of a transformers model in memory.
        adapter: what to call the trained adapter.
        allow_reward_model: whether a model without a vocabulary matrix will do.
        frozen_copies: copies of the model that the stage will keep; counted before a model is loaded.

    Raises:
        UserError: if the folder holds another run, or the model cannot be loaded or does not fit.
    """
    assert isinstance(config, ModelConfig)
    if isinstance(model, str | Path):
        model = str(model)
        run = Run(replace(config, model=model), stage)  # type: ignore[call-arg]
        # One process of a machine makes a built-in model. An error is raised below, on all of them.
        with run.accelerator.local_main_process_first(), suppress(UserError, OSError):
            resolve_model(model)
        run_on_all(lambda: run.memory.check_before_load(run.config, copies=frozen_copies), run.accelerator)
        with sharded_loading(run.accelerator):
            loaded = load(run.config, run.dtype, adapter, allow_reward_model)
    elif isinstance(model, LoadedModel):
        run, loaded = Run(config, stage), model
    else:
        run, loaded = _run_from_objects(config, stage, model, tokenizer, adapter)
    run_on_main(lambda: require_savable(loaded), run.accelerator)
    run.say(long_rows_warning(loaded.backbone))
    return run, loaded


def _run_from_objects(
    config: RunConfig, stage: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, adapter: str
) -> tuple[Run, LoadedModel]:
    assert isinstance(config, ModelConfig)
    if tokenizer is None:
        raise UserError("a transformers model in memory needs its tokenizer: give tokenizer=...")
    name = model.config.name_or_path or "a model in memory"
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"the model is in {dtype}: convert it to float32 or bfloat16")
    config = replace(config, model=name, dtype=dtype)  # type: ignore[call-arg]
    return Run(config, stage), from_objects(model, tokenizer, config, adapter)


def long_rows_warning(backbone: Backbone) -> str:
    """A line for models whose short texts read differently beside a long one, "" for others.

    LongRoPE (Phi-3.5, arXiv 2402.13753) has other frequencies beyond the original context. transformers chooses them by the
    longest row of a batch.
    """
    config = backbone.model.config
    settings = getattr(config, "rope_parameters", None) or {}
    original = settings.get("original_max_position_embeddings")
    if settings.get("rope_type") != "longrope" or not original:
        return ""
    return (
        f"model type '{config.model_type}' has LongRoPE: a row of more than {original} tokens changes the log-probs of "
        f"every row in its batch; limit prompts and responses to {original} tokens together"
    )


def say_if_prompts_are_repeated(run: Run, backbone: Backbone, responses: Iterable[int]) -> None:
    """Tell that prompts are read again for each of their responses: a run is then slower than its user may expect.

    Args:
        responses: how many each prompt has.
    """
    if not backbone.shares_prompts and max(responses, default=0) > 1:
        run.say("the model cannot read several responses in one row: each is read with its prompt, which is slower")
