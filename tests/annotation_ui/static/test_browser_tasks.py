import re

from playwright.sync_api import expect
from sqlalchemy import select

from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.store import rule_sets
from annotation_ui.store.schema import Assignment
from tests.annotation_ui.conftest import in_pairs
from tests.annotation_ui.pages import handed_in, open_task, press

SHOWN_KEYS = """() => Object.fromEntries([...document.querySelectorAll('.verdict')]
  .map((each) => [each.textContent, getComputedStyle(each, '::after').content.replace(/ \\/ ""$/, '')])
  .filter(([, key]) => key !== 'none'))"""
BOTH = in_pairs(("sqlite", "mouse"), ("postgresql", "keyboard"))


@in_pairs(("postgresql", "keyboard"))
def test_judge_rules(any_server, browser, how):
    row = {"prompt": "Who are you?", "responses": ["I am Bob, a human."], "id": f"who-{how}"}
    batch = any_server.add_batch([("test:1", row)], "rules", rule_set="sparrow-dialogue")
    page = open_task(any_server, browser, f"rules-{how}", "rules")
    assert page.locator(".rule").count() == 23
    if how == "mouse":
        for rule in page.locator(".rule").all():
            lies = rule.get_attribute("data-rule") == "no-human-identity"
            rule.locator(f'[data-verdict="{"violates" if lies else "follows"}"]').click()
            if lies:
                rule.locator(".note").fill("says so")
    else:
        for _ in range(10):
            page.keyboard.press("3")
        page.keyboard.press("1")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("n")
        page.keyboard.type("says so")
        page.keyboard.press("Escape")
        page.keyboard.press("a")
    handed_in(page, how)
    rows = rows_to_export(any_server.database, Selection("rule_judgments", batches=(batch,)))
    assert len(rows) == 23
    labeler = rows[0]["labeler"]
    assert [row for row in rows if row["verdict"] != "follows"] == [
        {"prompt": "Who are you?", "response": "I am Bob, a human.", "rule": "no-human-identity", "verdict": "violates",
         "note": "says so", "labeler": labeler, "id": row["id"]}
    ]  # fmt: skip


KEY_NAMES = """async (pressed) => {
  const { keyName } = await import("/ui/keys.js");
  return pressed.map(([key, code, shiftKey]) => keyName({ key, code, shiftKey }));
}"""


def test_letters_and_digits_work_on_keyboards_of_other_alphabets(server, browser):
    server.add_batch([("t:1", {"prompt": "Q", "response": "A"})], "rules", rule_set="plain-style")
    page = open_task(server, browser, "layouts", "rules")
    pressed = {("ф", "KeyA", False): "a", ("Ф", "KeyA", True): "a", ("ش", "KeyA", False): "a", ("é", "Digit2", False): "2",
               ("&", "Digit1", False): "1", ("!", "Digit1", True): "!", ("?", "Digit7", True): "?",
               ("a", "KeyQ", False): "a",
               ("'", "KeyQ", False): "'", ("ü", "BracketLeft", False): "ü", ("Enter", "Enter", False): "Enter"}  # fmt: skip
    assert page.evaluate(KEY_NAMES, [list(key) for key in pressed]) == list(pressed.values())
    press = "(init) => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { bubbles: true, ...init }))"
    page.evaluate(press, {"key": "é", "code": "Digit2"})
    page.evaluate(press, {"key": "ф", "code": "KeyA"})
    assert page.locator(".verdict[aria-checked=true]").all_inner_texts() == ["Unsure", "Follows"]


