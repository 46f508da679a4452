"""The webhook: tells another program when a batch is complete, signed by the Standard Webhooks specification.

Events are rows of the database: a restart or a failure loses none. An event may arrive twice, with the same id.
"""

import json
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlsplit

import urllib3
from sqlalchemy import func, select
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session

from align.core.errors import UserError
from annotation_ui.client import is_web_address, webhook_key, webhook_signature
from annotation_ui.store import audit
from annotation_ui.store.database import Database, database_error_line
from annotation_ui.store.schema import Assignment, Batch, Item, WebhookEvent

SECRET_VARIABLE = "ALIGN_WEBHOOK_SECRET"
POLL_S, TIMEOUT_S = 5.0, 15.0
CLAIM_S = 60.0  # for so long, no other server on the same database sends an event that one is sending
DELAYS_S = (10, 60, 300, 1800, 7200, 21600, 43200, 86400)  # before each further attempt: two days in all


@dataclass(frozen=True)
class Webhook:
    """Sends an event to `url` for each batch of `database` that is complete.

    The request goes to this address alone: a redirection is a failure, and no address comes from the database.
    """

    database: Database
    url: str
    key: bytes
    delays: Sequence[float] = DELAYS_S
    poll_seconds: float = POLL_S
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look for complete batches in a thread until the block ends."""
        thread = threading.Thread(target=self._run, name="webhook", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(TIMEOUT_S)

    def look(self) -> None:
        """Store the events of batches that have become complete, and send every event that is due."""
        with self.database.read() as session:
            found = _complete_batches(session)
        if found:
            with self.database.write() as session:
                self.database.lock_table(session, WebhookEvent)
                for batch in _complete_batches(session):
                    session.add(_new_event(session, batch))
        while (event := self._claim()) is not None:
            self._record(event, self._send(event))

    def _run(self) -> None:
        while not self._stop.wait(self.poll_seconds):
            try:
                self.look()
            except DatabaseError as error:
                _log(f"webhook: the database failed: {database_error_line(error)}")

    def _claim(self) -> WebhookEvent | None:
        """The next event that is due, kept from other servers while it is sent."""
        with self.database.read() as session:
            due = select(WebhookEvent).where(WebhookEvent.next_at <= time.time()).order_by(WebhookEvent.id).limit(1)
            if session.scalar(due) is None:
                return None
        with self.database.write() as session:
            event = session.scalar(due.with_for_update(skip_locked=True))
            if event is not None:
                event.next_at = time.time() + CLAIM_S
                event.attempts += 1
            return event

    def _send(self, event: WebhookEvent) -> str:
        """Send an event; returns "" or why it did not arrive."""
        body, now = event.payload.encode(), int(time.time())
        headers = {
            "Content-Type": "application/json",
            "webhook-id": event.event_id,
            "webhook-timestamp": str(now),
            "webhook-signature": webhook_signature(self.key, event.event_id, now, body),
        }
        try:
            with urllib3.PoolManager(timeout=TIMEOUT_S, retries=False) as http:
                response = http.request("POST", self.url, body=body, headers=headers, redirect=False, preload_content=False)
                response.close()  # the rest of the answer is not read, however long it is
        except urllib3.exceptions.HTTPError as error:
            return type(error).__name__
        return "" if 200 <= response.status < 300 else f"status {response.status}"

    def _record(self, event: WebhookEvent, error: str) -> None:
        now, left = time.time(), event.attempts <= len(self.delays)
        with self.database.write() as session:
            stored = session.get_one(WebhookEvent, event.id)
            stored.error = error or None
            if not error:
                stored.next_at, stored.delivered_at = None, now
            else:
                stored.next_at = now + self.delays[event.attempts - 1] if left else None
            if stored.next_at is None:
                outcome = "given up" if error else "delivered"
                detail = {"event": event.event_id, "outcome": outcome, "attempts": event.attempts}
                audit.record(session, "webhook", detail)
        if error:
            again = f"sent again in {self.delays[event.attempts - 1]:g} s" if left else "given up"
            _log(f"webhook: {urlsplit(self.url).hostname}: {error}; event {event.event_id} is {again}")


def checked_key(url: str, secret: str) -> bytes:
    """Check the webhook of the command line and return the key in its secret."""
    if not is_web_address(url) or not url.isprintable():
        raise UserError(f"--webhook {url}: not an address (https://HOST/PATH)")
    if not secret:
        raise UserError(f"--webhook: set {SECRET_VARIABLE} to base64 of 24 bytes or more: openssl rand -base64 32")
    return webhook_key(secret)


def _complete_batches(session: Session) -> Sequence[Batch]:
    """Batches in which all work is judged, and that have no event for their present labelers per item or for more."""
    items = select(Item.id).where(Item.batch_id == Batch.id, Item.purpose == "work").correlate(Batch)
    held = (
        select(Assignment.id)
        .join(Item, Item.id == Assignment.item_id)
        .where(Assignment.batch_id == Batch.id, Item.purpose == "work", ~Assignment.adjudication)
        .where(Assignment.state == "leased", Assignment.current_id.is_(None))
        .correlate(Batch)
    )
    reported = select(WebhookEvent.id).where(
        WebhookEvent.batch_id == Batch.id, WebhookEvent.labelers_per_item >= Batch.labelers_per_item
    )
    query = select(Batch).where(
        Batch.complete,
        Batch.deleted_at.is_(None),
        ~reported.correlate(Batch).exists(),
        items.exists(),
        ~items.where(Item.taken < Item.needed).exists(),
        ~held.exists(),
    )
    return session.scalars(query.order_by(Batch.id)).all()


def _new_event(session: Session, batch: Batch) -> WebhookEvent:
    count, slots = session.execute(
        select(func.count(), func.sum(Item.needed)).where(Item.batch_id == batch.id, Item.purpose == "work")
    ).one()
    event_id = f"msg_{secrets.token_hex(12)}"
    data = {"batch": batch.name, "task": batch.task, "items": count, "judgments": int(slots)}
    payload = {"type": "batch.complete", "timestamp": datetime.now(UTC).isoformat(), "data": data}
    return WebhookEvent(
        event_id=event_id,
        batch_id=batch.id,
        labelers_per_item=batch.labelers_per_item,
        payload=json.dumps(payload),
        attempts=0,
        next_at=time.time(),
    )


def _log(line: str) -> None:
    print(f"align annotate: {line}", file=sys.stderr, flush=True)
