"""Uploads and downloads of the lead's page. They bypass Gradio.

Gradio copies each file to a temporary folder and never removes it, and it opens any file that a request names. Opening the
SQLite file in this process would also drop the locks that SQLite holds on it
(https://www.sqlite.org/howtocorrupt.html, section 2.2). Here, an upload stays in a folder that only this user can read
until it is imported. Only exported files can be downloaded.
"""

import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anyio import open_file
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.requests import ClientDisconnect

from align.core.errors import UserError
from annotation_ui.reports.row_files import FORMATS
from annotation_ui.server.services import Services, Settings
from annotation_ui.store.importing import MAX_BYTES

UPLOAD_PATH, EXPORT_PATH = "/lead/uploads", "/lead/exports"
_UPLOAD = re.compile(r"[0-9a-f]{32}")
_EXPORT = re.compile(rf"[a-z_]+-[0-9-]{{15}}-[0-9a-f]{{8}}\.(?:{'|'.join(FORMATS)})(?:\.manifest\.json)?")


@contextmanager
def uploaded(settings: Settings, key: str) -> Iterator[Path]:
    """Yield the path of an uploaded file, and remove it afterwards.

    Args:
        settings: settings of the server.
        key: key returned by files.js on the page, or an error message if the upload failed.
    """
    if not _UPLOAD.fullmatch(key):
        raise UserError(key or "select a file first")
    paths = list((settings.uploads / key).glob("*"))
    if len(paths) != 1:
        raise UserError("the uploaded file no longer exists; select it again")
    try:
        yield paths[0]
    finally:
        shutil.rmtree(settings.uploads / key, ignore_errors=True)


def add_transfers(app: FastAPI, services: Services) -> None:
    """Add the routes for uploads and exports below /lead, which only leads can access."""
    settings = services.settings
    shutil.rmtree(settings.uploads, ignore_errors=True)  # uploads of an earlier process are no longer needed
    for folder in (settings.uploads, settings.exports):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)

    @app.post(UPLOAD_PATH, include_in_schema=False)
    async def upload(request: Request, name: str) -> Response:
        return JSONResponse({"upload": await receive(settings, request, name)})

    @app.get(EXPORT_PATH + "/{name}", include_in_schema=False)
    def download(name: str) -> Response:
        return export_file(settings, name)


async def receive(settings: Settings, request: Request, name: str) -> str:
    """Store a request's body as an upload in a folder with a random name, and return the upload's key.

    Raises:
        HTTPException: If the file name is invalid, or the body is too large, incomplete or cannot be stored.
    """
    if not name.isprintable() or "/" in name or name in ("", ".", "..") or len(name.encode()) > 255:
        raise HTTPException(422, "the name of the file is not valid: rename it")
    key, received = secrets.token_hex(16), 0
    folder = settings.uploads / key
    folder.mkdir(mode=0o700)
    try:
        async with await open_file(folder / name, "xb") as file:
            async for chunk in request.stream():
                received += len(chunk)
                if received > MAX_BYTES:
                    raise HTTPException(413, f"{name}: larger than {MAX_BYTES // 2**20} MiB")
                await file.write(chunk)
    except (HTTPException, OSError, ClientDisconnect) as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, HTTPException):
            raise
        raise HTTPException(507, getattr(error, "strerror", None) or "the upload was broken off") from None
    return key


def new_export_path(settings: Settings, record: str, kind: str) -> Path:
    """Return a new, unguessable path for an export."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return settings.exports / f"{record}-{stamp}-{secrets.token_hex(4)}.{kind}"


def export_file(settings: Settings, name: str) -> Response:
    """Return an exported file as a response."""
    path = settings.exports / name
    if not _EXPORT.fullmatch(name) or not path.is_file():
        raise HTTPException(404, "no such export")
    return FileResponse(path, filename=name, media_type="application/octet-stream")