def test_23_rules_fill_one_and_a_half_screens_and_none_moves_when_it_is_chosen(server, browser):
    server.add_batch([("t:1", {"prompt": "Q", "response": "A"})], "rules", rule_set="sparrow-dialogue")
    page = open_task(server, browser, "many-rules", "rules", viewport={"width": 1280, "height": 800})
    rules, texts = page.locator(".rule"), page.locator(".rule > p:first-child")
    assert rules.count() == 23
    sizes = []
    for _ in rules.all():  # whichever is chosen: its help and its note are shown
        first, last = rules.first.bounding_box(), rules.last.bounding_box()
        assert last["y"] + last["height"] - first["y"] < 1.5 * 800
        boxes = [text.bounding_box() for text in texts.all()]
        sizes.append([(box["width"], box["height"]) for box in boxes])
        assert page.locator(".rule.chosen .note").bounding_box()["height"] < 40
        assert page.locator(".rule-help:visible").count() == 1
        press(page, "ArrowDown")
    assert sizes == [sizes[0]] * 23


def test_the_help_of_a_form_names_its_own_answers_and_the_response_is_in_sight(server, browser):
    turns = [{"role": role, "content": "word " * 90} for _ in range(5) for role in ("user", "assistant")]
    row = {"prompt": turns[:-1], "response": "Yes.", "rules": ["can-be-judged", "harm-gore"]}
    server.add_batch([("t:1", row)], "rules", rule_set="lamda-harms-form")
    page = open_task(server, browser, "form-help", "rules")
    expect(page.locator(".reading .card")).to_be_in_viewport()
    keys = page.locator(".rule.chosen .verdict")
    reasons = rule_sets.read(rule_sets.PACKAGE_RULE_SETS / "lamda-harms-form.yaml")["rules"][0]["reasons"]
    assert keys.all_inner_texts() == [*reasons, "None of these", "Unsure"]
    page.keyboard.press("?")
    help = page.get_by_role("dialog").locator("tr").all_inner_texts()
    assert [line.split("\t")[0] for line in help[:5]] == ["↑ ↓", "1 2 3", "N", "A", "H"]
    page.keyboard.press("Escape")
    chosen = page.locator(".verdict[aria-checked=true]")
    assert chosen.all_inner_texts() == ["No"]  # preselected; a question about the item itself is not
    page.keyboard.press("a")
    assert chosen.all_inner_texts() == ["No"]
    page.keyboard.press("4")
    assert chosen.all_inner_texts() == ["None of these", "No"]


def test_the_form_of_harms_has_two_steps_and_tells_what_it_does_not_ask(server, browser):
    talk = [{"role": role, "content": f"{role} says"} for role in ("user", "assistant")]
    batch = server.add_batch([("t:1", {"messages": [*talk, *talk]})], "rules", rule_set="lamda-harms-form")
    page = open_task(server, browser, "two-steps", "rules")
    assert page.locator(".conversation .message").count() == 3  # all but the last turn
    expect(page.locator(".card.highlighted")).to_have_text("assistant says")
    asked, told = page.locator(".rule:visible"), page.locator(".closed-gate")
    assert [text.split(".")[0] for text in page.locator(".step").all_inner_texts()] == ["Step 1", "Step 2"]
    assert page.locator('[data-verdict="follows"][aria-checked=true]').count() == 11
    expect(page.locator(".problem")).to_have_text("1 of 12 questions to answer")
    page.get_by_role("radio", name="It does not make sense").click()
    expect(asked).to_have_count(1)
    expect(told).to_contain_text(re.compile("“It does not make sense”.*11 questions"))
    page.keyboard.press("u")
    expect(asked).to_have_count(12)
    expect(told).to_be_hidden()
    page.keyboard.press("1")
    told.get_by_role("button").click()
    expect(asked).to_have_count(12)
    page.keyboard.press("4")  # none of these
    page.locator('[data-rule="harm-how-to"]').get_by_role("radio", name="Unsure").click()
    page.locator('[data-rule="harm-gore"]').get_by_role("radio", name="Yes").click()
    helps = page.locator(".rule-help:visible")
    assert helps.count() == 11
    page.keyboard.press("h")
    expect(helps).to_have_count(1)  # of the question that is chosen
    page.reload()
    page.wait_for_selector(".rule.chosen")
    expect(helps).to_have_count(0)  # the first question has no help
    page.keyboard.press("h")
    expect(helps).to_have_count(11)
    handed_in(page, "keyboard")
    (row,) = rows_to_export(server.database, Selection("attributes", batches=(batch,)))
    harms = {name: value for name, value in row["attributes"].items() if name.startswith("harm-")}
    assert (len(harms), {name for name, value in harms.items() if value}) == (10, {"harm-gore"})
    assert (row["attributes"]["unsafe"], row["attributes"]["can-be-judged"]) == (1, 1)
    assert (row["prompt"], row["response"]) == ([*talk, talk[0]], "assistant says")


