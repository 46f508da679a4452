"""Which settings of a run may change when it is resumed."""

from pathlib import Path

import yaml

from align.errors import UserError
from align.settings import RunConfig, dump

# A checkpoint cannot be resumed with other values: its weights and the reference of PPO's KL depend on them.
SAME_ON_RESUME = (
    *("model", "chat_template", "lora_rank", "lora_alpha", "lora_targets"),
    *("optimizer", "critic", "reference_refresh"),
)
FREE_ON_RESUME = (
    *("resume", "output_dir", "log_to", "memory_limit", "peak_flops", "keep_checkpoints"),
    *("collective_timeout", "lost_after", "stop_grace", "checkpoint_in_background"),
)


def compare_settings(config: RunConfig, folder: Path) -> str:
    """Refuse to resume with settings that do not fit the checkpoint.

    Returns:
        A line that names the other settings that have changed, or nothing.

    Raises:
        UserError: if a setting of `SAME_ON_RESUME` has changed.
    """
    path = folder / "config.yaml"
    try:
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
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
