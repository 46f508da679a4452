"""Many labelers at once against the labeling app: requests a second, latency, and whether every judgment is there.

    python -m benchmarks.annotation_load [--labelers 50] [--seconds 300] [--kills 3] [--pause 0.5] [--database URL]

Starts the app in a separate process, and kills it `--kills` times (SIGKILL). Each labeler asks for an item, saves a draft
and submits, with a random pause (`--pause` seconds on average) before each. A request without an answer is sent again, as
the browser does; it is counted, but not in the latency. The goal is 95 % of submits under 200 ms.
"""

import argparse
import asyncio
import itertools
import random
import secrets
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import func, select

from annotation_ui.server.auth import Auth
from annotation_ui.server.headers import COOKIE
from annotation_ui.store.database import Database
from annotation_ui.store.importing import NewBatch, import_rows
from annotation_ui.store.schema import Assignment, Item, Judgment, User
from tests.annotation_ui.running import Server

RESPONSES = 4
LABELERS_PER_ITEM = 2


@dataclass
class Result:
    """Measurements of the labelers' requests."""

    acknowledged: list[str] = field(default_factory=list)
    latency: dict[str, list[float]] = field(default_factory=lambda: {"next": [], "draft": [], "submit": []})
    seconds: float = 0.0
    sent_again: int = 0


def set_up(database: Database, labelers: int, items: int) -> list[str]:
    """Create a batch and signed-in labelers. Return the labelers' session tokens."""
    text = "A response of some length, as models write them. " * 8
    rows = ({"prompt": f"Prompt {i}", "responses": [f"{text}{k}" for k in range(RESPONSES)]} for i in range(items))
    import_rows(database, NewBatch("load", "rank", LABELERS_PER_ITEM), ((f"row {i}", row) for i, row in enumerate(rows)))
    with database.write() as session:
        users = [User(name=f"load-{i}", role="labeler", password_hash="!", pseudonym=f"load-{i}") for i in range(labelers)]
        session.add_all(users)
        session.flush()
        numbers = [user.id for user in users]
    return [Auth(database).start_session(number) for number in numbers]


async def label(
    port: int,
    tokens: list[str],
    seconds: float,
    pause: float,
    result: Result | None = None,
    stopped: threading.Event | None = None,
) -> Result:
    """Run all labelers for `seconds` or until `stopped`, and fill `result`. The last request of each is always completed."""
    result, stopped = result or Result(), stopped or threading.Event()
    start = time.perf_counter()

    def working() -> bool:
        return time.perf_counter() < start + seconds and not stopped.is_set()

    limits = httpx.Limits(max_connections=len(tokens))  # one keep-alive connection per labeler
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=60) as client:
        await asyncio.gather(*(_labeler(client, token, working, pause, result) for token in tokens))
    result.seconds = time.perf_counter() - start
    return result


async def _labeler(client: httpx.AsyncClient, token: str, working: Callable[[], bool], pause: float, result: Result) -> None:
    async def ask(kind: str, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(random.uniform(0, 2 * pause))
        start = time.perf_counter()
        for attempt in itertools.count():
            try:
                answer = await client.request(method, path, json=body, headers={"Cookie": f"{COOKIE}={token}"})
                break
            except httpx.TransportError:
                result.sent_again += attempt == 0
                await asyncio.sleep(0.2)
        if answer.status_code != 200:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text}")
        if attempt == 0:
            result.latency[kind].append(time.perf_counter() - start)
        return answer.json()

    while working():
        item = (await ask("next", "POST", "/api/tasks/rank/next", {}))["item"]
        if item is None:
            return
        here = f"/api/assignments/{item['assignment']}"
        ranks = random.sample(range(1, RESPONSES + 1), RESPONSES)
        draft = {"draft": {"state": {"ranks": ranks}, "past": []}, "sequence": item["sequence"] + 1}
        await ask("draft", "PUT", f"{here}/draft", draft)
        request_id = secrets.token_hex(16)
        await ask("submit", "POST", f"{here}/submit", {"request_id": request_id, "answer": {"ranks": ranks}, "seconds": 1})
        result.acknowledged.append(request_id)


def check(database: Database, acknowledged: list[str]) -> None:
    """Check that every acknowledged judgment is stored once, no slot is taken twice, and no labeler judged an item twice."""
    with database.read() as session:
        stored = Counter(session.scalars(select(Judgment.request_id)))
        lost = [request_id for request_id in acknowledged if stored[request_id] != 1]
        assert not lost, f"{len(lost)} of {len(acknowledged)} acknowledged judgments are lost or doubled"
        twice = select(Judgment.item_id).group_by(Judgment.item_id, Judgment.user_id).having(func.count() > 1)
        assert session.scalar(twice.limit(1)) is None, "a labeler judged an item twice"
        held = select(Assignment.item_id, func.count()).where(Assignment.state.in_(("leased", "done")))
        slots = dict(session.execute(held.group_by(Assignment.item_id)).all())
        for item_id, taken in session.execute(select(Item.id, Item.taken)):
            assert taken == slots.get(item_id, 0) <= LABELERS_PER_ITEM, f"item {item_id}: {taken} slots taken"


def report(result: Result) -> str:
    """Format the request rate and the latency as a small table."""
    requests = sum(map(len, result.latency.values())) + result.sent_again
    lines = [f"{requests / result.seconds:.0f} requests/s, {len(result.acknowledged)} judgments in {result.seconds:.0f} s"]
    lines.append(f"{result.sent_again} requests sent again while the server was down")
    lines.append(f"{'':8}{'median':>9}{'95 %':>9}{'99 %':>9}{'most':>9}   (ms)")
    for kind, times in result.latency.items():
        cuts = statistics.quantiles(times, n=100)
        numbers = [1000 * each for each in (cuts[49], cuts[94], cuts[98], max(times))]
        lines.append(f"{kind:8}" + "".join(f"{number:9.1f}" for number in numbers))
    return "\n".join(lines)


def kill_and_start(server: Server, times: int, every: float) -> None:
    """Kill and restart the app `times` times."""
    for _ in range(times):
        time.sleep(every)
        server.kill()
        server.start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labelers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.5)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--database", help="an empty database (default: a new SQLite file)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(options.database or f"sqlite:///{folder}/load.db", Path(folder))
        tokens = set_up(server.database, options.labelers, options.items)
        with server.started():
            every = options.seconds / (options.kills + 1)
            killer = threading.Thread(target=kill_and_start, args=(server, options.kills, every))
            killer.start()
            result = asyncio.run(label(server.port, tokens, options.seconds, options.pause))
            killer.join()
            check(server.database, result.acknowledged)
    print(report(result))
    print("every acknowledged judgment is there once")


if __name__ == "__main__":
    main()
