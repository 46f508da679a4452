"""Scripts for TRL 0.4 to 0.11, written again with tiny models; only their imports are changed."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.optim import Adam
from transformers import AutoTokenizer, GenerationConfig, TrainerState
from transformers.trainer_callback import CallbackHandler, TrainerControl

from align.core.errors import UserError
from align.model_registry.registry import resolve_model
from align.trl.config import InvalidArgumentError
from align.trl.legacy import (
    AdaptiveKLController,
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
)
from align.trl.legacy.core import LengthSampler, PPODecorators, logprobs_from_logits, respond_to_batch
from tests.launch.launcher import launch

TEXTS = ["This film was", "I really liked", "The worst plot", "A fine story of", "Never watch", "The actors are"]
SIZES = {"batch_size": 4, "mini_batch_size": 2, "ppo_epochs": 2}


@pytest.fixture(scope="session")
def gpt2():
    return str(resolve_model("tiny-gpt2"))


@pytest.fixture(scope="session")
def t5():
    return str(resolve_model("tiny-t5"))


@pytest.fixture
def collator():
    return lambda data: {key: [row[key] for row in data] for key in data[0]}


def tokenizer_of(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def queries_of(tokenizer, texts=TEXTS):
    rows = Dataset.from_dict({"review": texts}).map(
        lambda row: {"input_ids": tokenizer.encode(row["review"])[:8], "query": row["review"]}
    )
    rows.set_format(type="torch")
    return rows


def weights_of(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_the_sentiment_example(gpt2, collator, capsys):
    """examples/scripts/ppo.py and the notebook gpt2-sentiment of TRL 0.7: IMDB, GPT-2, a sentiment pipeline."""
    config = PPOConfig(model_name=gpt2, learning_rate=1e-3, log_with=None, seed=3, **SIZES)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
    ref_model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
    tokenizer = tokenizer_of(config.model_name)
    before, reference = weights_of(model), weights_of(ref_model)
    trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=queries_of(tokenizer), data_collator=collator)
    generation_kwargs = {
        **{"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True},
        "pad_token_id": tokenizer.eos_token_id,
        "max_new_tokens": 6,
    }
    for batch in trainer.dataloader:
        query_tensors = batch["input_ids"]
        response_tensors, ref_response_tensors = trainer.generate(
            query_tensors, return_prompt=False, generate_ref_response=True, **generation_kwargs
        )
        batch["response"] = tokenizer.batch_decode(response_tensors)
        batch["ref_response"] = tokenizer.batch_decode(ref_response_tensors)
        rewards = [torch.tensor(text.count("e") - 1.0) for text in batch["response"]]
        stats = trainer.step(query_tensors, response_tensors, rewards)
        trainer.log_stats(stats, batch, rewards, columns_to_log=["query", "response", "ref_response"])
    assert all(1 <= len(response) <= 6 for response in response_tensors)
    assert stats["ppo/mean_scores"] == pytest.approx(float(torch.stack(rewards).mean()))
    assert stats["objective/kl"] == pytest.approx(0.0, abs=1e-4)
    assert stats["ppo/learning_rate"] == 1e-3
    assert all(math.isfinite(value) for value in stats.values())
    assert {name for name, weight in weights_of(model).items() if not weight.equal(before[name])} > {"v_head.summary.weight"}
    assert all(weight.equal(reference[name]) for name, weight in weights_of(ref_model).items())
    assert trainer.kl_ctl.value < 0.2
    assert "warning" not in capsys.readouterr().err


def test_the_quick_start_and_a_saved_folder(gpt2, tmp_path):
    """The quick start of TRL's README."""
    model = AutoModelForCausalLMWithValueHead.from_pretrained(gpt2)
    model_ref = create_reference_model(model)
    tokenizer = tokenizer_of(gpt2)
    trainer = PPOTrainer(PPOConfig(batch_size=1, mini_batch_size=1), model, model_ref, tokenizer)
    query_tensor = tokenizer.encode("This morning I went to the ", return_tensors="pt")
    response_tensor = respond_to_batch(model, query_tensor, txt_len=5)
    stats = trainer.step([query_tensor[0]], [response_tensor[0]], [torch.tensor(1.0)])
    assert stats["ppo/std_scores"] == 0.0
    trainer.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "saved")
    assert all(weight.equal(weights_of(again)[name]) for name, weight in weights_of(model).items())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token_id == tokenizer.eos_token_id


