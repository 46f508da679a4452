"""The lead's page with many judgments: seconds that each tab takes, before and after a new judgment.

    python -m benchmarks.annotation_reports [--judgments 50000] [--labelers 20] [--database sqlite:///FILE.db]

Fills a new database with rankings of four responses by two labelers an item, and an eighth as many comparisons. Prints for
each table the first call after a start, a call with nothing new, and a call after one new judgment.
"""

import argparse
import random
import resource
import secrets
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import func, insert, select

from annotation_ui.reports import overview
from annotation_ui.reports.browsing import Filter, browse_items, browse_judgments
from annotation_ui.reports.hours import hours
from annotation_ui.reports.labeler_report import items_behind_reliability, labeler_rows
from annotation_ui.reports.ratings import ratings_by_model
from annotation_ui.server.api import next_decision
from annotation_ui.store.database import Database
from annotation_ui.store.judgments import Judgments
from annotation_ui.store.leases import Leases
from annotation_ui.store.schema import Assignment, Batch, Item, Judgment, User
from annotation_ui.tasks import TASKS

TEXT = "A response of some length, as models write them. " * 8
LABELERS_PER_ITEM = 2
DAY = 86_400


def fill(database: Database, task: str, judgments: int, labelers: list[int], rng: random.Random) -> None:
    """Add a batch in which every item except the last is judged, with bulk inserts."""
    items = judgments // LABELERS_PER_ITEM
    size = 4 if task == "rank" else 2
    with database.write() as session:
        batch = Batch(name=f"{task} {items}", task=task, labelers_per_item=LABELERS_PER_ITEM, complete=True)
        session.add(batch)
        session.flush()
        first = (session.scalar(select(func.max(Item.id))) or 0) + 1
        first_assignment = (session.scalar(select(func.max(Assignment.id))) or 0) + 1
        first_judgment = (session.scalar(select(func.max(Judgment.id))) or 0) + 1
        start, rows = time.time() - 20 * DAY, [[], [], []]
        for number in range(items + 1):
            is_last = number == items
            texts = [f"{TEXT}{number}.{each}" for each in range(size)]
            content = {"prompt": f"Prompt {number}", "responses": texts, "model": [f"model-{each}" for each in range(size)]}
            counts = {"needed": LABELERS_PER_ITEM, "taken": 0 if is_last else LABELERS_PER_ITEM, "purpose": "work"}
            rows[0].append(
                {"id": first + number, "batch_id": batch.id, "position": number, "content": content, "returned": False}
                | counts
            )
            for labeler in () if is_last else rng.sample(labelers, LABELERS_PER_ITEM):
                place, at = len(rows[1]), start + 19 * DAY * number / items
                order = rng.sample(range(size), size)
                own = {"item_id": first + number, "user_id": labeler, "shown_order": order}
                rows[1].append(
                    own
                    | {"id": first_assignment + place, "batch_id": batch.id, "position": number, "task": task}
                    | {"adjudication": False, "state": "done", "draft_seq": 0, "opened_at": at, "leased_at": at}
                    | {"expires_at": at, "current_id": first_judgment + place}
                )
                rows[2].append(
                    own
                    | {"id": first_judgment + place, "request_id": secrets.token_hex(8), "kind": "submit"}
                    | {"assignment_id": first_assignment + place, "answer": answer(task, number, labeler, order, rng)}
                    | {"seconds": rng.uniform(10, 60), "created_at": at}
                )
        for table, values in zip((Item, Assignment, Judgment), rows, strict=True):
            for begin in range(0, len(values), 5000):
                session.execute(insert(table), values[begin : begin + 5000])


def answer(task: str, number: int, labeler: int, order: list[int], rng: random.Random) -> dict[str, Any]:
    """Return a random answer in the shown order, which is right in four of five cases."""
    if task == "compare":
        best = "A" if rng.random() < 0.8 else rng.choice(["B", "tie", "both_bad"])
        return TASKS[task].shown({"choice": best}, order)
    ranks = list(range(1, 5))
    if rng.random() < 0.4:
        place = rng.randrange(3)
        ranks[place], ranks[place + 1] = ranks[place + 1], ranks[place]
    ratings = [max(1, 7 - rank - rng.randrange(2)) for rank in ranks]
    return TASKS[task].shown({"ranks": ranks, "ratings": ratings, "flags": [["violent"], [], [], []]}, order)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judgments", type=int, default=50_000)
    parser.add_argument("--labelers", type=int, default=20)
    parser.add_argument("--database", default="")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    database = Database(options.database or f"sqlite:///{folder / 'annotations.db'}")
    database.upgrade()
    rng = random.Random(0)
    with database.write() as session:
        users = [
            User(name=f"labeler-{n}", role="labeler", password_hash="!", pseudonym=f"p-{n}") for n in range(options.labelers)
        ]
        session.add_all([*users, lead := User(name="boss", role="lead", password_hash="!", pseudonym="p-boss")])
        session.flush()
        labelers, boss = [user.id for user in users], lead.id
    for task, share in (("rank", 1.0), ("compare", 0.125)):
        fill(database, task, int(options.judgments * share), labelers, rng)
    judgments = Judgments(Leases(database))
    reports: dict[str, Callable[..., Any]] = {
        "Overview: progress": overview.progress,
        "Overview: agreement": partial(overview.coefficients, task="rank"),
        "Overview: win rates": overview.win_rates,
        "Overview: ratings": ratings_by_model,
        "Overview: judgments per day": partial(overview.per_day, task="rank"),
        "Labelers": partial(labeler_rows, task="rank"),
        "Labelers: items of one": partial(items_behind_reliability, task="rank", labeler="labeler-0"),
        "Disagreements": partial(overview.disagreements, task="rank"),
        "Decide": lambda session: next_decision(judgments.leases, boss, "rank"),
        "Hours": hours,
        "Items": partial(browse_items, wanted=Filter()),
        "Items: judgments": partial(browse_judgments, wanted=Filter()),
    }

    clock = time.process_time if database.is_sqlite else time.perf_counter  # CPU time is unaffected by other programs

    def seconds(report: Callable[..., Any]) -> float:
        start = clock()
        with database.read() as session:
            report(session)
        return clock() - start

    def judge(labeler: int) -> None:
        opened = judgments.leases.next(labeler, "rank")
        shown = TASKS["rank"].shown({"ranks": [4, 3, 2, 1], "ratings": [1, 2, 3, 4], "flags": [[]] * 4}, opened.shown_order)
        judgments.submit(labeler, opened.id, secrets.token_hex(8), shown, 1.0)

    first = {name: seconds(report) for name, report in reports.items()}
    again = {name: seconds(report) for name, report in reports.items()}
    new = {}
    for name, report in reports.items():
        with database.write() as session:
            batch = session.scalars(select(Batch).where(Batch.task == "rank")).one()
            item = Item(
                batch_id=batch.id, position=10**6 + len(new), needed=1, content={"prompt": "p", "responses": list("abcd")}
            )
            session.add(item)
        judge(labelers[len(new) % len(labelers)])
        new[name] = seconds(report)
    print(
        f"{options.judgments:,} rankings, {options.labelers} labelers, {database.engine.dialect.name}; {clock.__name__}, s"
    )
    print(f"{'table':30} {'first':>7} {'again':>7} {'one new':>8}")
    for name in reports:
        print(f"{name:30} {first[name]:7.2f} {again[name]:7.2f} {new[name]:8.2f}")
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