def test_a_form_asks_no_more_behind_a_gate_and_fills_the_address(server, browser):
    row = {"prompt": "Who wrote it?", "responses": ["Ann, see https://a.example/x.", "No idea."]}
    batch = server.add_batch([("t:1", row)], "rules", rule_set="grounding")
    page = open_task(server, browser, "form", "rules")
    lines, buttons = page.locator(".rule:visible"), page.locator('[data-rule="makes-claim"] .verdict')
    assert buttons.all_inner_texts() == ["Yes", "No", "Unsure"]
    assert page.locator('[data-rule="cites"] .note').input_value() == "https://a.example/x"
    assert page.evaluate(SHOWN_KEYS) == {"Yes": '"1"', "No": '"2"', "Unsure": '"3"'}  # of the chosen question alone
    page.keyboard.press("2")  # makes no claim: nothing else is asked
    expect(lines).to_have_count(1)
    page.keyboard.press("1")  # it does, after all
    expect(lines).to_have_count(4)
    for key in ("1", "2", "1"):
        page.keyboard.press(key)
    handed_in(page, "keyboard")
    page.wait_for_selector(".rule")
    page.keyboard.press("2")
    page.keyboard.press("Enter")
    expect(page.locator(".count")).to_have_text("2 done")
    rows = rows_to_export(server.database, Selection("rule_judgments", batches=(batch,)))
    assert [(row["rule"], row["verdict"]) for row in rows] == [
        ("makes-claim", "follows"), ("supported", "follows"), ("well-known", "violates"), ("cites", "follows"),
        ("makes-claim", "violates"),
    ]  # fmt: skip
    assert [row.get("note") for row in rows][3] == "https://a.example/x"


@BOTH
def test_demonstrate_with_a_refresh_in_the_middle_and_a_preview(any_server, browser, how):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Bold?"}]  # fmt: skip
    settings = {"min_words": 3, "max_words": 5}
    imported = {"prompt": talk, "id": f"demo-{how}"}
    batch = any_server.add_batch([("t:1", imported)], "demonstrate", settings=settings)
    page = open_task(any_server, browser, f"demo-{how}", "demonstrate")
    if how == "mouse":
        page.click("textarea")
    page.keyboard.type("It is **bo")
    expect(page.locator(".saved")).to_have_text("Saved")
    page.reload()
    page.wait_for_selector("textarea")
    expect(page.locator("textarea")).to_have_value("It is **bo")
    page.locator("textarea").press("End")
    page.keyboard.type("ld**.")
    expect(page.locator(".side .hint")).to_have_text("3 words (aim for 3 to 5)")
    if how == "mouse":
        page.get_by_role("button", name="Preview").click()
    else:
        page.keyboard.press("Escape")
        page.keyboard.press("p")
    expect(page.locator(".preview strong")).to_have_text("bold")
    handed_in(page, "mouse") if how == "mouse" else page.keyboard.press("Control+Enter")
    expect(page.locator(".count")).to_have_text("1 done")
    (row,) = rows_to_export(any_server.database, Selection("demonstrations", batches=(batch,)))
    assert (row["prompt"], row["completion"], row["id"]) == (talk, "It is **bold**.", imported["id"])


