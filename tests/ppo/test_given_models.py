import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer

import align.trl
from align.core.errors import UserError
from align.ppo import PPOTrainer
from align.ppo.rollout import forward_all_roles, sample_rollout
from align.reward.checkpoint import reward_of_classifier
from tests.ppo.rewards import long

PROMPTS = ["red", "green, blue", "one"]
TEMPERATURE = 0.7


@pytest.fixture
def language_model(sharp_folders):
    """`language_model("tiny-gpt2")`: the sharpened model as transformers loads it; with a seed, its weights are moved."""

    def made(name, seed=None):
        auto = AutoModelForSeq2SeqLM if name == "tiny-t5" else AutoModelForCausalLM
        model = auto.from_pretrained(sharp_folders[name], dtype=torch.float32).eval()
        return model if seed is None else moved(model, seed)

    return made


@pytest.fixture
def classifier(sharp_folders):
    """A sharpened classifier as transformers makes one of a language model."""

    def made(name, seed=1, **settings):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(sharp_folders[name], num_labels=1, **settings)
        model.config.pad_token_id = None  # one row at a time: the last token is read
        return model.eval()

    return made


def moved(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return model


@pytest.fixture
def trainer(sharp_folders, make_config):
    def made(policy, reward=(long,), name="tiny-gpt2", config=(), **given):
        settings = {"rollout_batch_size": 3, "max_new_tokens": 5, "temperature": TEMPERATURE, "learning_rate": 1e-2}
        tokenizer = AutoTokenizer.from_pretrained(sharp_folders[name])
        return PPOTrainer(policy, reward, PROMPTS, make_config(**(settings | dict(config))), tokenizer=tokenizer, **given)

    return made


def rollout_of(setup):
    return sample_rollout(setup.sampler, setup.policy.tokenization, setup.prompts, setup.sampling, (3, 1))


def rows_of(setup):
    """Each prompt and a response to it, as ids, with the outputs of policy, reference and critic."""
    rollout = rollout_of(setup)
    how = (setup.policy.backbone, TEMPERATURE, 4096, setup.run.accelerator)
    old = forward_all_roles(setup.roles, rollout, [list(range(len(rollout)))], *how)
    outputs = zip(old.log_probs, old.ref_log_probs, old.values, strict=True)
    for prompt, response, columns in zip(rollout.prompts, rollout.responses, outputs, strict=True):
        yield prompt.ids, response, *(column[: len(response)] for column in columns)


@torch.no_grad()
def log_probs(model, prompt, response):
    """Log-probs of a response's tokens by transformers alone."""
    if model.config.is_encoder_decoder:
        decoded = torch.tensor([[model.config.decoder_start_token_id, *response[:-1]]])
        logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoded).logits[0]
    else:
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)[range(len(response)), response]


@torch.no_grad()
def values(model, prompt, response):
    """The score of each state before a token of the response, by transformers alone."""
    states = getattr(model, model.base_model_prefix)(torch.tensor([prompt + response])).last_hidden_state[0]
    return model.score(states[len(prompt) - 1 : -1])[:, 0]


