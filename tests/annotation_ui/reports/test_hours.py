import csv
import secrets
from datetime import UTC, date, datetime
from pathlib import Path

from playwright.sync_api import expect
from sqlalchemy import select

from annotation_ui.cli import main
from annotation_ui.reports.hours import hours, today
from annotation_ui.store.database import Database, sqlite_url
from annotation_ui.store.leases import Leases
from annotation_ui.store.schema import Assignment, Judgment, User
from annotation_ui.store.tokens import Tokens
from tests.annotation_ui.pages import open_tab
from tests.annotation_ui.running import Client, add_batch, add_users, do, read, stored

MONTH = 30 * 86_400


def moment(day, clock):
    hour, minute = clock.split(":")
    return datetime(2026, 3, day, int(hour), int(minute), tzinfo=UTC).timestamp()


def judged(database, user, *answers):
    """Store judgments at (day, clock, seconds, kind), each of an item of its own unless the kind is edit."""
    leases, assignment = Leases(database), None
    for day, clock, seconds, kind in answers:
        if assignment is None or kind not in ("edit", "undo"):
            assignment = leases.next(user, "rank")
            with database.write() as session:
                session.get_one(type(assignment), assignment.id).state = "done"
        with database.write() as session:
            session.add(
                Judgment(
                    request_id=secrets.token_hex(8),
                    assignment_id=assignment.id,
                    item_id=assignment.item_id,
                    user_id=user,
                    kind=kind,
                    answer={"ranks": [1, 2, 3, 4]},
                    shown_order=[0, 1, 2, 3],
                    seconds=float(seconds),
                    created_at=moment(day, clock),
                )
            )


def table(database, **more):
    return [(row["day"], row["labeler"], row["hours"], row["items"]) for row in read(database, hours, **more)]


def test_hours_by_hand(database):
    ann, ben = add_users(database, "ann", "ben")
    add_batch(database, 20)
    judged(
        database,
        ann,
        (1, "09:06", 360, "submit"),  # 09:00 to 09:06
        (1, "09:12", 180, "submit"),  # 09:09 to 09:12, after a pause of 3 minutes, which counts
        (1, "09:30", 360, "skip"),  # 09:24 to 09:30, after a pause of 12 minutes, which does not; no item
        (1, "10:00", 360, "submit"),  # 09:54 to 10:00
        (1, "10:03", 600, "edit"),  # 10:00 to 10:03: the time before the first answer is not the change's; the same item
        (1, "10:10", 60, "undo"),  # no time; the answer of 10:00 counts again
    )
    judged(database, ben, (1, "23:59", 60, "submit"), (2, "00:05", 360, "submit"))  # over midnight
    # ann: 12 + 6 + 9 minutes; ben: 23:58 to 24:00 and 00:00 to 00:05, without a pause in between
    assert table(database) == [
        ("2026-03-01", "ann", round(27 / 60, 2), 3),
        ("2026-03-01", "ben", round(2 / 60, 2), 1),
        ("2026-03-02", "ben", round(5 / 60, 2), 1),
    ]
    assert table(database, gap_seconds=720)[0][2] == round(39 / 60, 2)
    assert table(database, gap_seconds=0)[0][2] == round((6 + 3 + 6 + 9) / 60, 2)
    assert [row[0] for row in table(database, since=date(2026, 3, 2))] == ["2026-03-02"]
    assert table(database, since=date(2026, 3, 2))[0][2] == round(5 / 60, 2)
    assert [row[1] for row in table(database, until=date(2026, 3, 1))] == ["ann", "ben"]
    assert table(database, until=date(2026, 2, 27)) == []


