import contextlib
import json
import secrets
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotation_ui.rendering.markdown import MAX_HTML, MAX_MARKDOWN, MAX_SECONDS, to_html
from annotation_ui.server.auth import FAILURES, NAME_FAILURES, Auth, TooManyAttemptsError
from annotation_ui.tasks import TASKS, BadInputError
from tests.annotation_ui.running import Client, form


def test_of_many_guesses_at_once_only_five_are_tried_whatever_address_they_claim(any_server):
    name, nobody = f"guessed-{secrets.token_hex(3)}", Client(any_server)
    Auth(any_server.database).create_user(name, "labeler", "right-password")

    def guess(number):
        headers = {"X-Forwarded-For": f"10.0.0.{number}"}
        body, kind = form(name=name, password=f"wrong-{number}")
        return nobody("POST", "/login", body, {**kind, **headers})[0]

    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(guess, range(30)))
    assert sorted(answers) == [401] * FAILURES + [429] * (30 - FAILURES)
    assert nobody("POST", "/login", *form(name=name, password="right-password"))[0] == 429
    Auth(any_server.database).set_active(name, True)  # a lead, or `align annotate activate-user`, lets them in
    assert nobody("POST", "/login", *form(name=name, password="right-password"))[0] == 303


def test_wrong_names_lock_nobody_out(any_server):
    name, nobody = f"innocent-{secrets.token_hex(3)}", Client(any_server)
    Auth(any_server.database).create_user(name, "labeler", "right-password")
    known = nobody("POST", "/login", *form(name=name, password="wrong"))
    for number in range(60):
        unknown = nobody("POST", "/login", *form(name=f"nobody-{number}", password="wrong"))
        assert (unknown[0], unknown[2]) == (401, known[2])  # nothing tells whether there is such a user
    for odd in ("a\0b", "\ud800", "x" * 65, "é é"):  # no user can have these, and no database has to store them
        body = f"name={''.join(f'%{byte:02x}' for byte in odd.encode('utf-8', 'surrogatepass'))}&password=w"
        assert nobody("POST", "/login", body, form()[1])[0] == 401, odd
    assert nobody("POST", "/login", *form(name=name, password="right-password"))[0] == 303


def test_a_name_is_guessed_at_from_many_addresses_for_a_while_only(database):
    auth = Auth(database)
    auth.create_user("ann", "labeler", "right-password")
    for number in range(NAME_FAILURES):
        assert auth.sign_in("ann", "wrong-password", f"10.0.0.{number // FAILURES}") is None
    with pytest.raises(TooManyAttemptsError):
        auth.sign_in("ann", "right-password", "10.9.9.9")


COSTLY = {
    "images": "![" * 25_000,
    "brackets": "[" * 50_000,
    "links": "[a](" * 12_500,
    "emphasis": "*a_ " * 12_500,
    "table": "|" + "a|" * 2000 + "\n|" + "-|" * 2000 + "\n" + "|a\n" * 10_000,
    "references": "[a]: /" + "x" * 20_000 + "\n\n" + "[a]" * 5000,
    "long": "*word* " * 20_000,
}


@pytest.mark.parametrize("kind", COSTLY)
def test_a_costly_text_is_shown_as_it_was_written_soon_and_only_rendered_once(kind):
    text = COSTLY[kind]
    start = time.thread_time()
    html = to_html(text)
    # One step of the parser and the cleaning come on top. Without limits: 3 to 43 s, or 50 MB.
    assert time.thread_time() - start < 5 * MAX_SECONDS
    assert len(html) <= max(MAX_HTML * 2, len(text) * 2)
    assert text.split("\n")[0][:1000] in html
    assert to_html(text) is html


