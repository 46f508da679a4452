"""The helpers of TRL's module `ppo_trainer`: numbers by hand, and generation like `generate` on each batch."""

import pytest
import torch
from transformers import GenerationConfig

from align.core.errors import UserError
from align.trl import PPOTrainer, ppo_trainer
from align.trl.ppo_trainer import (
    batch_generation,
    exact_div,
    forward,
    generate,
    masked_mean,
    masked_var,
    masked_whiten,
    truncate_response,
)

VALUES, MASK = torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])


def test_only_values_inside_the_mask_count():
    assert masked_mean(VALUES, MASK) == 3
    assert masked_mean(VALUES.view(2, 2), MASK.view(2, 2), axis=1).tolist() == [2, 4]
    assert masked_var(VALUES, MASK) == 2  # ((2 - 3)^2 + (4 - 3)^2) / 1
    assert masked_var(VALUES, MASK, unbiased=False) == 1
    assert masked_whiten(VALUES, MASK)[1:3].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert masked_whiten(VALUES, MASK, shift_mean=False)[1:3].tolist() == pytest.approx([3 - 0.5**0.5, 3 + 0.5**0.5])
    with pytest.raises(ValueError, match="the mask leaves no value"):
        masked_var(VALUES, torch.zeros(4))


@pytest.mark.parametrize("size", [1, 3])
def test_batches_are_generated_as_each_row_alone(models, tokenizer, size):
    policy = models["model"].eval()
    prompts = ["Hi", "Name a color.", "Go"]
    queries = tokenizer(prompts, padding=True, return_tensors="pt").input_ids
    config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=tokenizer.pad_token_id)
    ids, logits = batch_generation(policy, queries, size, tokenizer.pad_token_id, config)
    assert ids.shape == (3, queries.shape[1] + 5)
    assert logits.shape == (3, 5, policy.config.vocab_size)
    assert torch.equal(ids[:, : queries.shape[1]], queries)
    assert torch.equal(generate(policy, queries, tokenizer.pad_token_id, config)[0], ids)
    for row, prompt in enumerate(prompts):
        alone = tokenizer(prompt, return_tensors="pt").input_ids
        expected = policy.generate(alone, generation_config=config)[0, alone.shape[1] :]
        assert torch.equal(ids[row, queries.shape[1] :], expected)
        assert torch.equal(logits[row].argmax(-1), expected)


def test_a_response_ends_at_its_first_stop_token():
    responses = torch.tensor([[5, 1, 6, 1], [5, 6, 7, 8], [1, 5, 5, 5]])
    assert truncate_response(1, 0, responses).tolist() == [[5, 1, 0, 0], [5, 6, 7, 8], [1, 0, 0, 0]]


def test_padding_on_the_left_does_not_change_logits(models):
    model = models["model"].eval()
    ids = torch.tensor([[0, 0, 7, 8, 9]])
    padded = forward(model, ids, 0)
    alone = model(input_ids=ids[:, 2:])
    torch.testing.assert_close(padded.logits[:, 2:], alone.logits)
    assert len(padded.hidden_states) == model.config.num_hidden_layers + 1


def test_a_remainder_is_refused():
    assert exact_div(8, 4) == 2
    with pytest.raises(ValueError, match="size, inexact division: 8 / 3"):
        exact_div(8, 3, "size")


@pytest.mark.parametrize("name", ["get_reward", "generate", "batch_generation", "no_such_name"])
def test_a_name_that_the_trainer_does_not_call_cannot_be_replaced(name):
    before = getattr(ppo_trainer, name, None)
    with pytest.raises(UserError, match=f"ppo_trainer.{name}: .*reward function"):
        setattr(ppo_trainer, name, lambda *_: None)
    assert getattr(ppo_trainer, name, None) is before


def test_a_missing_name_of_trls_module_comes_with_advice():
    with pytest.raises(AttributeError, match="'get_scores'; give the trainer a reward function"):
        _ = ppo_trainer.get_scores


def test_a_subclass_with_a_training_loop_of_its_own_is_refused_before_training(make_trainer):
    class Copied(PPOTrainer):
        def train(self):
            self.control = None

    class Wrapped(PPOTrainer):
        def train(self):
            return super().train()

    with pytest.raises(UserError, match=r"Copied.train replaces .* call super\(\).train\(\), or .* extension"):
        make_trainer(trainer=Copied)
    make_trainer(trainer=Wrapped)