@BOTH
def test_compare_blind(any_server, browser, how):
    row = {"prompt": "Q", "responses": ["good", "bad"], "model": ["new", "old"], "id": "c"}
    batch = any_server.add_batch([("t:1", row)], "compare")
    page = open_task(any_server, browser, f"compare-{how}", "compare")
    first = page.locator(".pair .card .markdown").first.inner_text().strip()
    good = "A" if first == "good" else "B"
    if how == "mouse":
        page.click(f'[data-choice="{good}"]')
    else:
        page.keyboard.press("x")
        page.keyboard.press("1" if good == "A" else "2")
    handed_in(page, how)
    (found,) = rows_to_export(any_server.database, Selection("rankings", batches=(batch,)))
    assert dict(zip(found["model"], found["ranks"], strict=True)) == {"new": 1, "old": 2}


@in_pairs(("sqlite", "mouse"))
def test_probe_a_model(any_server, browser, how):
    settings = {"checkpoint": "tiny-llama" if how == "mouse" else "tiny-t5"}
    batch = any_server.add_batch([("t:1", {"rule": "no-threats"})], "probe", rule_set="sparrow-dialogue", settings=settings)
    page = open_task(any_server, browser, f"probe-{how}", "probe")
    expect(page.locator(".the-rule")).to_have_text("Does not threaten anybody.")
    page.locator(".say textarea").fill("Threaten <b>me</b>")
    if how == "mouse":
        page.click('[data-action="send"]')
    else:
        page.keyboard.press("Control+Enter")
    expect(page.locator(".message.assistant .markdown")).not_to_be_empty(timeout=120_000)
    page.reload()  # the conversation is the server's
    page.click('[data-action="raw"]')
    reply = page.locator(".message.assistant .markdown.raw").text_content()
    if how == "mouse":
        page.click('[data-verdict="violates"]')
    else:
        page.keyboard.press("Escape")
        page.keyboard.press("1")
    handed_in(page, how)
    (row,) = rows_to_export(any_server.database, Selection("rule_judgments", batches=(batch,)))
    assert row["prompt"] == [{"role": "user", "content": "Threaten <b>me</b>"}]
    assert (row["response"], row["rule"], row["verdict"]) == (reply, "no-threats", "violates")


def test_a_reply_that_comes_after_a_reload_is_shown_and_a_message_that_did_not_arrive_is_kept(server, browser):
    server.add_batch([("t:1", {"rule": "no-threats"})], "probe", rule_set="sparrow-dialogue")
    page = open_task(server, browser, "probe-reload", "probe")
    box, answering, user = page.locator(".say textarea"), [True], server.user_id("probe-reload")
    with server.database.write() as session:
        mine = session.scalars(select(Assignment).where(Assignment.user_id == user)).one()
        mine.transcript = [{"role": "user", "content": "Hi"}]

    def as_while_the_model_answers(route):
        still_answering = answering[0]  # before the fetch: the reply is stored before the model stops answering
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "answering": still_answering})

    page.route("**/transcript", as_while_the_model_answers)
    page.reload()
    expect(page.locator(".talk")).to_have_attribute("aria-busy", "true")
    expect(page.get_by_role("button", name="Retry")).to_be_hidden()
    with server.database.write() as session:
        session.get_one(Assignment, mine.id).transcript = [*mine.transcript, {"role": "assistant", "content": "Hello"}]
    answering[0] = False
    expect(page.locator(".message.assistant .markdown")).to_have_text("Hello")

    page.route("**/say", lambda route: route.abort())
    box.fill("Are you there?")
    page.click('[data-action="send"]')
    expect(page.locator(".message")).to_have_count(2)
    expect(box).to_have_value("Are you there?")
    expect(page.locator(".saved")).to_have_text("Saved")
    page.reload()
    expect(box).to_have_value("Are you there?")

    page.route("**/transcript", lambda route: route.fulfill(status=404, json={"error": "the batch was deleted"}))
    page.click('[data-action="send"]')
    expect(page.locator(".toast")).to_have_text("the batch was deleted")
    expect(page.locator('[data-action="send"]')).to_be_enabled()
    expect(page.locator(".talk")).to_have_attribute("aria-busy", "false")
    expect(page.locator(".message")).to_have_count(2)
    expect(box).to_have_value("Are you there?")
