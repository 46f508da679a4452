"""Pages without Gradio: sign in, sign out, and change the password."""

from html import escape
from pathlib import Path
from typing import Annotated

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Form, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles

from align.core.errors import UserError
from annotation_ui.server.auth import TooManyAttemptsError
from annotation_ui.server.error_pages import plain_page
from annotation_ui.server.headers import session_cookie, session_token
from annotation_ui.server.services import Services

STATIC = Path(__file__).parents[1] / "static"
_NAME = """<label>Name <input name="name" autocomplete="username" required autofocus maxlength="64"></label>"""
_PASSWORD = """<label>{0} <input name="{1}" type="password" autocomplete="{2}" required maxlength="200"></label>"""
_SIGN_IN = _NAME + _PASSWORD.format("Password", "password", "current-password")
_CHANGE = _PASSWORD.format("Current password", "password", "current-password") + _PASSWORD.format(
    "New password (10 characters or more)", "new", "new-password"
)
Field = Annotated[str, Form(max_length=200)]


def add_pages(app: FastAPI, services: Services) -> None:
    """Add /login, /logout, /password, /healthz and the static files to the app."""
    app.mount("/ui", StaticFiles(directory=STATIC), name="ui")
    # Password verification is slow by design. Excess sign-ins wait here instead of blocking the threads that serve labelers.
    passwords = CapacityLimiter(2)

    async def sign_in(request: Request, name: str, password: str) -> str | None:
        address = request.client.host if request.client else ""
        return await to_thread.run_sync(services.auth.sign_in, name, password, address, limiter=passwords)

    @app.get("/healthz")
    def healthz() -> PlainTextResponse:
        problem = services.health.problem()
        return PlainTextResponse(problem or "ok", 503 if problem else 200)

    @app.get("/login")
    def login_page() -> HTMLResponse:
        return _page("Sign in", _SIGN_IN)

    @app.post("/login")
    async def login(request: Request, name: Field, password: Field, next: str = "/") -> Response:
        try:
            token = await sign_in(request, name, password)
        except TooManyAttemptsError as error:
            return _page("Sign in", _SIGN_IN, f"{error}.".capitalize(), 429)
        if token is None:
            return _page("Sign in", _SIGN_IN, "Wrong name or password.", 401)
        local = next.startswith("/") and not next.startswith(("//", "/\\"))
        return _with_cookie(RedirectResponse(next if local else "/", 303), services, token)

    @app.get("/logout")  # overrides Gradio's route, which would not end the session
    def logout_page() -> HTMLResponse:
        return _page("Sign out", "")

    @app.post("/logout")
    def logout(request: Request) -> Response:
        services.auth.sign_out(session_token(request.headers))
        return _with_cookie(RedirectResponse("/login", 303), services, "", hours=0)

    @app.get("/password")
    def password_page() -> HTMLResponse:
        return _page("Change password", _CHANGE)

    @app.post("/password")
    async def change_password(request: Request, password: Field, new: Field) -> Response:
        user = request.state.user
        try:
            if await sign_in(request, user.name, password) is None:
                return _page("Change password", _CHANGE, "The current password is wrong.", 401)
            await to_thread.run_sync(services.auth.set_password, user.name, new)
        except (TooManyAttemptsError, UserError) as error:
            return _page("Change password", _CHANGE, f"{error}.".capitalize(), 422)
        token = await to_thread.run_sync(services.auth.start_session, user.id)
        return _with_cookie(RedirectResponse("/", 303), services, token)


def _page(title: str, fields: str, message: str = "", status: int = 200) -> HTMLResponse:
    form = f'<form method="post">{fields}<button type="submit">{title}</button></form>'
    return HTMLResponse(plain_page(title, f'<p class="message" role="alert">{escape(message)}</p>{form}'), status)


def _with_cookie(response: Response, services: Services, token: str, hours: float | None = None) -> Response:
    settings = services.settings
    cookie = session_cookie(token, settings.session_hours if hours is None else hours, settings.https)
    response.headers.append("set-cookie", cookie)
    return response
