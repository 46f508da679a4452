"""Which settings of a run may change when it is resumed."""

from datetime import date
from pathlib import Path
from typing import Any

import yaml

from align.errors import UserError
from align.settings import RunConfig, dump

# A checkpoint cannot be resumed with other values: its weights and the reference of PPO's KL depend on them.
SAME_ON_RESUME = (
    *("model", "chat_template", "template_date", "lora_rank", "lora_alpha", "lora_targets"),
    *("optimizer", "critic", "reference_refresh"),
)
FREE_ON_RESUME = (
    *("resume", "output_dir", "log_to", "memory_limit", "peak_flops", "keep_checkpoints"),
    *("collective_timeout", "lost_after", "checkpoint_in_background"),
)


def template_date(config: RunConfig, resumed: Path | None) -> str:
    """The date that a run's chat templates read: the setting's, or that of the run that is resumed, or today.

    Args:
        resumed: the folder of the run that is resumed.
    """
    stored = _stored_settings(resumed).get("template_date") if resumed else None
    return config.template_date or stored or date.today().isoformat()


def _stored_settings(folder: Path) -> dict[str, Any]:
    """The settings of a run in a folder; empty if they cannot be read."""
    try:
        return dict(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError, yaml.YAMLError):
        return {}


def compare_settings(config: RunConfig, folder: Path) -> str:
    """Refuse to resume with settings that do not fit the checkpoint.

    Returns:
        A line that names the other settings that have changed, or nothing.

    Raises:
        UserError: if a setting of `SAME_ON_RESUME` has changed.
    """
    path, before = folder / "config.yaml", _stored_settings(folder)
    if not before:
        return ""  # `load_checkpoint` still compares the names of all weights
    now = yaml.safe_load(dump(config))
    changed = [key for key, value in now.items() if key not in FREE_ON_RESUME and before.get(key, value) != value]
    for key in changed:
        if key in SAME_ON_RESUME:
            raise UserError(
                f"{path}: this run has {key} {before[key]!r}, not {now[key]!r}; resume it with that, or give another "
                "output_dir"
            )
    changes = ", ".join(f"{key} {now[key]} (was {before[key]})" for key in changed)
    return f"{folder} continues with other settings: {changes}" if changed else ""
