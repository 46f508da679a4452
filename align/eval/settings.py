"""The settings that all evaluations share, and the readers of their files."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from align.core.errors import UserError, counted
from align.core.settings import option, require_setting
from align.data.fields import check_id, check_row, field_error
from align.data.readers import LISTED_PROBLEMS
from align.data.sources import SourceRow
from align.sampling.settings import AnsweringConfig, InferenceConfig

Item = TypeVar("Item")
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class EvalConfig(InferenceConfig):
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
class AnsweringTaskConfig(AnsweringConfig, EvalConfig):
    """For tasks that let the models answer prompts."""

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


def parse_rows(
    rows: Iterable[SourceRow], parse: Callable[[Mapping[str, Any], str], Iterable[Item]], skip_bad_rows: bool, nothing: str
) -> list[Item]:
    """Parse each row and return all items; with `skip_bad_rows`, bad rows are logged and left out.

    Args:
        parse: from a row's fields and its number, from 1, to the items in it; raises a `UserError` for a bad row.
        nothing: the error if there is no item.

    Raises:
        UserError: "FILE:LINE: ..." for a bad row, and `nothing`.
    """
    items: list[Item] = []
    problems: list[str] = []
    number = 0
    for number, row in enumerate(rows, start=1):
        try:
            if row.error is not None:
                raise UserError(row.error)
            items += parse(check_row(row.row), str(number))
        except UserError as error:
            problems.append(f"{row.where}: {error}")
            if not skip_bad_rows:
                raise UserError(problems[-1]) from error
    if not items:
        raise UserError(nothing + (f"; the first bad row: {problems[0]}" if problems else ""))
    if problems:
        logger.warning("skipped %s of %d:", counted(len(problems), "bad row"), number)
        for problem in problems[:LISTED_PROBLEMS]:
            logger.warning("%s", problem)
    return items
