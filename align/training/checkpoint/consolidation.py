"""A plain transformers or PEFT folder from a run's checkpoint, whose weights may be in the parts of many processes."""

from pathlib import Path

import torch

from align.core.errors import UserError
from align.core.files import clear_partial, read_json
from align.core.settings import ModelConfig
from align.models.checkpoint import save_model, weights_of
from align.models.loading import load
from align.runtime.distributed import compute_dtype
from align.training.checkpoint.files import integrity_error, latest_valid_checkpoint
from align.training.checkpoint.state import AVERAGE, StoredState
from align.training.run_folder import read_settings

PLACE = "backbone.model."
"""Name of the trained model in every stage's module."""


def consolidate(source: Path, output: Path) -> Path:
    """Save the policy of a checkpoint, or the mean of its weights, as a folder that loads elsewhere; return the checkpoint.

    Args:
        source: a run's folder, for its last complete checkpoint, or a checkpoint in it.
        output: folder to write, replaced atomically. Temporary files of a killed call are removed.

    Raises:
        UserError: if the checkpoint is damaged or contains no policy, or the run's initial model cannot be loaded.
    """
    if (source / "trainer.json").exists():
        if fault := integrity_error(source):
            raise UserError(f"{source}: {fault}")
        checkpoint = source.absolute()
    else:
        newest, _ = latest_valid_checkpoint(source)
        if newest is None:
            raise UserError(f"{source}: neither a checkpoint nor a run with checkpoints (see save_steps)")
        checkpoint = newest.absolute()
    run = checkpoint.parents[1]
    stored = StoredState(checkpoint)
    if any(name.startswith("master/head.") for name in stored):
        raise UserError(
            f"{checkpoint}: it is of a reward model, whose mean over demonstrations is taken when its run saves it; resume "
            f"the run, or take {run / 'model'}"
        )
    path = run / "config.yaml"
    config = read_settings(path)
    if config is None:
        raise UserError(f"{path}: No such file or directory; it names the model that the run started from")
    settings = ModelConfig(**{name: config[name] for name in ModelConfig.__dataclass_fields__ if name in config})
    loaded = load(settings, compute_dtype(settings.dtype), prefix_lm=bool(config.get("prefix_lm")))
    kept = AVERAGE if any(name.startswith(f"{AVERAGE}/") for name in stored) else "master"
    with torch.no_grad():
        for name, weight in loaded.backbone.model.named_parameters():
            if not weight.requires_grad:
                continue
            value = f"{kept}/{PLACE}{name}"
            if stored.shapes.get(value) != tuple(weight.shape):
                raise UserError(
                    f"{checkpoint}: its weights are not those of model '{settings.model}' ('{name}' does not match)"
                )
            weight.copy_(stored[value])
    update = read_json(checkpoint / "trainer.json")["update"]
    card = {"title": f"Policy after update {update}", "stage": "checkpoint", "run": run.absolute().name}
    clear_partial(output)
    stop_ids = frozenset(config.get("stop_token_ids") or ())
    save_model(output, loaded, weights_of(loaded.backbone), card, stop_ids=stop_ids)
    return checkpoint
