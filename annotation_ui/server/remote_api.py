"""API for programs at /api/v1: import batches, read their progress, export, and follow new judgments.

The guard checks the token before a request reaches these routes. `annotation_ui.client` is the Python client.
"""

import json
from functools import partial
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Security
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from pydantic import AfterValidator, Field
from starlette.exceptions import HTTPException

from align.core.errors import UserError
from annotation_ui.reports.events import new_judgments
from annotation_ui.reports.export import Selection, export, records
from annotation_ui.reports.overview import progress
from annotation_ui.reports.row_files import FORMATS
from annotation_ui.server.bodies import Body, TaskName
from annotation_ui.server.guard import API_PATH
from annotation_ui.server.root_path import root_path
from annotation_ui.server.services import Services
from annotation_ui.server.transfers import export_file, new_export_path, receive, uploaded
from annotation_ui.store.audit import Actor
from annotation_ui.store.importing import NewBatch, import_file
from annotation_ui.store.schema import ApiToken
from annotation_ui.store.tokens import SCOPES
from annotation_ui.tasks import Json, task_settings

MAX_JUDGMENTS = 1000  # per response
DOCS_PATH, SCHEMA_PATH, DOCS_FILES = "/lead/api", "/lead/api/openapi.json", "/lead/api/files"
_BEARER = Security(HTTPBearer(auto_error=False, description="A token of `align annotate token create`"))


def storable_name(name: str) -> str:
    """Return the name. Raise ValueError if PostgreSQL could not look it up."""
    if not name.isprintable():
        raise ValueError("not printable")
    return name


Name = Annotated[str, AfterValidator(storable_name), Field(max_length=200)]


class ExportRequest(Body):
    """The judgments to export, as in `align annotate export`."""

    record: Name
    format: Name = "jsonl"
    aggregated: bool = False
    since: float | None = None
    batches: tuple[Name, ...] = ()
    include_gold: bool = False
    preferences: bool = False
    times: bool = False


def _token_with(scope: str) -> Any:
    """Return a dependency that returns the request's token and requires a scope."""

    def check(request: Request) -> ApiToken:
        token: ApiToken = request.state.token
        if scope not in token.scopes.split(","):
            raise HTTPException(403, f"token {token.name!r} does not have the scope {scope!r} ({SCOPES[scope]})")
        return token

    return Depends(check)


Importing = Annotated[ApiToken, _token_with("import")]
Exporting = Annotated[ApiToken, _token_with("export")]


def add_remote_api(app: FastAPI, services: Services) -> None:
    """Add the API's routes, and their documentation for leads."""
    router = APIRouter(prefix=API_PATH, dependencies=[_BEARER])
    transfers = CapacityLimiter(2)  # excess transfers wait here instead of blocking the threads that serve labelers
    _add_batch_routes(router, services, transfers)
    _add_export_routes(router, services, transfers)
    app.include_router(router)
    _add_docs(app, router)

    @app.exception_handler(UserError)
    def refuse(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 422)


def _add_batch_routes(router: APIRouter, services: Services, transfers: CapacityLimiter) -> None:
    database = services.database

    @router.get("/batches", dependencies=[_token_with("read")])
    def batches() -> list[Json]:
        """Return the progress of every batch."""
        with database.read() as session:
            return progress(session)

    @router.post("/batches")
    async def import_batch(
        request: Request,
        name: Name,
        task: TaskName,
        token: Importing,
        labelers_per_item: int = 1,
        priority: int = 0,
        rules: Name | None = None,
        labeler: Annotated[list[Name], Query()] = [],  # noqa: B006  (FastAPI copies it)
        settings: Annotated[str, Query(description="a JSON object with the task's settings")] = "{}",
    ) -> Json:
        """Import the rows in the body (JSON Lines) as a batch, all or nothing."""
        batch = NewBatch(name, task, labelers_per_item, priority, rules, _checked_settings(task, settings), tuple(labeler))
        key = await receive(services.settings, request, "rows.jsonl")

        def store() -> int:
            with uploaded(services.settings, key) as path:
                return import_file(database, batch, path, "line", Actor(token.user_id, token.id))

        return {"batch": name, "items": await to_thread.run_sync(store, limiter=transfers)}


def _add_export_routes(router: APIRouter, services: Services, transfers: CapacityLimiter) -> None:
    database = services.database

    @router.post("/exports")
    async def make_export(wanted: ExportRequest, token: Exporting) -> Json:
        """Write an export on the server and return its manifest. `file` names the file to download."""
        if wanted.format not in FORMATS:
            raise UserError(f"format {wanted.format!r}: must be one of {', '.join(FORMATS)}")
        selection = Selection(**wanted.model_dump(exclude={"format"}))
        selection.check()
        path = new_export_path(services.settings, wanted.record, wanted.format)
        actor = Actor(token.user_id, token.id)
        return await to_thread.run_sync(export, database, selection, path, actor, limiter=transfers)

    @router.get("/exports/{name}", dependencies=[_token_with("export")], response_class=Response)
    def get_export(name: Name) -> Response:
        """Download the file of an export."""
        if name.split("-")[0] not in records():  # files with labelers' names are for leads
            raise HTTPException(404, "no such export")
        return export_file(services.settings, name)

    @router.get("/judgments")
    async def judgments(
        token: Exporting,
        after: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
        batch: Annotated[list[Name], Query()] = [],  # noqa: B006  (FastAPI copies it)
        limit: Annotated[int, Query(ge=1, le=MAX_JUDGMENTS)] = 100,
    ) -> list[Json]:
        """Return the judgments, skips and undos after the judgment `after`, oldest first."""
        return new_judgments(database, after, tuple(batch), limit, Actor(token.user_id, token.id))


def _checked_settings(task: str, text: str) -> Json:
    """Parse the settings of a batch. Raise UserError if they are invalid."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError("settings: not JSON") from None
    kinds: dict[str, type] = {setting.name: setting.kind for owner, setting in task_settings() if owner.name == task}
    kinds["attention_every"] = int
    if not isinstance(settings, dict):
        raise UserError("settings: must be an object")
    for name, value in settings.items():
        if type(value) is not kinds.get(name):
            known = ", ".join(f"{each} ({kind.__name__})" for each, kind in kinds.items())
            raise UserError(f"settings: unknown name or wrong type for {name!r}; settings: {known}")
    return settings


def _add_docs(app: FastAPI, router: APIRouter) -> None:
    """Add FastAPI's documentation page for leads. Scripts and styles come from this server, because others are blocked."""
    from importlib.resources import files

    schema = partial(get_openapi, title="Labeling app", version="1", routes=router.routes)
    app.mount(DOCS_FILES, StaticFiles(directory=str(files("fastapi_offline") / "static")))

    @app.get(SCHEMA_PATH, include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(schema(servers=[{"url": root_path.get() or "/"}]))

    @app.get(DOCS_PATH, include_in_schema=False)
    def docs() -> HTMLResponse:
        root = root_path.get()
        return get_swagger_ui_html(
            openapi_url=f"{root}{SCHEMA_PATH}",
            title="API · Labeling",
            swagger_js_url=f"{root}{DOCS_FILES}/swagger-ui-bundle.js",
            swagger_css_url=f"{root}{DOCS_FILES}/swagger-ui.css",
            swagger_favicon_url=f"{root}{DOCS_FILES}/favicon.png",
            swagger_ui_parameters={"validatorUrl": None},
        )
