import copy
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, TrainerCallback

from align.core.errors import UserError
from align.sampling.generation import Responses
from align.trl import PPOTrainer

METRICS = {
    *("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward", "objective/scores"),
    *("policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg", "loss/value_avg"),
    *("val/clipfrac_avg", "val/ratio", "val/ratio_var", "val/num_eos_tokens", "lr", "episode", "eps", "epoch", "step"),
}


def copies(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def changed(model, before):
    return [name for name, weight in model.named_parameters() if name in before and not torch.equal(weight, before[name])]


class Events(TrainerCallback):
    """Notes each event with the step, and stops after `last` steps."""

    def __init__(self, last=0):
        self.seen, self.last, self.objects = [], last, {}

    def on_train_begin(self, args, state, control, **objects):
        self.seen.append(("begin", state.global_step))
        self.objects = objects

    def on_log(self, args, state, control, logs=None, **objects):
        self.seen.append(("log", state.global_step))

    def on_step_end(self, args, state, control, **objects):
        self.seen.append(("step", state.global_step))
        control.should_training_stop |= state.global_step == self.last

    def on_save(self, args, state, control, **objects):
        self.seen.append(("save", state.global_step))

    def on_train_end(self, args, state, control, **objects):
        self.seen.append(("end", state.global_step))


@pytest.mark.filterwarnings("error::FutureWarning")
def test_all_weights_are_trained_in_the_given_objects(make_trainer, models, tmp_path):
    policy, critic = copies(models["model"]), copies(models["value_model"])
    frozen = copies(models["ref_model"]), copies(models["reward_model"])
    trainer = make_trainer({"learning_rate": 1e-3, "total_episodes": None, "num_train_epochs": 1.0})
    assert trainer.train() is None
    assert [name for name, _ in trainer.model.policy.named_parameters()] == list(policy)
    assert [name for name, _ in trainer.model.value_model.named_parameters()] == list(critic)
    assert trainer.model.policy is models["model"]
    assert len(changed(trainer.model.policy, policy)) > 15
    assert "score.weight" in changed(trainer.model.value_model, critic)
    assert len(changed(trainer.model.value_model, critic)) > 15
    assert changed(trainer.ref_model, frozen[0]) == changed(trainer.reward_model, frozen[1]) == []
    assert (trainer.state.global_step, trainer.state.episode, trainer.state.max_steps) == (3, 12, 3)
    assert trainer.state.epoch == 1.0
    assert trainer.state.log_history[-1].keys() == METRICS
    assert [row["step"] for row in trainer.state.log_history] == [1, 2, 3]
    assert [row["lr"] for row in trainer.state.log_history] == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])


