"""The pages outside Gradio: sign in, sign out, a new password."""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template
from typing import Annotated

from fastapi import FastAPI, Form, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles

from align.errors import UserError
from annotation_ui.auth import TooManyAttemptsError
from annotation_ui.guard import COOKIE, cookie_of
from annotation_ui.services import Services

STATIC = Path(__file__).parent / "static"
_PAGE = Template((STATIC / "login.html").read_text(encoding="utf-8"))
_NAME = """<label>Name <input name="name" autocomplete="username" required autofocus maxlength="64"></label>"""
_PASSWORD = """<label>{0} <input name="{1}" type="password" autocomplete="{2}" required maxlength="200"></label>"""
_SIGN_IN = _NAME + _PASSWORD.format("Password", "password", "current-password")
_CHANGE = _PASSWORD.format("Password now", "password", "current-password") + _PASSWORD.format(
    "New password (10 characters or more)", "new", "new-password"
)
Field = Annotated[str, Form(max_length=200)]


def add_pages(app: FastAPI, services: Services) -> None:
    """Put /login, /logout, /password, /healthz and the static files on the app."""
    app.mount("/ui", StaticFiles(directory=STATIC), name="ui")

    @app.get("/healthz")
    def healthz() -> PlainTextResponse:
        services.database.revisions()
        return PlainTextResponse("ok")

    @app.get("/login")
    def login_page() -> HTMLResponse:
        return _page("Sign in", _SIGN_IN)

    @app.post("/login")
    def login(request: Request, name: Field, password: Field, next: str = "/") -> Response:
        address = request.client.host if request.client else ""
        try:
            token = services.auth.sign_in(name, password, address)
        except TooManyAttemptsError as error:
            return _page("Sign in", _SIGN_IN, f"{error}.".capitalize(), 429)
        if token is None:
            return _page("Sign in", _SIGN_IN, "Wrong name or password.", 401)
        local = next.startswith("/") and not next.startswith(("//", "/\\"))
        return _with_cookie(RedirectResponse(next if local else "/", 303), services, token)

    @app.post("/logout")
    def logout(request: Request) -> Response:
        services.auth.sign_out(cookie_of(request.headers))
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(COOKIE)
        return answer

    @app.get("/password")
    def password_page() -> HTMLResponse:
        return _page("Change password", _CHANGE)

    @app.post("/password")
    def change_password(request: Request, password: Field, new: Field) -> Response:
        user = request.state.user
        address = request.client.host if request.client else ""
        try:
            if services.auth.sign_in(user.name, password, address) is None:
                return _page("Change password", _CHANGE, "The password now is another one.", 401)
            services.auth.set_password(user.name, new)
        except (TooManyAttemptsError, UserError) as error:
            return _page("Change password", _CHANGE, f"{error}.".capitalize(), 422)
        return _with_cookie(RedirectResponse("/", 303), services, services.auth.start_session(user.id))


def _page(title: str, fields: str, message: str = "", status: int = 200) -> HTMLResponse:
    return HTMLResponse(_PAGE.substitute(title=title, button=title, fields=fields, message=escape(message)), status)


def _with_cookie(answer: Response, services: Services, token: str) -> Response:
    answer.set_cookie(
        COOKIE,
        token,
        max_age=int(services.settings.session_hours * 3600),
        httponly=True,
        samesite="lax",
        secure=services.settings.https,
    )
    return answer
