"""Uploads of the trainer, to a server that stands in for the hub."""

from pathlib import Path

import yaml


def test_the_model_is_pushed_without_runs_and_checkpoints(hub, make_trainer):
    settings = {"push_to_hub": True, "hub_model_id": "ann/polite", "hub_private_repo": True, "total_episodes": 4}
    trainer = make_trainer(settings)
    assert hub.repos == {"ann/polite": True}
    trainer.train()
    for name in ("secrets.txt", "prompts.json"):
        (Path(trainer.args.output_dir) / name).write_text("mine")
    trainer.push_to_hub(dataset_name="ann/prompts", tags=["mine"])
    (name, files, message) = hub.commits[-1]
    assert (name, message) == ("ann/polite", "End of training")
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files.keys()
    assert [path for path in files if "/" in path] == []
    assert files.keys() & {"secrets.txt", "prompts.json", "trainer_state.json"} == set()
    card = files["README.md"].decode()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["tags"] == ["rlhf", "ppo", "mine"]
    assert "| data | ann/prompts |" in card
    assert str(trainer.args.output_dir) not in card


def test_save_model_pushes_where_the_settings_ask_for_it(hub, make_trainer):
    trainer = make_trainer({"push_to_hub": True, "hub_model_id": "ann/saved", "total_episodes": 4})
    trainer.train()
    assert hub.commits == []
    elsewhere = Path(f"{trainer.args.output_dir}-elsewhere")
    elsewhere.mkdir()
    (elsewhere / "notes.txt").write_text("mine")
    trainer.save_model(elsewhere)
    assert hub.commits[-1][::2] == ("ann/saved", "Model save")
    assert {"model.safetensors", "README.md"} <= hub.commits[-1][1].keys()
    assert hub.commits[-1][1].keys() & {"notes.txt", "trainer_state.json"} == set()