def test_without_a_reference_the_start_is_copied(make_trainer, models):
    start = copies(models["model"])
    trainer = make_trainer({"learning_rate": 1e-3}, ref_model=None)
    trainer.train()
    assert trainer.ref_model is not models["model"]
    assert changed(trainer.ref_model, start) == []
    assert trainer.state.log_history[0]["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    assert trainer.state.log_history[1]["objective/kl"] != 0.0


def test_a_learning_rate_of_0_changes_nothing(make_trainer, models):
    policy = copies(models["model"])
    more = {"gradient_accumulation_steps": 3, "num_mini_batches": 2, "response_length": 4, "use_cpu": True, "bf16": False}
    more |= {"learning_rate": 0.0, "total_episodes": 12, "disable_tqdm": True, "save_strategy": "no", "num_ppo_epochs": 1}
    trainer = make_trainer({"per_device_train_batch_size": 4, "gradient_checkpointing": False} | more)
    trainer.train()
    assert changed(trainer.model.policy, policy) == []
    last = trainer.state.log_history[-1]
    assert (last["val/ratio_var"], last["val/ratio"], last["lr"]) == (pytest.approx(0.0, abs=1e-12), pytest.approx(1.0), 0.0)


def test_an_adapter_is_trained_beside_a_whole_value_model(make_trainer, models, tmp_path):
    critic = copies(models["value_model"])
    base = copies(models["model"])
    config = LoraConfig(r=32, lora_alpha=16, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM")
    trainer = make_trainer({"learning_rate": 1e-3}, ref_model=None, peft_config=config)
    trainer.train()
    adapter = {name: weight for name, weight in trainer.model.policy.named_parameters() if "lora" in name}
    assert adapter
    assert any(weight.abs().max() > 0 for name, weight in adapter.items() if "lora_B" in name and weight.requires_grad)
    assert len(changed(trainer.model.value_model, critic)) > 15
    trainer.save_model(str(tmp_path / "saved"))
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    saved = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == (32, 16)
    trainer.policy_model.save_pretrained(tmp_path / "by-peft")
    by_both = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("saved", "by-peft")]
    assert by_both[0].keys() == by_both[1].keys()
    assert all(torch.equal(weight, by_both[1][name]) for name, weight in by_both[0].items())
    for name, weight in models["model"].named_parameters():
        plain = name.replace("base_layer.", "")
        if plain in base:
            assert torch.equal(weight, base[plain])


def test_an_adapter_on_a_base_that_was_changed_in_memory_is_named(make_trainer, models, capsys):
    """As after merge_and_unload(): the saved adapter names the base that is on disk."""
    new = {"ref_model": None, "peft_config": LoraConfig(r=4, task_type="CAUSAL_LM")}
    with torch.no_grad():
        models["model"].model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    for policy, expected in ((copy.deepcopy(models["model"]), 1), (models["ref_model"], 0)):
        make_trainer(model=policy, **new)
        said = capsys.readouterr().err
        assert said.count("1 weights of the model in memory ('model.layers.0.self_attn.q_proj.weight' for one)") == expected
        assert said.count("which the saved adapter names as its base: save the model") == expected


def test_events_come_in_the_order_of_trl(make_trainer, tmp_path):
    events = Events()
    trainer = make_trainer({"total_episodes": 12, "save_steps": 2}, callbacks=[events])
    trainer.train()
    steps = [[("log", step), ("step", step)] for step in (1, 2, 3)]
    expected = [("begin", 0), *steps[0], *steps[1], ("save", 2), *steps[2], ("save", 3), ("end", 3)]
    assert events.seen == expected
    assert events.objects["model"] is trainer.model
    assert events.objects["processing_class"] is trainer.processing_class
    assert events.objects["optimizer"] is trainer.optimizer
    assert events.objects["lr_scheduler"] is trainer.lr_scheduler


class Changes(TrainerCallback):
    """Changes a setting after the first update, as for a schedule."""

    def on_step_end(self, args, state, control, **objects):
        args.kl_coef /= 2


def test_what_is_changed_too_late_is_refused(make_trainer, models, tmp_path):
    with pytest.raises(ValueError, match=r"`args.kl_coef` was changed after the trainer was made, which has no effect"):
        make_trainer(callbacks=[Changes()]).train()
    for name, value in (("lr_scheduler", object()), ("reward_model", models["value_model"])):
        trainer = make_trainer({"output_dir": str(tmp_path / name)})
        setattr(trainer, name, value)
        with pytest.raises(ValueError, match=f"`{name}` was changed after"):
            trainer.train()


class SavesAtTheEnd(TrainerCallback):
    def on_train_end(self, args, state, control, **objects):
        control.should_save = True


def test_a_callback_may_ask_for_a_checkpoint_at_the_end_of_training(make_trainer, tmp_path):
    events = Events()
    make_trainer({"save_strategy": "no"}, callbacks=[SavesAtTheEnd(), events]).train()
    assert events.seen[-2:] == [("end", 2), ("save", 2)]
    assert (tmp_path / "out" / "checkpoint-2" / "model.safetensors").exists()


def test_folders_are_those_of_trl_without_pickles(make_trainer, models, folder, tmp_path):
    trainer = make_trainer({"total_episodes": 12, "save_steps": 1, "save_total_limit": 2, "stop_token_id": 7})
    trainer.train()
    out = tmp_path / "out"
    trainer.save_state()
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 3
    assert not (out / "model.safetensors").exists()
    trainer.save_model(trainer.args.output_dir)
    root = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert root | {"trainer_state.json", "align", "checkpoint-2", "checkpoint-3"} <= {path.name for path in out.iterdir()}
    assert not (out / "checkpoint-1").exists()
    assert root | {"trainer_state.json"} <= {path.name for path in (out / "checkpoint-3").iterdir()}
    state = json.loads((out / "checkpoint-3" / "trainer_state.json").read_text())
    assert (state["global_step"], state["episode"]) == (3, 12)
    assert [row["step"] for row in state["log_history"]] == [1, 2, 3]
    assert [path for path in out.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")] == []
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(weight, models["model"].state_dict()[name]) for name, weight in loaded.state_dict().items())
    assert loaded.generation_config.eos_token_id == [trainer.processing_class.eos_token_id, 7]
    assert trainer.core_config.reward_model == [folder]
    assert "| reward model | tiny-llama" in (out / "README.md").read_text()


def test_a_run_resumes_with_its_history(make_trainer, models, tmp_path, capsys):
    settings = {"total_episodes": 16, "save_steps": 2, "learning_rate": 1e-3, "output_dir": str(tmp_path / "two")}
    start = {name: {key: value.clone() for key, value in model.state_dict().items()} for name, model in models.items()}
    whole = make_trainer(settings | {"output_dir": str(tmp_path / "one")})
    whole.train()
    finished = copies(models["model"])
    for name, model in models.items():
        model.load_state_dict(start[name])
    stopped = make_trainer(settings, callbacks=[Events(last=2)])
    stopped.train()
    assert (stopped.state.global_step, stopped.state.max_steps) == (2, 4)
    for name, model in models.items():
        model.load_state_dict(start[name])
    resumed = make_trainer(settings | {"resume_from_checkpoint": str(tmp_path / "two" / "checkpoint-2")})
    resumed.train()
    assert changed(models["model"], finished) == []
    keys = METRICS - {"eps"}
    rows = [[{key: row[key] for key in keys} for row in trainer.state.log_history] for trainer in (whole, resumed)]
    assert rows[0] == rows[1]
    make_trainer(settings | {"resume_from_checkpoint": True}).train()
    said = capsys.readouterr().err
    assert "finished: 4 of 4 updates; raise total_episodes to continue, or choose" in said
    # The models in memory are those that the run has trained: without `ref_model`, one of them would be the reference.
    assert re.search(r"\d weights of the model in memory .* are not those of .*load the model again", said)


def test_a_given_optimizer_trains_at_the_rates_of_its_scheduler(make_trainer, models):
    policy, critic = copies(models["model"]), copies(models["value_model"])
    weights = [list(models[name].parameters()) for name in ("model", "value_model")]
    groups = [{"params": weights[0], "lr": 0.0}, {"params": weights[1], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    trainer = make_trainer({"total_episodes": 12}, optimizers=(optimizer, scheduler))
    assert (trainer.optimizer, trainer.lr_scheduler) == (optimizer, scheduler)
    trainer.train()
    assert changed(models["model"], policy) == []
    assert len(changed(models["value_model"], critic)) > 15
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.125]  # of a fourth update


def test_a_given_optimizer_gets_the_scheduler_of_the_settings(make_trainer, models):
    weights = [*models["model"].parameters(), *models["value_model"].parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    trainer = make_trainer({"lr_scheduler_type": "cosine"}, optimizers=(optimizer, None))
    trainer.train()
    assert [row["lr"] for row in trainer.state.log_history] == pytest.approx([0.1, 0.05])
    with pytest.raises(ValueError, match="lacks 21 of 42 trained weights"):
        make_trainer(output(trainer), optimizers=(torch.optim.SGD(models["model"].parameters(), lr=0.1), None))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match="the scheduler belongs to another optimizer"):
        make_trainer(output(trainer), optimizers=(None, scheduler))


def output(trainer):
    """Another folder than the trainer's."""
    return {"output_dir": f"{trainer.args.output_dir}-2"}


def test_completions_are_printed_with_scores(make_trainer, capsys):
    trainer = make_trainer({"num_sample_generations": 1})
    trainer.train()
    during = capsys.readouterr().err
    assert during.count("model response") == 1
    assert during.count("Name") == 2
    trainer.generate_completions()
    assert capsys.readouterr().err.count("Name") == 5
    without = make_trainer(output(trainer), eval_dataset=None)
    without.generate_completions()
    assert "model response" not in capsys.readouterr().err


def test_data_may_be_in_the_format_of_torch_and_in_a_dict(make_trainer, prompts):
    parts = {"a": prompts.select(range(2)), "b": prompts.select(range(3))}
    trainer = make_trainer(train_dataset=prompts.with_format("torch"), eval_dataset=parts)
    assert [list(prompt.ids) for prompt in trainer.setup.prompts] == prompts["input_ids"][:]
    assert len(trainer.eval_prompts) == 5


def test_a_collator_may_change_rows(make_trainer, tokenizer):
    def first_two(rows):
        return tokenizer.pad([{"input_ids": row["input_ids"][:2]} for row in rows], return_tensors="pt")

    trainer = make_trainer(data_collator=first_two)
    assert {len(prompt.ids) for prompt in trainer.setup.prompts} == {2}
    assert trainer.get_train_dataloader().batch_size == 4
    assert next(iter(trainer.get_eval_dataloader()))["input_ids"].shape == (2, 2)


def test_padded_rows_lose_their_padding(make_trainer, tokenizer, prompts):
    ids = prompts["input_ids"][:3]
    padded = tokenizer.pad({"input_ids": ids}, padding="longest")
    assert padded["input_ids"][0][0] == tokenizer.pad_token_id
    for columns in (["input_ids"], ["input_ids", "attention_mask"]):
        data = Dataset.from_dict({name: padded[name] for name in columns})
        trainer = make_trainer(train_dataset=data, eval_dataset=data)
        assert [list(prompt.ids) for prompt in trainer.setup.prompts] == ids
        assert [list(prompt.ids) for prompt in trainer.eval_prompts] == ids


@pytest.mark.parametrize("penalty", [None, 1.5])
def test_scores_are_read_at_the_last_token_also_if_it_is_eos(make_trainer, models, tokenizer, penalty):
    models["reward_model"].config.pad_token_id = tokenizer.eos_token_id
    settings = {"stop_token": "eos", "missing_eos_penalty": penalty, "total_episodes": 4, "num_ppo_epochs": 1}
    trainer = make_trainer(settings)
    seen = {}
    end = tokenizer.eos_token_id
    written = Responses([[9, 10, end], [11, end], [12] * 6, [end]], [True, True, False, True])
    trainer.setup.sampler.sample = lambda *_: written
    trainer.hooks.after_update = lambda update, experience: seen.update(experience=experience)
    trainer.hooks.metrics_of_update = dict
    trainer.train()
    experience = seen["experience"]
    assert torch.equal(experience.scores, experience.signal.scores), "the console shows those that TRL logs"
    model, expected = models["reward_model"], []
    for prompt, response in zip(experience.rollout.prompts, experience.rollout.responses, strict=True):
        with torch.no_grad():
            states = model.model(input_ids=torch.tensor([[*prompt.ids, *response]])).last_hidden_state
            score = float(model.score(states[0, -1]))
        expected.append(score - (penalty or 0.0) * (tokenizer.eos_token_id not in response))
    assert experience.signal.scores.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("stop", [None, 9])
def test_padding_that_the_model_can_sample_ends_a_response_and_is_not_scored(make_trainer, models, tokenizer, stop):
    tokenizer.pad_token = tokenizer.eos_token
    settings = {"stop_token_id": stop, "per_device_train_batch_size": 32, "total_episodes": 32, "response_length": 40}
    trainer = make_trainer(settings | {"num_ppo_epochs": 1})
    trainer.train()
    experience, end, model = trainer.hooks.experience, tokenizer.eos_token_id, models["reward_model"]
    assert all(end not in response[:-1] for response in experience.rollout.responses)
    rows = zip(experience.rollout.prompts, experience.rollout.responses, experience.scores.tolist(), strict=True)
    ended = [row for row in rows if row[1][-1] == end and len(row[1]) > 1]
    assert ended
    for prompt, response, score in ended:
        with torch.no_grad():
            states = model.model(input_ids=torch.tensor([[*prompt.ids, *response[:-1]]])).last_hidden_state
        assert score == pytest.approx(float(model.score(states[0, -1])), abs=1e-5)


def test_a_reward_function_reads_the_decoded_texts(make_trainer, tmp_path):
    seen = []

    def length(prompts, responses):
        seen.extend(zip(prompts, responses, strict=True))
        return [float(len(response)) for response in responses]

    trainer = make_trainer({"total_episodes": 4}, reward_model=length)
    trainer.train()
    assert len(seen) == 4
    assert all(prompt[-1]["content"].startswith("Name") for prompt, _ in seen)
    score = sum(len(response) for _, response in seen) / 4
    assert trainer.state.log_history[0]["objective/scores"] == pytest.approx(score)
    assert trainer.core_config.reward_functions == ["length"]


def test_trackers_get_the_names_of_trl(make_trainer, tmp_path):
    make_trainer({"report_to": "tensorboard", "total_episodes": 4}).train()
    (file,) = (tmp_path / "out").rglob("events.out.tfevents*")
    events = EventAccumulator(str(file)).Reload()
    assert {"train/objective/kl", "train/policy/approxkl_avg", "train/val/ratio_var", "train/eps"} <= set(
        events.Tags()["scalars"]
    )


def test_a_prompt_beyond_the_context_is_answered_with_settings_of_trl(make_trainer, models, prompts):
    models["value_model"].config.max_position_embeddings = 16
    with pytest.raises(ValueError, match=r"longest prompt has \d+ tokens, .* `value_model` reads 16; shorten or remove"):
        make_trainer()


def test_names_of_adapters_without_effect_are_refused(make_trainer, models):
    new = {"ref_model": None, "peft_config": LoraConfig(r=4, task_type="CAUSAL_LM")}
    for name in ("model_adapter_name", "ref_adapter_name"):
        for arguments in ({"ref_model": None}, new):
            with pytest.raises(ValueError, match=f"`{name}` is 'first', but `model` is no `PeftModel`"):
                make_trainer({name: "first"}, **arguments)
    policy = get_peft_model(models["model"], LoraConfig(r=4, task_type="CAUSAL_LM"), "first")
    with pytest.raises(ValueError, match="`ref_adapter_name` and `ref_model` both name a reference"):
        make_trainer({"ref_adapter_name": "first"}, model=policy)
    for name in ("model_adapter_name", "ref_adapter_name"):
        with pytest.raises(ValueError, match=f"`{name}` is 'frist', but `model` has the adapters first"):
            make_trainer({name: "frist"}, model=policy, ref_model=None)


def test_a_setting_without_effect_is_named_once_and_a_second_run_is_refused(make_trainer, capsys):
    trainer = make_trainer({"total_episodes": 4, "max_steps": 7})
    assert capsys.readouterr().err.count("max_steps is 7 and has no effect: set total_episodes") == 1
    trainer.train()
    with pytest.raises(UserError, match="this trainer has trained; make a new one"):
        trainer.train()
    with pytest.raises(UserError, match="already holds a run; set resume"):
        make_trainer()


def test_a_trainer_that_was_stopped_cannot_begin_again(make_trainer):
    """Its updates would begin at 1, with trained weights, and its schedule of learning rates go on to 0."""
    trainer = make_trainer({"total_episodes": 16}, callbacks=[Events(last=2)])
    trainer.train()
    with pytest.raises(UserError, match="make a new one, with resume_from_checkpoint to continue the run"):
        trainer.train()


def test_the_reference_context_switches_the_adapter_off(make_trainer, models, prompts):
    config = LoraConfig(r=4, task_type="CAUSAL_LM")
    trainer = make_trainer({"learning_rate": 1e-2}, ref_model=None, peft_config=config)
    ids = torch.tensor([prompts[5]["input_ids"]])
    start = trainer.model.policy(input_ids=ids).logits.detach()
    trainer.train()
    with torch.no_grad():
        with trainer.null_ref_context():
            reference = trainer.model.policy(input_ids=ids).logits
        trained = trainer.model.policy(input_ids=ids).logits
    assert torch.allclose(reference, start, atol=1e-6)
    assert not torch.allclose(trained, start, atol=1e-3)


def test_the_active_adapter_of_a_peft_model_is_trained(make_trainer, models, prompts):
    torch.manual_seed(1)
    policy = get_peft_model(models["model"], LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False), "first")
    policy.add_adapter("second", LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False))
    before = copies(policy)
    names = {"model_adapter_name": "second", "ref_adapter_name": "first", "learning_rate": 1e-2, "total_episodes": 4}
    trainer = make_trainer(names, model=policy, ref_model=None)
    trainer.train()
    assert trainer.model.policy is policy
    kinds = {name.split(".")[-2] for name in changed(policy, before)}
    assert kinds == {"second"}
    assert trainer.state.log_history[0]["objective/kl"] != 0.0
    with pytest.raises(ValueError, match="leave `peft_config` out to train the adapter that is there"):
        make_trainer(output(trainer), model=policy, ref_model=None, peft_config=LoraConfig(r=4))


def test_signature_has_the_arguments_of_trl():
    names = list(inspect.signature(PPOTrainer).parameters)
    first = ["args", "processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model"]
    assert names == [*first, "data_collator", "eval_dataset", "optimizers", "callbacks", "peft_config"]


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
