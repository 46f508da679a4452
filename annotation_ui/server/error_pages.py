"""Error responses: pages for browsers, and JSON for programs."""

import sys
from contextlib import suppress
from html import escape
from pathlib import Path
from string import Template

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException

from annotation_ui.server.headers import PROTECTING
from annotation_ui.server.root_path import root_path
from annotation_ui.store.database import database_error_line

LEADS_ONLY = "for leads only"
_TITLES = {
    400: "Bad request",
    401: "Sign in first",
    403: "Access denied",
    404: "Page not found",
    405: "Method not allowed",
    413: "Too large",
    422: "Invalid input",
    500: "Server error",
    503: "Service unavailable",
}
_ADVICE = {
    401: "Your session has ended.",
    403: "Only leads can open this page.",
    404: "The address is mistyped, or the page no longer exists.",
    422: "Go back, fill in all fields, and try again.",
    500: "Saved work is not lost. Try again. If the error persists, contact the server's operator.",
    503: "The disk is full, or the database is unavailable. Try again in a minute. If the error persists, "
    "contact the server's operator.",
}
_PAGE = Template((Path(__file__).parents[1] / "static" / "login.html").read_text(encoding="utf-8"))


def plain_page(title: str, content: str) -> str:
    """Return a page without Gradio, such as the sign-in page. `content` is HTML."""
    return _PAGE.substitute(title=escape(title), content=content, root=root_path.get())


def wants_page(accept: str) -> bool:
    """Return whether an Accept header asks for a page."""
    return "text/html" in accept


def cannot_store(error: OperationalError) -> str:
    """Log a database failure, and return the error line for the client, which retries."""
    with suppress(OSError):  # the log may be on the same full disk
        print(f"align annotate: the database failed: {database_error_line(error)}", file=sys.stderr, flush=True)
    return "cannot store anything at the moment; the page retries"


def error_page(status: int, detail: str = "") -> str:
    """Return an error page. `detail` is shown if the status has no fixed advice."""
    title = _TITLES.get(status, "Request failed")
    advice = detail.capitalize() if status == 403 and detail != LEADS_ONLY else _ADVICE.get(status, detail.capitalize())
    return plain_page(title, f'<p>{escape(advice)}</p><p><a href="{root_path.get()}/">Back to labeling</a></p>')


def add_error_pages(app: FastAPI) -> None:
    """Add exception handlers that return a page if the client accepts HTML, and JSON otherwise."""

    def answer(request: Request, status: int, detail: str) -> Response:
        if wants_page(request.headers.get("accept", "")):
            return HTMLResponse(error_page(status, detail), status)
        return JSONResponse({"error": detail}, status)

    @app.exception_handler(HTTPException)
    def refused(request: Request, error: HTTPException) -> Response:
        return answer(request, error.status_code, str(error.detail))

    @app.exception_handler(RequestValidationError)
    def malformed(request: Request, error: RequestValidationError) -> Response:
        """Return one line, without the invalid value because it may not be encodable."""
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return answer(request, 422, f"{where}: {first['msg']}" if where.isprintable() and where.isascii() else first["msg"])

    @app.exception_handler(OperationalError)
    def unavailable(request: Request, error: OperationalError) -> Response:
        return answer(request, 503, cannot_store(error))

    @app.exception_handler(Exception)
    def failed(request: Request, error: Exception) -> Response:
        """Handle an unexpected error. The traceback is logged. Headers are set here because the guard is bypassed."""
        response = answer(request, 500, "internal server error")
        response.headers.update({**PROTECTING, "Cache-Control": "no-store"})
        return response
