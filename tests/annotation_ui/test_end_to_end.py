"""From clicks to models: rank or judge in the browser, export on the shell, train a reward model, a rule model, a policy."""

import json
import random

from align import cli
from annotation_ui.cli import main
from tests.annotation_ui.pages import open_task, shown_texts, submit, type_order
from tests.annotation_ui.running import rank_rows
from tests.files import read_rows

QUIET = ["--report_to", "none", "--dtype", "float32"]
TINY = ["--model", "tiny-llama", *QUIET]


def export(server, folder, record, path, batch):
    words = ["--database", server.database_url, "--data-dir", str(folder), "export", record, str(path), "--batch", batch]
    assert main(words) == 0
    return read_rows(path)


def random_tiers(rng, size):
    """An order with a tie now and then, the best first."""
    order = rng.sample(range(size), size)
    tiers = [[order[0]]]
    for index in order[1:]:
        if rng.random() < 0.3:
            tiers[-1].append(index)
        else:
            tiers.append([index])
    return tiers


def test_30_rankings_train_a_reward_model(server, browser, tmp_path):
    rows = rank_rows(30)
    rows[0][1]["responses"][1] = ""  # as policies write it
    batch = server.add_batch(rows)
    page = open_task(server, browser, "trainer", "rank")
    rng = random.Random(30)
    for done in range(1, 31):
        type_order(page, random_tiers(rng, 4), len(shown_texts(page)))
        submit(page, done)
    path = tmp_path / "rankings.jsonl"
    rows = export(server, tmp_path, "rankings", path, batch)
    left_out = json.loads(path.with_name("rankings.jsonl.manifest.json").read_text())["all_tied_left_out"]
    assert len(rows) + left_out == 30
    output = tmp_path / "reward"
    reward = ["--model", "tiny-gpt2", "--train_data", str(path), "--output_dir", str(output), "--batch_size", "15"]
    cli.main(["reward", *reward, *QUIET])
    assert list(output.rglob("*.safetensors"))
