"""Which settings of a run may change when it is resumed."""

from datetime import date
from pathlib import Path
from typing import Any

import yaml

from align.core.errors import UserError
from align.core.settings import RunConfig, dump

# A checkpoint cannot be resumed with other values: its weights and the reference of PPO's KL depend on them.
MODEL_SETTINGS = (
    *("model", "chat_template", "template_date", "lora_rank", "lora_alpha", "lora_targets"),
    *("optimizer", "critic", "reference_refresh"),
)
# The number of an update decides which examples it reads. With other values it would read examples again and skip others.
ORDER_SETTINGS = (
    *("seed", "batch_size", "batch_ramp", "mixing_cap", "mixing_temperature", "stream_block"),
    *("rollout_size", "samples_per_prompt", "ptx_stream_block"),
)
SAME_ON_RESUME = (*MODEL_SETTINGS, *ORDER_SETTINGS)
FREE_ON_RESUME = (
    *("resume", "output_dir", "log_to", "memory_limit", "peak_flops", "keep_checkpoints"),
    *("collective_timeout", "lost_after", "stop_grace", "checkpoint_in_background"),
)


def template_date(config: RunConfig, resumed: Path | None) -> str:
    """The date that a run's chat templates read: the setting's, or that of the run that is resumed, or today.

    Args:
        resumed: the folder of the run that is resumed.
    """
    stored = (read_settings(resumed / "config.yaml") or {}).get("template_date") if resumed else None
    return config.template_date or stored or date.today().isoformat()


def compare_settings(config: RunConfig, folder: Path) -> str:
    """Refuse to resume with settings that do not fit the checkpoint.

    Returns:
        A line that names the other settings that have changed, or nothing.

    Raises:
        UserError: if a setting of `SAME_ON_RESUME` has changed, or the run's settings cannot be read.
    """
    path = folder / "config.yaml"
    before = read_settings(path)
    if before is None:  # `load_checkpoint` still compares the names of all weights
        return f"warning: {path} is missing: whether this run has the same settings is not checked"
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


def read_settings(path: Path) -> dict[str, Any] | None:
    """The settings of a run from its `config.yaml`; None if there is no such file.

    Raises:
        UserError: if the file cannot be read, or holds no settings.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not the settings of a run ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: not the settings of a run: it must contain `key: value` lines; restore or remove it")
    return found
