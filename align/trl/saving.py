"""The folders of TRL's trainer: the model in the root of `output_dir`, `checkpoint-N`, and the upload to the hub."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import ModelCard
from transformers.trainer_utils import rotate_checkpoints

from align.models.checkpoint import model_card
from align.ppo.config import PPOConfig as CoreConfig
from align.ppo.setup import PPOSetup
from align.ppo.train import save_policy
from align.runtime.distributed import run_on_main
from align.trl.config import PPOConfig
from align.trl.hooks import OnlineTrainerState

STATE_FILE = "trainer_state.json"


def save_checkpoint(args: PPOConfig, update: int, state: OnlineTrainerState, config: CoreConfig, setup: PPOSetup) -> None:
    """Write `checkpoint-N` with the policy and `trainer_state.json`, and delete the oldest beyond `save_total_limit`.

    The state of a run, which it resumes from, is in the run's own folder.
    """
    assert args.output_dir is not None
    folder = Path(args.output_dir) / f"checkpoint-{update}"
    save_policy(config, setup, folder, {})

    def finish() -> None:
        state.save_to_json(str(folder / STATE_FILE))
        rotate_checkpoints(str(args.output_dir), args.save_total_limit)

    run_on_main(finish, setup.run.accelerator)


def repository(args: PPOConfig) -> str:
    """Return the name of the model's repository on the hub."""
    return args.hub_model_id or Path(str(args.output_dir)).absolute().name


def write_card(folder: Path, setup: PPOSetup, rows: Mapping[str, str], tags: Sequence[str]) -> None:
    """Write the model card, README.md.

    Args:
        rows: of its table; `title` is its title.
        tags: further tags for the hub.
    """
    folder.mkdir(parents=True, exist_ok=True)
    card = ModelCard(model_card({"stage": "ppo", **rows}, setup.policy), ignore_metadata_errors=True)
    card.data["tags"] = [*(card.data.get("tags") or []), *tags]
    card.save(folder / "README.md")
