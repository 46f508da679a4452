"""Rows of files that are no training records: parsed one by one, bad ones refused or skipped."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from align.core.errors import UserError
from align.data.fields import check_row
from align.data.readers import LISTED_PROBLEMS
from align.data.sources import SourceRow

logger = logging.getLogger(__name__)
Item = TypeVar("Item")


def parse_rows(
    rows: Iterable[SourceRow], parse: Callable[[Mapping[str, Any], str], Iterable[Item]], skip_bad_rows: bool, nothing: str
) -> list[Item]:
    """Parse each row and return all items.

    Args:
        rows: as `align.data.sources.iter_rows` gives them.
        parse: from a row's fields and its number, from 1, to the items in it; raises a `UserError` for a bad row.
        skip_bad_rows: log the number of bad rows and the first few, and return the items of the others.
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
        logger.warning("skipped %d bad rows of %d:", len(problems), number)
        for problem in problems[:LISTED_PROBLEMS]:
            logger.warning("%s", problem)
    return items
