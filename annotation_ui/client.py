"""Python client of the labeling app, for programs on other machines. It requires no optional dependencies.

Create a token with `align annotate token create` or on the lead's *Users* tab:

    client = Client("https://labels.example.org", token)
    client.import_rows("week-1", "rank", rows, labelers_per_item=2)
    client.wait("week-1")
    client.export("rankings", "rankings.jsonl", batches=["week-1"], aggregated=True)
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3

from align.core.errors import UserError
from align.core.files import new_file, write_json

Json = dict[str, Any]
TOKEN_VARIABLE = "ALIGN_ANNOTATION_TOKEN"
RETRIES = 6  # pauses of 0, 2, 4, 8, 16 and 32 s
_CHUNK = 2**16


class Client:
    """Client of a labeling server: imports batches, waits for them, exports judgments and follows new ones.

    Requests are retried if the server does not respond or rejects them because of load. An import is retried only if it
    cannot have reached the server.

    Args:
        url: address of the server, such as https://labels.example.org.
        token: API token. Default: the environment variable ALIGN_ANNOTATION_TOKEN.
        timeout: seconds to wait for a response.

    Raises:
        UserError: If the address is invalid or there is no token. Every method raises UserError with the server's error line
            if a request is rejected or fails.
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 60.0) -> None:
        try:
            address = urllib3.util.parse_url(url)
        except urllib3.exceptions.LocationParseError:  # such as an unclosed bracket, or a port that is not a number
            address = urllib3.util.Url()
        if address.scheme not in ("http", "https") or not address.host:
            raise UserError(f"{url}: must be a server address such as https://HOST")
        token = token or os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise UserError(f"{url}: no token; create one with `align annotate token create` and set {TOKEN_VARIABLE}")
        if not token.isascii() or not token.isprintable():
            raise UserError(f"{url}: invalid characters in the token")
        self.url = url.rstrip("/")
        self._http = urllib3.PoolManager(headers={"Authorization": f"Bearer {token}"}, timeout=timeout)

    def batches(self) -> list[Json]:
        """Return the progress of every batch.

        Each row has `batch`, `task`, `open`, `complete`, `items`, `done`, `slots`, `stuck` and others. A batch that is not
        `complete` is still being imported, or its import was killed.
        """
        rows: list[Json] = self._json("GET", "batches")
        return rows

    def progress(self, batch: str) -> Json | None:
        """Return the progress of a batch, or None if it does not exist."""
        return next((row for row in self.batches() if row["batch"] == batch), None)

    def wait(self, batch: str, poll_seconds: float = 30.0) -> Json:
        """Wait until a batch is imported and has all judgments, or a lead closes it. Return its progress."""
        while True:
            progress = self.progress(batch)
            if progress is None:
                raise UserError(f"{self.url}: no batch {batch!r}")
            if progress["complete"] and (progress["done"] >= progress["slots"] or not progress["open"]):
                return progress
            time.sleep(poll_seconds)

    def import_rows(
        self,
        name: str,
        task: str,
        rows: Iterable[Mapping[str, Any]],
        *,
        labelers_per_item: int = 1,
        priority: int = 0,
        rules: str | None = None,
        labelers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> int:
        """Import a batch, all or nothing, and return its number of items.

        Args:
            name: name of the new batch.
            task: rank, rules, demonstrate, probe, compare or another task of the server.
            rows: rows as in a file for `align annotate import`.
            labelers_per_item: number of labelers per item.
            priority: batches with a higher priority come first.
            rules: name of a rule set on the server, if the task needs one.
            labelers: names of the assigned labelers. Default: all labelers.
            settings: settings of the task, and `attention_every`.
        """
        query: list[tuple[str, Any]] = [("name", name), ("task", task), ("priority", priority)]
        query.append(("labelers_per_item", labelers_per_item))
        query += [("rules", rules)] if rules else []
        query += [("labeler", labeler) for labeler in labelers]
        query += [("settings", json.dumps(dict(settings or {})))]
        lines = (json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        body = "".join(lines).encode("utf-8", "surrogatepass")  # the server reports the row with invalid Unicode
        retries = urllib3.Retry(
            RETRIES, read=0, other=0, redirect=False, allowed_methods=None, status_forcelist=[429], backoff_factor=1
        )
        return int(self._json("POST", "batches", query, body, "application/x-ndjson", retries)["items"])

    def export(
        self,
        record: str,
        path: str | Path,
        *,
        batches: Sequence[str] = (),
        aggregated: bool = False,
        since: float | None = None,
        include_gold: bool = False,
        preferences: bool = False,
        times: bool = False,
    ) -> Json:
        """Write an export to a file, and its manifest next to it. Return the manifest.

        An existing file is replaced only after the SHA-256 of the new file has been verified against the manifest.

        Args:
            record: rankings, pairs, attributes, rule_judgments, demonstrations, skips or another kind of the server.
            path: path of the file, ending in .jsonl, .parquet or .csv.
            batches: names of batches. Default: all batches.
            aggregated: whether to write one row per item instead of one per labeler.
            since: earliest time of judgments, in seconds since 1970.
            include_gold: whether to include attention and training items.
            preferences: whether to add, to aggregated rankings, the probability of each preference between two responses.
            times: whether to add the time and the active seconds of each judgment.
        """
        path = Path(path)
        wanted = {
            "record": record,
            "format": path.suffix.lstrip("."),
            "batches": list(batches),
            "aggregated": aggregated,
            "since": since,
            "include_gold": include_gold,
            "preferences": preferences,
            "times": times,
        }
        manifest: Json = self._json("POST", "exports", (), json.dumps(wanted).encode())
        response = self._request("GET", f"exports/{manifest['file']['name']}", preload_content=False)
        digest = hashlib.sha256()
        try:
            with new_file(path) as file:
                for chunk in response.stream(_CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
                if digest.hexdigest() != manifest["file"]["sha256"]:
                    raise UserError(f"{self.url}: the export of {record} is incomplete; export again")
        except urllib3.exceptions.HTTPError as error:
            raise UserError(f"{self.url}: the export of {record} was interrupted ({error})") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
        finally:
            response.release_conn()
        manifest["file"]["name"] = path.name
        write_json(path.with_name(f"{path.name}.manifest.json"), manifest)
        return manifest

    def judgments(
        self, after: int = 0, batches: Sequence[str] = (), *, follow: bool = True, poll_seconds: float = 5.0
    ) -> Iterator[Json]:
        """Yield new judgments, oldest first, and wait for more.

        Each judgment has `judgment` (its id), `kind`, `batch`, `task`, `id`, `purpose`, `labeler`, `seconds`, `at` and
        `rows` (the answer before it is converted to records). An `edit` replaces the labeler's earlier answer to the item.
        An `undo` withdraws the last answer, and its `rows` are the earlier answer that becomes current again, if any. A
        judgment of kind `late` does not count.

        Args:
            after: id of the last judgment already read. If 0, start with the first judgment.
            batches: names of batches. Default: all batches.
            follow: whether to wait for new judgments instead of returning.
            poll_seconds: pause between requests while there are no new judgments.
        """
        while True:
            query = [("after", after), *(("batch", batch) for batch in batches)]
            page: list[Json] = self._json("GET", "judgments", query)
            for judgment in page:
                after = judgment["judgment"]
                yield judgment
            if not page:
                if not follow:
                    return
                time.sleep(poll_seconds)

    def _json(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, Any]] = (),
        body: bytes | None = None,
        kind: str = "application/json",
        retries: urllib3.Retry | None = None,
    ) -> Any:
        headers = {**self._http.headers, "Content-Type": kind}
        response = self._request(method, f"{path}?{urlencode(query)}", body=body, headers=headers, retries=retries)
        try:
            return response.json()
        except ValueError:
            raise UserError(f"{self.url}: the response is not JSON; is this the address of a labeling app?") from None

    def _request(
        self, method: str, path: str, *, retries: urllib3.Retry | None = None, **more: Any
    ) -> urllib3.BaseHTTPResponse:
        retries = retries or urllib3.Retry(
            RETRIES, redirect=False, allowed_methods=None, status_forcelist=[429, 502, 503, 504], backoff_factor=1
        )
        try:
            response = self._http.request(
                method, f"{self.url}/api/v1/{path}", retries=retries.new(raise_on_status=False), **more
            )
        except urllib3.exceptions.HTTPError as error:
            reason = getattr(error, "reason", None) or error
            raise UserError(f"{self.url}: no response ({reason})") from None
        if response.status == 200:
            return response
        try:
            line = str(response.json()["error"])
        except (ValueError, KeyError, TypeError):
            line = f"status {response.status}"
        raise UserError(f"{self.url}: {line}")