@pytest.mark.parametrize("lora_r", [0, 4])
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-t5"])
def test_a_given_reference_predicts_the_log_probs_of_the_kl_penalty(name, lora_r, trainer, language_model):
    reference = language_model(name, seed=2)
    expected = copy.deepcopy(reference)
    given = trainer(language_model(name), name=name, reference=reference, config={"lora_r": lora_r})
    for prompt, response, of_policy, of_reference, _ in rows_of(given.setup):
        assert torch.allclose(of_reference, log_probs(expected, prompt, response), atol=1e-4)
        assert (of_reference - of_policy).abs().max() > 1e-2
    given.train()
    assert all(torch.equal(*pair) for pair in zip(reference.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-t5"])
def test_a_classifier_without_a_tokenizer_reads_the_policys_ids(name, trainer, language_model, classifier):
    reward = classifier("tiny-llama")
    expected = copy.deepcopy(reward)
    setup = trainer(language_model(name), [reward], name).setup
    rollout = rollout_of(setup)
    scores = setup.rewards(rollout).total
    for score, prompt, response in zip(scores, rollout.prompts, rollout.responses, strict=True):
        with torch.no_grad():
            wanted = expected(torch.tensor([prompt.ids + response])).logits
        assert float(score) == pytest.approx(float(wanted), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("tiny-gpt2", {}), ("tiny-gpt2", {"lora_r": 4}), ("tiny-gpt2", {"gradient_checkpointing": True}), ("tiny-t5", {})],
)
def test_a_value_model_is_the_critic_and_is_trained_in_place(name, settings, trainer, language_model, classifier):
    policy, value_model = language_model(name), classifier("tiny-llama")
    before = copy.deepcopy(value_model)
    names = list(dict(value_model.named_parameters()))
    given = trainer(policy, name=name, value_model=value_model, config=settings)
    for prompt, response, *_, of_critic in rows_of(given.setup):
        assert torch.allclose(of_critic, values(before, prompt, response), atol=1e-4)
    given.train()
    assert list(dict(value_model.named_parameters())) == names
    for (key, weight), earlier in zip(value_model.named_parameters(), before.parameters(), strict=True):
        assert not torch.equal(weight, earlier), key


@pytest.mark.parametrize(("name", "kind"), [("tiny-gpt2", "CausalLM"), ("tiny-t5", "Seq2SeqLM")])
def test_a_language_model_with_a_value_head_is_the_critic(name, kind, trainer, language_model):
    value_model = getattr(align.trl, f"AutoModelFor{kind}WithValueHead")(language_model(name, seed=1)).eval()
    before = copy.deepcopy(value_model)
    given = trainer(language_model(name), name=name, value_model=value_model)
    for prompt, response, *_, of_critic in rows_of(given.setup):
        read = {"input_ids": torch.tensor([prompt + response[:-1]])}
        if name == "tiny-t5":
            started = [before.config.decoder_start_token_id, *response[:-1]]
            read = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": torch.tensor([started])}
        with torch.no_grad():
            expected = before(**read)[2]
        assert torch.allclose(of_critic, expected[0, -len(response) :], atol=1e-4)
    given.train()
    for (key, weight), earlier in zip(value_model.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(weight, earlier) == (key == "pretrained_model.lm_head.weight"), key  # listed unless it is tied


def test_models_of_two_number_formats_are_trained_together(trainer, language_model, classifier):
    policy, value_model = language_model("tiny-gpt2"), classifier("tiny-llama").to(torch.bfloat16)
    before = copy.deepcopy(value_model)
    trainer(policy, value_model=value_model, reference=language_model("tiny-gpt2").to(torch.bfloat16)).train()
    assert value_model.score.weight.dtype == torch.bfloat16
    assert not torch.equal(value_model.score.weight, before.score.weight)
    assert not torch.equal(value_model.model.layers[0].mlp.up_proj.weight, before.model.layers[0].mlp.up_proj.weight)


def test_objects_in_a_wrong_role_are_refused(trainer, language_model, classifier, sharp_folders):
    policy, model = language_model("tiny-gpt2"), classifier("tiny-llama")
    with pytest.raises(UserError, match="tokenizer: only a transformers model in memory takes one; leave it out"):
        trainer(sharp_folders["tiny-gpt2"])
    with pytest.raises(UserError, match="reference: it is the policy's own model"):
        trainer(policy, reference=policy)
    with pytest.raises(UserError, match="value_model: it is the reward model"):
        trainer(policy, [model], value_model=model)
    tokenizer = AutoTokenizer.from_pretrained(sharp_folders["tiny-llama"])
    loaded = reward_of_classifier(model, tokenizer)
    with pytest.raises(UserError, match="value_model: it is the reward model"):
        trainer(policy, [loaded], value_model=model)
    with pytest.raises(UserError, match="value_model: it is the reward model"):
        trainer(policy, value_model=model, selection_reward_model=loaded)
    with pytest.raises(UserError, match="value_model: this estimator of advantages has no critic"):
        trainer(policy, value_model=model, config={"advantage_estimator": "reinforce++"})
    with pytest.raises(UserError, match="value_model: GPT2LMHeadModel is neither a sequence classifier"):
        trainer(policy, value_model=language_model("tiny-gpt2", seed=1))
    with pytest.raises(UserError, match=r"reference: the model is in float64; convert it"):
        trainer(policy, reference=language_model("tiny-gpt2").double())
    with pytest.raises(UserError, match=r"value_model: all its weights are frozen; call requires_grad_\(True\) on it"):
        trainer(policy, value_model=classifier("tiny-llama").requires_grad_(False))
    with pytest.raises(UserError, match="reward: None is no reward model, nor a function"):
        trainer(policy, [None])
    adapted = get_peft_model(model, LoraConfig(r=2, task_type="SEQ_CLS"))
    with pytest.raises(UserError, match=r"reward: PeftModelForSeq.* merge its adapter first, by merge_and_unload"):
        trainer(policy, [adapted])
    with pytest.raises(UserError, match="PeftModelForSequenceClassification has an adapter: merge it by merge_and_unload"):
        reward_of_classifier(adapted, tokenizer)
    with pytest.raises(UserError, match="reward: Linear is a model, but no transformers classifier"):
        trainer(policy, [torch.nn.Linear(2, 1)])
    short_context = AutoModelForCausalLM.from_pretrained(
        sharp_folders["tiny-gpt2"], n_positions=32, ignore_mismatched_sizes=True
    )
    with pytest.raises(UserError, match=r"reference: .* do not fit the model's context of 32"):
        trainer(policy, reference=short_context, config={"max_new_tokens": 30})


@pytest.mark.parametrize("lora_r", [0, 2])
def test_a_model_that_shares_weights_with_a_trained_one_is_refused(lora_r, trainer, language_model, classifier):
    config = {"lora_r": lora_r}
    for role in ("reward", "value_model", "reference", "selection_reward_model"):
        policy = language_model("tiny-llama")
        given = language_model("tiny-llama") if role == "reference" else classifier("tiny-llama")
        given.model.layers[0] = policy.model.layers[0]
        name = "reward" if role == "selection_reward_model" else role
        with pytest.raises(UserError, match=f"{name}: it is the policy's own model, or shares weights with it, which"):
            trainer(policy, name="tiny-llama", config=config, **{role: [given] if role == "reward" else given})
    reference, value_model = language_model("tiny-llama"), classifier("tiny-llama")
    value_model.load_state_dict(reference.state_dict(), assign=True, strict=False)  # other parameters, the same memory
    with pytest.raises(UserError, match="value_model: it is the reference, or shares weights with it"):
        trainer(language_model("tiny-llama"), name="tiny-llama", reference=reference, value_model=value_model, config=config)


def test_frozen_models_that_share_weights_score_together(trainer, language_model, classifier):
    reward, reference = classifier("tiny-llama"), language_model("tiny-llama")
    reward.model = reference.model
    trainer(language_model("tiny-llama"), [reward, reward], "tiny-llama", reference=reference).train()


def test_a_model_with_fewer_embedding_rows_than_the_policy_is_refused(trainer, language_model, classifier):
    for role, model in (("reference", language_model("tiny-gpt2")), ("value_model", classifier("tiny-gpt2"))):
        rows = model.get_input_embeddings().num_embeddings
        policy = language_model("tiny-gpt2")
        policy.resize_token_embeddings(rows + 8)
        line = rf"{role}: its embedding matrix has {rows} rows, but the policy can sample any id below {rows + 8}; call"
        with pytest.raises(UserError, match=line):
            trainer(policy, **{role: model})