def test_the_detoxification_example(gpt2, collator):
    """examples/research_projects/toxicity of TRL: shared layers, an optimizer of one's own, lengths that are drawn."""
    config = PPOConfig(model_name=gpt2, learning_rate=1e-3, batch_size=4, mini_batch_size=2, gradient_accumulation_steps=2)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(gpt2)
    ref_model = create_reference_model(model, num_shared_layers=1)
    optimizer = Adam(filter(lambda weight: weight.requires_grad, model.parameters()), lr=config.learning_rate)
    tokenizer = tokenizer_of(gpt2)
    before = weights_of(model)
    trainer = PPOTrainer(
        config,
        model,
        ref_model=ref_model,
        tokenizer=tokenizer,
        dataset=queries_of(tokenizer),
        data_collator=collator,
        optimizer=optimizer,
    )
    sampler = LengthSampler(3, 6)
    generation_kwargs = {"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True}
    batch = next(iter(trainer.dataloader))
    responses = []
    for query in batch["input_ids"]:
        length = sampler()
        generation_kwargs["max_new_tokens"] = length
        response = trainer.generate(query, pad_token_id=tokenizer.eos_token_id, **generation_kwargs)
        responses.append(response.squeeze()[-length:])
    trainer.step(batch["input_ids"], responses, [torch.tensor(float(len(response))) for response in responses])
    assert trainer.optimizer is optimizer
    changed = {name for name, weight in weights_of(model).items() if not weight.equal(before[name])}
    assert "pretrained_model.transformer.h.1.mlp.c_fc.weight" in changed
    assert not any(".h.0." in name or ".wte." in name or ".wpe." in name for name in changed)


def test_the_t5_lab_of_summarization_with_an_adapter(t5, collator, tmp_path):
    """Lab 3 of the course Generative AI with LLMs: dialogue summaries of FLAN-T5 with LoRA, detoxified by PPO."""
    torch.manual_seed(0)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
    model = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(t5, peft_config=lora, dtype=torch.float32, is_trainable=True)
    tokenizer = tokenizer_of(t5)
    config = PPOConfig(model_name=t5, learning_rate=1e-2, ppo_epochs=1, mini_batch_size=2, batch_size=4)
    before = weights_of(model)
    trainer = PPOTrainer(
        config=config,
        model=model,
        ref_model=None,
        tokenizer=tokenizer,
        dataset=queries_of(tokenizer),
        data_collator=collator,
    )
    generation_kwargs = {"min_length": 5, "top_k": 0.0, "top_p": 1.0, "do_sample": True}
    sampler = LengthSampler(4, 8)
    kls = []
    for _ in range(2):
        batch = next(iter(trainer.dataloader))
        summaries = []
        for prompt in batch["input_ids"]:
            generation_kwargs["max_new_tokens"] = sampler()
            summaries.append(trainer.generate(prompt, **generation_kwargs).squeeze())
        rewards = [torch.tensor(float(len(summary))) for summary in summaries]
        stats = trainer.step(batch["input_ids"], summaries, rewards)
        trainer.log_stats(stats, batch | {"response": tokenizer.batch_decode(summaries)}, rewards)
        kls.append(stats["objective/kl"])
    assert kls[0] == pytest.approx(0.0, abs=1e-5)
    assert abs(kls[1]) > 1e-4
    changed = {name for name, weight in weights_of(model).items() if not weight.equal(before[name])}
    assert all("lora_" in name or name.startswith("v_head") for name in changed)
    assert any("lora_B" in name for name in changed)
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()


def test_a_t5_is_trained_whole_and_its_start_token_is_no_part_of_the_response(t5):
    model = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(t5, dtype=torch.float32)
    tokenizer = tokenizer_of(t5)
    trainer = PPOTrainer(PPOConfig(batch_size=2, mini_batch_size=1, learning_rate=1e-3), model, None, tokenizer)
    queries = [torch.tensor(tokenizer(text).input_ids) for text in TEXTS[:2]]
    responses = trainer.generate(queries, max_new_tokens=4, do_sample=True)
    assert all(response[0] == model.config.decoder_start_token_id for response in responses)
    stats = trainer.step(queries, responses, [torch.tensor(1.0), torch.tensor(0.0)])
    with torch.no_grad():
        start = torch.tensor([[model.config.decoder_start_token_id]])
        reference = trainer.ref_model.pretrained_model
        total = 0.0
        for query, response in zip(queries, responses, strict=True):
            assert response[0] == start
            logits = reference(input_ids=query[None], decoder_input_ids=response[None, :-1]).logits
            total -= float(logprobs_from_logits(logits, response[None, 1:]).sum())
    assert stats["objective/entropy"] == pytest.approx(total / 2, abs=1e-3)
    assert stats["tokens/responses_len_mean"] == np.mean([len(response) for response in responses])


class FactoryTrainer(PPOTrainer):
    """LLaMA-Factory 0.9: src/llamafactory/train/ppo/trainer.py, without the parts of other libraries."""

    def __init__(self, generating, reward_model, model, ref_model, tokenizer, dataset, data_collator):
        config = PPOConfig(
            model_name="policy",
            learning_rate=1e-3,
            mini_batch_size=1,
            batch_size=4,
            gradient_accumulation_steps=2,
            ppo_epochs=2,
            max_grad_norm=1.0,
            seed=42,
            optimize_device_cache=True,
            target=6.0,
            use_score_scaling=True,
            use_score_norm=True,
            whiten_rewards=True,
            accelerator_kwargs={"step_scheduler_with_optimizer": False},
            log_with=None,
            project_kwargs={"logging_dir": None},
        )
        optimizer = Adam([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2)
        PPOTrainer.__init__(
            self,
            config=config,
            model=model,
            ref_model=ref_model,
            tokenizer=tokenizer,
            dataset=dataset,
            optimizer=optimizer,
            data_collator=data_collator,
            lr_scheduler=scheduler,
        )
        self.reward_model = reward_model
        self.current_device = torch.device("cpu")
        self.generation_config = GenerationConfig(
            pad_token_id=tokenizer.pad_token_id, eos_token_id=[tokenizer.eos_token_id], **generating
        )
        self.state, self.control = TrainerState(), TrainerControl()
        unwrapped = self.accelerator.unwrap_model(self.model)
        self.callback_handler = CallbackHandler([], unwrapped, self.tokenizer, self.optimizer, self.lr_scheduler)

    def ppo_train(self, steps):
        losses, rates = [], []
        dataiter = iter(self.dataloader)
        for _ in range(steps):
            try:
                batch = next(dataiter)
            except StopIteration:
                dataiter = iter(self.dataloader)
                batch = next(dataiter)
            self.model.eval()
            self.tokenizer.padding_side = "right"
            queries, responses, rewards = [], [], []
            for index in range(0, self.config.batch_size, self.config.mini_batch_size):
                part = {key: value[index : index + self.config.mini_batch_size] for key, value in batch.items()}
                new_queries, new_responses = self.get_inputs(part)
                queries += new_queries
                responses += new_responses
                rewards += self.get_rewards(new_queries, new_responses)
            self.model.train()
            stats = self.step(queries, responses, rewards)
            self.tokenizer.padding_side = "left"
            losses.append(float(stats["ppo/loss/total"]))
            rates.append(stats["ppo/learning_rate"])
        return losses, rates

    @torch.no_grad()
    def get_inputs(self, batch):
        start = int((batch["input_ids"][0] != self.tokenizer.pad_token_id).nonzero()[0])
        batch = {key: value[:, start:] for key, value in batch.items()}
        unwrapped = self.accelerator.unwrap_model(self.model)
        output = unwrapped.generate(generation_config=self.generation_config, **batch)
        query, response = batch["input_ids"], output[:, batch["input_ids"].size(-1) :]
        return list(query), [row[: max(1, int((row != self.tokenizer.pad_token_id).sum()))] for row in response]

    @torch.no_grad()
    def get_rewards(self, queries, responses):
        batch = self.prepare_model_inputs(queries, responses)
        values = self.reward_model(**batch, return_dict=True, use_cache=False)[-1]
        rewards = values.gather(dim=-1, index=(batch["attention_mask"].sum(dim=-1, keepdim=True) - 1))
        return list(rewards.float().detach())

    @PPODecorators.empty_device_cache()
    def batched_forward_pass(self, model, queries, responses, model_inputs, return_logits=False, response_masks=None):
        raise NotImplementedError


def test_the_ppo_of_llama_factory(gpt2, capsys):
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(gpt2, peft_config=lora)
    reward_model = AutoModelForCausalLMWithValueHead.from_pretrained(gpt2)
    tokenizer = AutoTokenizer.from_pretrained(gpt2, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token

    def padded(rows):
        return dict(tokenizer.pad([{"input_ids": row["input_ids"]} for row in rows], return_tensors="pt"))

    generating = {"do_sample": True, "max_new_tokens": 4, "top_p": 0.7, "temperature": 0.95}
    before = weights_of(model)
    trainer = FactoryTrainer(generating, reward_model, model, None, tokenizer, queries_of(tokenizer), padded)
    assert "FactoryTrainer.batched_forward_pass is never called" in capsys.readouterr().err
    losses, rates = trainer.ppo_train(2)
    assert all(map(math.isfinite, losses))
    assert rates == pytest.approx([1e-3, 5.5e-4])
    changed = {name for name, weight in weights_of(model).items() if not weight.equal(before[name])}
    assert {"v_head.summary.weight"} < changed
    assert all("lora_" in name or name.startswith("v_head") for name in changed)


@pytest.fixture
def make(gpt2):
    def make(settings=None, trainer=PPOTrainer, **arguments):
        torch.manual_seed(0)
        model = AutoModelForCausalLMWithValueHead.from_pretrained(gpt2, dtype=torch.float32)
        config = PPOConfig(**SIZES | (settings or {}))
        return trainer(**{"config": config, "model": model, "ref_model": None, "tokenizer": tokenizer_of(gpt2)} | arguments)

    return make


QUERIES = [torch.tensor(row) for row in ([5, 6, 7], [8, 9], [10, 11, 12, 13], [14])]
RESPONSES = [torch.tensor(row) for row in ([20, 21], [22, 23, 24], [25], [26, 27, 28, 29])]
SCORES = [torch.tensor(value) for value in (1.0, -1.0, 0.5, 2.0)]


def test_masked_tokens_are_not_trained(make):
    """A token that the policy did not write changes neither losses nor KL, whatever its log-prob is."""
    masks = [torch.ones_like(response) for response in RESPONSES]
    masks[3] = torch.tensor([1, 0, 0, 1])
    full, masked = make(), make()
    stats = full.step(QUERIES, RESPONSES, SCORES)
    with_mask = masked.step(QUERIES, RESPONSES, SCORES, response_masks=masks)
    skipped = masked.ref_model.pretrained_model(torch.tensor([[14, 26, 27, 28]])).logits.log_softmax(-1)[0]
    missing = float(skipped[1, 27] + skipped[2, 28])
    assert with_mask["objective/entropy"] - stats["objective/entropy"] == pytest.approx(missing / 4, abs=1e-4)


def test_results_do_not_depend_on_the_size_of_forward_passes(make):
    one, many = make({"mini_batch_size": 4}), make({"mini_batch_size": 1, "gradient_accumulation_steps": 4})
    expected, found = (trainer.step(QUERIES, RESPONSES, SCORES) for trainer in (one, many))
    expected, found = ({k: v for k, v in stats.items() if not k.startswith("time/")} for stats in (expected, found))
    assert found == pytest.approx(expected, abs=1e-5)


def test_generated_batches_are_those_of_single_queries(make):
    trainer = make()
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    together = trainer.generate(QUERIES, batch_size=3, return_prompt=False, remove_padding=False, **settings)
    for query, response in zip(QUERIES, together, strict=True):
        alone = trainer.generate(query, **settings)
        assert alone.shape[0] == 1
        assert alone[0, : len(query)].equal(query)
        assert response[: alone.shape[1] - len(query)].equal(alone[0, len(query) :])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((QUERIES[:2], RESPONSES, SCORES), ("queries", "4")),
        ((QUERIES, torch.ones(4, 2), SCORES), ("responses",)),
        ((QUERIES, RESPONSES, [1.0, 2.0, 3.0, 4.0]), ("scores", "float")),
        ((QUERIES, RESPONSES, [torch.ones(2)] * 4), ("cores", "[2]")),
        ((QUERIES, [*RESPONSES[:3], torch.tensor([], dtype=torch.long)], SCORES), ("responses", "3")),
        ((QUERIES, [*RESPONSES[:3], torch.tensor([10**6])], SCORES), ("row 3", "1000000")),
        ((QUERIES, RESPONSES, SCORES, [torch.ones(1)] * 4), ("response_masks",)),
    ],
)
def test_wrong_arguments_of_a_step_are_named_and_change_nothing(make, arguments, named):
    trainer = make()
    before = weights_of(trainer.model)
    with pytest.raises(InvalidArgumentError) as caught:
        trainer.step(*arguments)
    assert all(name in str(caught.value) for name in named)
    assert all(weight.equal(before[name]) for name, weight in weights_of(trainer.model).items())


def test_a_score_that_is_not_a_number_changes_nothing(make):
    trainer = make()
    before = weights_of(trainer.model)
    with pytest.raises(UserError, match="scores: row 2"):
        trainer.step(QUERIES, RESPONSES, [*SCORES[:2], torch.tensor(math.nan), SCORES[3]])
    assert all(weight.equal(before[name]) for name, weight in weights_of(trainer.model).items())


def test_wrong_objects_are_named(make, gpt2):
    plain = AutoModelForCausalLMWithValueHead.from_pretrained(gpt2).pretrained_model
    rows = Dataset.from_dict({"input_ids": [[1]]})
    for arguments, name in (
        ({"config": None}, "config"),
        ({"model": plain}, "model"),
        ({"ref_model": plain}, "ref_model"),
        ({"tokenizer": None}, "tokenizer"),
        ({"dataset": rows}, "dataset"),
        ({"dataset": rows.to_iterable_dataset()}, "dataset"),
        ({"num_shared_layers": 99}, "num_shared_layers"),
        ({"processing_class": None, "train_dataset": rows}, "align.trl.PPOTrainer"),
    ):
        with pytest.raises(ValueError, match=name):
            make(**arguments)
    with pytest.raises(InvalidArgumentError, match="batch_size"):
        PPOConfig(batch_size=4, mini_batch_size=3)
    with pytest.raises(InvalidArgumentError, match="`num_ppo_epochs`: ppo_epochs"):
        PPOConfig(num_ppo_epochs=4)


def test_a_subclass_that_changes_the_algorithm_is_refused(make):
    class Own(PPOTrainer):
        def compute_rewards(self, *given):
            raise NotImplementedError

    with pytest.raises(InvalidArgumentError, match=r"Own\.compute_rewards"):
        make(trainer=Own)


def test_the_adaptive_coefficient_follows_the_target():
    control = AdaptiveKLController(0.2, target=6.0, horizon=100)
    control.update(12.0, 10)
    assert control.value == pytest.approx(0.2 * (1 + 0.2 * 10 / 100))
    control.update(5.4, 10)
    assert control.value == pytest.approx(0.2 * 1.02 * (1 - 0.1 * 10 / 100))


@pytest.mark.slow
def test_several_processes_reach_the_numbers_of_one(gpt2, tmp_path):
    script = str(Path(__file__).with_name("legacy_script.py"))
    found = []
    for settings, processes in (("one-process", 1), ("cpu2", 2), ("zero2", 2), ("zero3", 2)):
        folder = tmp_path / settings
        folder.mkdir()
        launch([script, gpt2, str(folder), str(4 // processes)], settings, processes)
        model = AutoModelForCausalLMWithValueHead.from_pretrained(folder / "model", dtype=torch.float32)
        found.append((json.loads((folder / "stats.json").read_text()), weights_of(model)))
    (expected, weights), *others = found
    for stats, trained in others:
        assert stats == [pytest.approx(row, abs=1e-4) for row in expected]
        assert all(torch.allclose(weight, trained[name], atol=1e-4) for name, weight in weights.items())
