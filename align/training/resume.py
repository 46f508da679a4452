"""The start of a run: the checkpoint that it continues, and the settings that may change on resume."""

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator

from align.core.errors import UserError
from align.core.files import read_json
from align.runtime.distributed import run_on_main
from align.training.checkpoint.files import checkpoint_to_resume
from align.training.run_folder import Results

# A checkpoint cannot be resumed with other values: its weights, the reference of PPO's KL and the kept model depend on them.
SAME_ON_RESUME = (
    *("model", "chat_template", "prefix_lm", "lora_r", "lora_alpha", "lora_target_modules", "lora"),
    *("optimizer", "critic", "reference_refresh", "save_best_policy"),
    # The number of an update decides which examples it reads. With other values it would read some again and skip others.
    *("seed", "batch_size", "mixing_cap", "mixing_temperature", "rollout_batch_size", "samples_per_prompt"),
)
FREE_ON_RESUME = (
    *("dry_run", "resume_from_checkpoint", "output_dir", "report_to", "save_total_limit"),
    *("collective_timeout", "push_to_hub"),
)


def template_date(resumed: Path | None) -> str:
    """The date that a run's chat templates read: that of the run in `resumed`, from its `environment.json`, or today."""
    path = resumed / "environment.json" if resumed else None
    stored = read_json(path).get("template_date") if path and path.exists() else None
    return str(stored or date.today().isoformat())


def compare_settings(settings: str, folder: Path) -> str:
    """Return a line that names the settings that differ from those of the run in a folder, or "".

    Raise a UserError if one of `SAME_ON_RESUME` differs, or the run's settings cannot be read.
    """
    path = folder / "config.yaml"
    before = read_settings(path)
    if before is None:  # `checkpoint.load` still compares the names of all weights
        return f"warning: {path} is missing: whether this run has the same settings is not checked"
    now = yaml.safe_load(settings)
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

    Raise a UserError if the file cannot be read, or holds no settings.
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


def find_start(
    folder: Path,
    earlier: Results,
    choice: bool | str,
    settings: str,
    accelerator: Accelerator,
    report: Callable[[str], None],
) -> tuple[Path | None, bool, str]:
    """Return the checkpoint that a run continues, whether it is in the run's own folder, and the date of chat templates.

    All processes call this, with the `earlier` results in the folder. Raise a UserError if the checkpoint is damaged or has
    other settings, or a run without one would overwrite results.
    """
    checkpoint, faults = checkpoint_to_resume(choice, folder, accelerator)
    for fault in faults:
        report(f"warning: {fault}: resuming from {checkpoint}")
    resumed = checkpoint.resolve().parents[1] if checkpoint else None
    is_own = resumed == folder.resolve()
    has_results = earlier.model or earlier.metrics_bytes > 0
    if has_results and not (choice is True or is_own):
        raise UserError(
            f"{folder} already holds a run; set resume_from_checkpoint auto to continue it, or choose another output_dir"
        )
    day = run_on_main(lambda: template_date(resumed), accelerator)
    if resumed:
        report(compare_settings(settings, folder if is_own else resumed))
    elif has_results:
        report(f"{folder} holds no checkpoint to resume from (see save_steps): starting with the first update")
    return checkpoint, is_own, day