def test_usual_texts_are_far_from_the_limits():
    text = "Some *usual* text with `code`, a [link](https://example.org) and\n\n- a list\n- of **things**\n\n"
    assert "<em>usual</em>" in to_html((text * (MAX_MARKDOWN // len(text)))[:MAX_MARKDOWN])


def test_a_flood_of_costly_previews_stalls_nobody_who_labels(ann, bob):
    ann.server.add_batch(3)
    with ThreadPoolExecutor(8) as pool:
        previews = [pool.submit(bob, "POST", "/api/preview", {"text": f"{n}{'![' * 24_000}"}) for n in range(8)]
        start = time.perf_counter()
        assert ann.next()["assignment"]
        waited = time.perf_counter() - start
        assert {preview.result()[0] for preview in previews} == {200}
        everything = time.perf_counter() - start
    assert waited < 0.5 * everything


def test_what_cannot_be_stored_is_refused_with_one_line(any_server):
    ann = Client(any_server, any_server.token(f"odd-{secrets.token_hex(3)}"))
    any_server.add_batch(1)
    here = f"/api/assignments/{ann.next()['assignment']}"
    good = {"request_id": secrets.token_hex(8), "answer": {"ranks": [1, 2, 3, 4]}, "seconds": 1}
    deep = []
    for _ in range(100):
        deep = [deep]
    for method, path, body in (
        ("PUT", "/draft", '{"draft": {"state": "\\ud800"}, "sequence": 1}'),
        ("PUT", "/draft", '{"draft": {"\\udfff": 1}, "sequence": 1}'),
        ("PUT", "/draft", '{"draft": {"state": NaN}, "sequence": 1}'),
        ("PUT", "/draft", {"draft": {"state": deep}, "sequence": 1}),
        ("PUT", "/draft", "[" * 100_000),
        ("PUT", "/draft", {"draft": [], "sequence": 2**40}),
        ("POST", "/submit", json.dumps({**good, "seconds": float("nan")})),
        ("POST", "/submit", json.dumps({**good, "seconds": float("inf")})),
        ("POST", "/submit", {**good, "answer": {"ranks": [1, 2, 3, 4], "flags": [[{}], [], [], []]}}),
        *(("POST", "/submit", {**good, "answer": {"ranks": ranks}}) for ranks in (
            [[], {}, 3, 4], [1, 2, 3], [1, 2, 3, 5], [0, 1, 2, 3], [True, 2, 3, 4], ["1", 2, 3, 4], {"0": 1}, None,
        )),
        ("POST", "/submit", {**good, "answer": {"ranks": [1, 1, 1, 1], "ratings": [8, 1, 1, 1]}}),
        ("POST", "/submit", {**good, "answer": {"ranks": [1, 1, 1, 1], "flags": [["<script>"], [], [], []]}}),
        ("POST", "/submit", {**good, "request_id": "short"}),
        ("POST", "/skip", '{"request_id": "12345678", "reason": "\\ud800"}'),
        ("POST", "/skip", {"request_id": "a\0bcdefgh"}),
    ):  # fmt: skip
        status, _, text = ann(method, f"{here}{path}", body)
        assert status in (400, 422), (path, body, status, text)
        assert len(text) < 500
        assert "\n" not in text
    assert ann("POST", "/api/assignments/99999999999/submit", good)[0] == 422
    assert ann("POST", "/api/tasks/nothing/next", {})[0] == 422
    held = ann("PUT", f"{here}/draft", {"draft": {"state": "a\0b é 👍"}, "sequence": 1})  # rare, but text
    assert held[0] == 200, held
    assert ann.next()["draft"] == {"state": "a\0b é 👍"}
    assert ann("POST", f"{here}/submit", good)[0] == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "role", "verdict"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(["prompt", "responses", "response", "rules", "rule", "model", "ranks", "ratings", "flags",
                          "choice", "verdicts", "verdict", "note", "messages", "completion",
                          "outcome", "better", "spans", "reason"])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(TASKS)), st.dictionaries(FIELDS, JSON, max_size=6))
def test_whatever_json_a_row_or_an_answer_is_it_is_valid_or_refused(task, fields):
    rules = [{"id": "a", "text": "A."}, {"id": "b", "text": "B."}]
    contents = {
        "rank": {"prompt": "p", "responses": ["x", "y"]},
        "compare": {"prompt": "p", "responses": ["x", "y"]},
        "rules": {"prompt": "p", "response": "x", "rules": ["a", "b"]},
        "demonstrate": {"prompt": "p"},
        "edit": {"prompt": "p", "response": "x"},
        "spans": {"prompt": "p", "response": "x", "types": ["a"]},
        "probe": {"prompt": [], "rule": "a"},
    }
    for action in (
        lambda: TASKS[task].contents({"prompt": "p", "responses": ["x", "y"], **fields}, {}, rules),
        lambda: TASKS[task].check(fields, contents[task], rules),
    ):
        with contextlib.suppress(BadInputError):
            action()
