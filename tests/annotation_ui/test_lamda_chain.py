"""From clicks on LaMDA's forms to samples that its safety filter passes and its quality score ranks."""

import pytest
from playwright.sync_api import expect

from annotation_ui.cli import main as annotate
from tests.annotation_ui.pages import open_task
from tests.extras.running import command
from tests.files import read_rows, write_rows

SAFE, UNSAFE = "Drink tea with milk.", "Drink poison at once!"
PROMPTS = [f"What shall I drink on day {day}?" for day in range(6)]
QUICK = "--dtype float32 --report_to none --batch_size 4 --eval_steps 1000 --num_train_epochs 30 --learning_rate 3e-3"


def label(server, browser, name, answer):
    """Answer each of a labeler's items with the mouse; `answer(page, response)` clicks."""
    page = open_task(server, browser, name, "rules")
    for done in range(1, 2 * len(PROMPTS) + 1):
        answer(page, page.locator(".reading .card").inner_text().strip())
        page.click('[data-action="submit"]')
        expect(page.locator(".count")).to_have_text(f"{done} done")


def answer_harms(page, response):
    page.get_by_role("radio", name="None of these").click()
    if response == UNSAFE:
        page.locator('[data-rule="harm-serious"]').get_by_role("radio", name="Yes").click()


def answer_quality(page, response):
    for rule in ("sensible", "specific", "interesting"):
        good = rule != "interesting" if response == SAFE else rule == "interesting"
        page.locator(f'[data-rule="{rule}"] [data-verdict="{"follows" if good else "violates"}"]').click()


@pytest.mark.slow
def test_clicks_on_the_forms_become_a_filter_and_a_ranking(own_server, browser, tmp_path):
    server, quality = own_server, ["sensible", "specific", "interesting"]
    talks = [{"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]}
             for prompt in PROMPTS for text in (SAFE, UNSAFE)]  # fmt: skip
    server.add_batch([("t", row) for row in talks], "rules", rule_set="lamda-harms-form", name="harms")
    label(server, browser, "rater", answer_harms)
    server.close_all_batches()
    rated = [("t", {**row, "rules": quality}) for row in talks]
    server.add_batch(rated, "rules", rule_set="lamda-quality", name="quality")
    label(server, browser, "judge", answer_quality)

    labels, sft, attributes = tmp_path / "attributes.jsonl", tmp_path / "sft", tmp_path / "attributes"
    annotate(["--database", server.database_url, "export", "attributes", str(labels)])
    answers = [talk["messages"] for talk in talks]
    shown = write_rows(
        tmp_path / "shown.jsonl", [{"prompt": [user], "completion": said["content"]} for user, said in answers]
    )
    command(f"sft --model tiny-llama --train_data {shown} --output_dir {sft} {QUICK}")
    heads = f"--heads unsafe {' '.join(quality)}"
    command(f"attributes --model {sft}/model --train_data {labels} --output_dir {attributes} {heads} {QUICK}")

    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS[:4]])
    words = f"sample --model {sft}/model --prompts {prompts} --max_new_tokens 32 --temperature 0.5 --dtype float32"
    words += f" --attributes.model {attributes}/model"
    command(f"{words} --samples_per_prompt 8 --output {tmp_path}/all.jsonl")
    chosen = "--best_of 8 --attributes.filter unsafe<0.2 --attributes.rank 3*sensible+specific+interesting --fallback No."
    command(f"{words} {chosen} --output {tmp_path}/kept.jsonl")
    said = []
    for row, kept in zip(read_rows(tmp_path / "all.jsonl"), read_rows(tmp_path / "kept.jsonl"), strict=True):
        rated = [
            dict(zip(row["attributes"], values, strict=True)) for values in zip(*row["attributes"].values(), strict=True)
        ]
        worth = {text: 3 * each["sensible"] + each["specific"] + each["interesting"]
                 for text, each in zip(row["responses"], rated, strict=True) if each["unsafe"] < 0.2}  # fmt: skip
        assert kept["responses"] == [max(worth, key=worth.__getitem__) if worth else "No."]
        said += zip(row["responses"], (each["unsafe"] for each in rated), strict=True)
    unsafe = [value for text, value in said if text == UNSAFE]
    safe = [value for text, value in said if text == SAFE]
    assert min(unsafe) > 0.8
    assert max(safe) < 0.2
