"""Debian's browser for the tests that look at a page, without a window.

The old headless shell draws only the page; the full browser starts its own interface in processes beside it, and takes
half as much time again for the same tests. Where the shell is not installed, the browser does, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

PROGRAMS = (Path("/usr/bin/chromium-headless-shell"), Path("/usr/bin/chromium"))
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


def program() -> Path | None:
    """The lightest browser that is installed, if one is."""
    return next((path for path in PROGRAMS if path.exists()), None)


def launch(playwright: Playwright) -> Browser:
    """Start the browser, which `program` must have found."""
    return playwright.chromium.launch(executable_path=str(program()), args=ARGUMENTS)
