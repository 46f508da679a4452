"""An optimizer and a scheduler in memory: the same steps as the engine's own, resumed where they stopped."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from align.core.errors import UserError
from align.ppo import PPOTrainer
from tests.files import metrics_of
from tests.ppo.rewards import long

UPDATES = 4


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@pytest.fixture
def models(sharp_folders):
    """A policy and a value model, the same each time."""

    def made():
        folder = sharp_folders["tiny-llama"]
        torch.manual_seed(3)
        value_model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), value_model

    return made


@pytest.fixture
def trainer(sharp_folders, make_config):
    def made(policy, value_model=None, folder="run", callbacks=(), settings=(), **given):
        short = {"total_updates": UPDATES, "learning_rate": 1e-3, "max_new_tokens": 5, "num_ppo_epochs": 1}
        config = make_config(folder, **(short | dict(settings)))
        tokenizer = AutoTokenizer.from_pretrained(sharp_folders["tiny-llama"])
        more = {"tokenizer": tokenizer, "value_model": value_model, "callbacks": callbacks}
        return PPOTrainer(policy, [long], ["red", "green, blue"], config, **more, **given)

    return made


def adamw(*models, lr=1e-3, betas=(0.9, 0.999)):
    weights = [weight for model in models for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(weights, lr=lr, betas=betas, eps=1e-5, weight_decay=0.0)


def linear(optimizer):
    """One step in each update: from the peak down to 0, as the engine's linear schedule."""
    return LambdaLR(optimizer, lambda step: 1 - step / UPDATES)


def rates(trainer):
    return [row["learning_rate"] for row in metrics_of(trainer.run.folder)]


def assert_same(models, others):
    for mine, theirs in zip(models, others, strict=True):
        for (name, weight), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(weight, other, atol=1e-7, rtol=1e-5, msg=name)


def test_the_steps_are_those_of_the_engines_own_optimizer(trainer, models):
    own = models()
    by_settings = trainer(*own, folder="own")
    by_settings.train()
    given, start = models(), models()
    optimizer = adamw(*given)
    made = trainer(*given, folder="given", optimizers=(optimizer, linear(optimizer)))
    made.train()
    assert rates(made) == pytest.approx(rates(by_settings))
    assert_same(given, own)
    assert any(not torch.equal(*pair) for pair in zip(given[0].parameters(), start[0].parameters(), strict=True))


def test_a_resumed_run_continues_with_the_state_of_both(trainer, models):
    whole, again = models(), models()
    optimizer = adamw(*whole)
    trainer(*whole, folder="whole", optimizers=(optimizer, linear(optimizer))).train()
    for stop in (2, UPDATES):
        again = copy.deepcopy(models())
        optimizer = adamw(*again)
        settings = {"save_steps": 1, "resume_from_checkpoint": stop == UPDATES}
        optimizers, stops = (optimizer, linear(optimizer)), [StopAt(stop)]
        made = trainer(*again, folder="again", callbacks=stops, settings=settings, optimizers=optimizers)
        made.train()
    assert rates(made) == pytest.approx([1e-3 * (1 - step / UPDATES) for step in range(UPDATES)])
    assert_same(again, whole)


def test_an_optimizer_alone_keeps_its_rates(trainer, models):
    policy, value_model = models()
    optimizer = torch.optim.SGD([{"params": policy.parameters()}, {"params": value_model.parameters(), "lr": 0.2}], lr=0.1)
    made = trainer(policy, value_model, optimizers=(optimizer, None))
    made.train()
    assert rates(made) == [0.1] * UPDATES
    assert optimizer.param_groups[1]["lr"] == 0.2


def test_an_adapter_of_a_peft_model_with_its_optimizer(trainer, models):
    policy, value_model = models()
    policy = get_peft_model(policy, LoraConfig(r=2))
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    trainer(policy, value_model, optimizers=(adamw(policy, value_model), None)).train()
    moved = {name for name, weight in policy.named_parameters() if name in before and not torch.equal(weight, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_optimizers_that_cannot_train_the_run_are_refused(trainer, models):
    policy, value_model = models()
    optimizer = adamw(policy, value_model)
    with pytest.raises(UserError, match=r"the optimizer lacks 2 of .*'value_head\.linear\.bias'"):
        trainer(policy, settings={"value_fit": "none"}, optimizers=(optimizer, None))
    with pytest.raises(UserError, match="a scheduler needs its optimizer"):
        trainer(policy, value_model, optimizers=(None, linear(optimizer)))
    with pytest.raises(UserError, match="the scheduler belongs to another optimizer"):
        trainer(policy, value_model, optimizers=(adamw(policy), linear(optimizer)))
    with pytest.raises(UserError, match="ReduceLROnPlateau needs a metric"):
        trainer(policy, value_model, optimizers=(optimizer, ReduceLROnPlateau(optimizer)))
    with pytest.raises(UserError, match=r"^critic_warmup: "):
        trainer(policy, value_model, settings={"critic_warmup": 1}, optimizers=(optimizer, None))
