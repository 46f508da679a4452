"""The date that a chat template writes: fixed when a run starts, kept by it, and saved with its model."""

import json

from transformers import AutoTokenizer

from align import cli
from align.model_registry.tiny import byte_tokenizer
from align.training import resume

DATED = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}"
TURNS = [{"role": "user", "content": "Hi"}]


class Day(resume.date):
    number = 1

    @classmethod
    def today(cls):
        return cls(2026, 7, cls.number)


def dated_template(tmp_path):
    path = tmp_path / "dated.jinja"
    path.write_text(DATED + byte_tokenizer().chat_template)
    return str(path)


def test_a_run_keeps_its_date_when_it_is_resumed_on_another_day(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "date", Day)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Hi {n}", "completion": "Hello"}) + "\n" for n in range(4)))
    run = tmp_path / "run"
    words = ["sft", "--model", "tiny-gpt2", "--train_data", str(rows), "--output_dir", str(run), "--report_to", "none"]
    words += ["--chat_template", dated_template(tmp_path), "--batch_size", "2", "--save_steps", "2", "--seed", "0"]
    words += ["--dtype", "float32"]
    cli.main([*words, "--num_train_epochs", "1"])
    assert json.loads((run / "environment.json").read_text())["template_date"] == "2026-07-01"
    monkeypatch.setattr(Day, "number", 2)
    cli.main([*words, "--num_train_epochs", "2", "--resume_from_checkpoint", "true"])
    assert json.loads((run / "environment.json").read_text())["template_date"] == "2026-07-01"
    elsewhere = AutoTokenizer.from_pretrained(run / "model")
    text = elsewhere.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert text == "Today: 01 Jul 2026\nUser: Hi\nAssistant: "
