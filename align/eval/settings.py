"""The settings that evaluations share."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from align.core.settings import Settings, option, require_setting
from align.data.fields import check_id, field_error

Item = TypeVar("Item")


@dataclass(kw_only=True)
class EvalConfig(Settings):
    """Which models are evaluated, and where the results go."""

    models: list[str] = option(
        [], "models to evaluate, side by side: folders, LoRA adapters, run folders, hub names or built-in models"
    )
    output: str = option("runs/eval", "folder of the results; results already in it are not computed again", required=True)
    table: bool = option(True, "print the measurements as a table; the files hold them in any case")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "models", len(set(self.models)) == len(self.models), "a list without repetitions")

    def result_settings(self, *leave_out: str) -> dict[str, Any]:
        """The settings that affect the result of a single item, without `leave_out`: stored results are valid for these."""
        no_effect = {"models", "output", "batch_tokens", "skip_bad_rows", "table", *leave_out}
        return {name: value for name, value in asdict(self).items() if name not in no_effect}


@dataclass(kw_only=True)
class EvalPromptsConfig(Settings):
    """The prompts of tasks that let the models answer prompts."""

    prompts: str = option("data/prompts_heldout.jsonl", "prompts that the models answer: file, folder or hub name")
    limit: int = option(0, "use only this many prompts, evenly spaced over the file; 0: all", ge=0)


def subsample(items: Sequence[Item], limit: int) -> list[Item]:
    """`limit` of the items, evenly spaced from the first one on; 0: all."""
    if not limit or limit >= len(items):
        return list(items)
    return [items[number * len(items) // limit] for number in range(limit)]


def new_id(fields: Mapping[str, Any], number: str, seen: set[str]) -> str:
    """Return a row's id, or its number if it has none, and add it to `seen`.

    Raises:
        UserError: if an earlier row has the same id.
    """
    name = check_id(fields.get("id")) or number
    if name in seen:
        raise field_error("id", f"{name!r} appears twice", "give each row a unique id")
    seen.add(name)
    return name