def test_a_changed_answer_adds_only_the_time_since_it_was_opened_again(database, judgments):
    (ann,) = add_users(database, "ann")
    add_batch(database, 1)
    do(judgments, ann, "rank", {"ranks": [1, 2, 3, 4]})
    with database.write() as session:
        first = session.scalars(select(Judgment)).one()
        session.get_one(Assignment, first.assignment_id).opened_at -= MONTH
    judgments.reopen(ann, first.assignment_id)
    answer = {"ranks": [2, 1, 3, 4]}
    assert judgments.submit(ann, first.assignment_id, "change-it", answer, 1e7).seconds < 60
    with database.write() as session:
        session.get_one(Assignment, first.assignment_id).opened_at -= MONTH
    assert judgments.undo(ann, "rank", "undo-it") is not None
    assert judgments.submit(ann, first.assignment_id, "change-again", answer, 1e7).seconds < 60


def test_a_lease_that_is_taken_up_again_adds_nothing_for_the_pause(database, judgments):
    (ann,) = add_users(database, "ann")
    add_batch(database, 1)
    first = judgments.leases.next(ann, "rank")
    with database.write() as session:  # open for ten minutes a month ago
        mine = session.get_one(Assignment, first.id)
        mine.opened_at, mine.leased_at, mine.expires_at = first.opened_at - MONTH, first.leased_at - MONTH + 600, 0
    again = judgments.leases.next(ann, "rank")
    assert again.id == first.id
    answer = {"ranks": [2, 1, 3, 4]}
    assert 600 <= judgments.submit(ann, again.id, "after-the-pause", answer, 1e7).seconds < 720


def test_the_command_prints_a_table_or_writes_a_file(tmp_path, capsys):
    def run(*words):
        assert main(["--data-dir", str(tmp_path), *words]) == 0
        return capsys.readouterr().out

    run("create-user", "ann")
    database = Database(sqlite_url(tmp_path))
    add_batch(database, 2)
    (ann,) = stored(database, select(User))
    judged(database, ann.id, (1, "09:30", 1800, "submit"))
    database.close()
    row = ["2026-03-01", "ann", ann.pseudonym, "0.5", "1"]
    assert run("hours").splitlines() == ["day\tlabeler\texported as\thours\titems", "\t".join(row)]
    assert run("hours", str(tmp_path / "pay.csv"), "--since", "2026-03-01") == f"1 row in {tmp_path / 'pay.csv'}\n"
    with (tmp_path / "pay.csv").open(encoding="utf-8-sig", newline="") as file:
        assert list(csv.reader(file)) == [["day", "labeler", "exported as", "hours", "items"], row]
    assert run("hours", "--until", "2026-02-28") == ""


def test_a_lead_sees_the_hours_and_saves_them(any_server, browser):
    name = f"hours-{secrets.token_hex(3)}"
    user = any_server.user_id(name)
    any_server.add_batch(2)
    do(any_server.judgments, user, "rank", {"ranks": [1, 2, 3, 4]})
    page = any_server.lead_page(browser, "hours-boss")
    panel = open_tab(page, "Hours")
    expect(panel.get_by_label("First day")).to_have_value(today().replace(day=1).isoformat())
    row = panel.locator("tr", has_text=name)
    expect(row).to_contain_text(today().isoformat())
    with page.expect_download() as download:
        panel.get_by_role("button", name="CSV file").click()
        panel.locator('a[href*="hours-"][download]').first.click()
    content = Path(download.value.path()).read_text(encoding="utf-8-sig")
    assert [line.split(",")[1] for line in content.splitlines() if name in line] == [name]
    panel.get_by_label("Last day").fill("yesterday")
    panel.get_by_role("button", name="Show").click()
    expect(page.locator(".toast-body").last).to_contain_text("'yesterday' is not a day such as 2026-01-31")
    panel.get_by_label("Last day").fill("2020-01-01")
    panel.get_by_role("button", name="Show").click()
    expect(panel.get_by_text("No work in this period.")).to_be_visible()
    token = Tokens(any_server.database).create(secrets.token_hex(4), ("export",))
    saved = download.value.suggested_filename  # names of people: no program gets them
    header = {"Authorization": f"Bearer {token}"}
    assert Client(any_server)("GET", f"/api/v1/exports/{saved}", None, header)[0] == 404
