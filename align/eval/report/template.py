"""Fills in a page's template: one HTML file that needs nothing but itself."""

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from align.eval.core.results import Evaluation, figure_tables
from align.eval.report.text import format_number, visible_text

TEMPLATES = Path(__file__).parent / "templates"
MAX_SAMPLES = 300
"""Prompts on a page; of more, those whose rewards differ most are shown."""


def fill_template(template: str, **values: Any) -> str:
    """A page from a template, with its styles and its script in it; all values are escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = format_number
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        # Only this script may run: text that a model wrote cannot, even if escaping failed.
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'",
        **values,
    )


def evaluation_tables(evaluations: Sequence[Evaluation]) -> list[tuple[list[str], list[list[str]]]]:
    """Figures of models side by side, as text that a page can show: the heads and the rows of each table."""
    return [
        (list(map(visible_text, heads)), [list(map(visible_text, row)) for row in rows])
        for heads, rows in (figure_tables(evaluations) if evaluations else [])
    ]
