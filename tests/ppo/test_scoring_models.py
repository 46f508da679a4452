import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from align.commands import sample as command
from align.commands.sample import SampleConfig, sample_rows
from align.core.errors import UserError
from align.models.backbone.kinds import use_block_attention
from align.models.heads import RewardModel, ScalarHead
from align.models.loading import load_tokenization
from align.ppo import PPOTrainer
from align.ppo.actor_critic import build_actor_critic, copy_backbone
from align.ppo.records import Rollout
from align.ppo.scoring_models import load_source
from align.reward.checkpoint import LoadedReward, load_reward_model, reward_of_classifier
from align.reward.scoring import RewardModelScorer
from align.sampling.generation import Responses
from align.tokenization import Tokenization
from align.tokenization.encoded import SampledResponse
from tests.badly_behaved.specimens import CHATML

ASKED = ({"role": "user", "content": "Name a moon."},)


@pytest.fixture
def classifier(sharp_folders, tmp_path):
    """`classifier(template=None, added=["zz"])`: a folder as another library leaves it, and the model in it."""

    def made(template=None, added=(), **settings):
        torch.manual_seed(5)
        folder = tmp_path / "classifier"
        model = AutoModelForSequenceClassification.from_pretrained(sharp_folders["tiny-llama"], num_labels=1, **settings)
        tokenizer = AutoTokenizer.from_pretrained(sharp_folders["tiny-llama"])
        tokenizer.chat_template = template
        tokenizer.add_tokens(list(added))
        if added:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        model.config.pad_token_id = None  # one row at a time: the last token is read
        return str(folder), tokenizer, model

    return made


@pytest.fixture
def trainer(sharp_folders, make_config):
    """A trainer of the sharpened tiny-llama, or of a given policy."""

    def made(reward, prompts=("Hi",), policy=None, given=(), **settings):
        config = make_config(**({"max_new_tokens": 4} | settings))
        return PPOTrainer(policy or sharp_folders["tiny-llama"], reward, list(prompts), config, **dict(given))

    return made


@torch.no_grad()
def logits(model, rows):
    return [float(model(input_ids=torch.tensor([ids])).logits) for ids in rows]


def scorer_in_ppo(folder, policy, chat_template):
    source = load_source(folder, policy, "float32", chat_template=chat_template)
    return source.scorer(policy, None, Accelerator(cpu=True), 4096)


@pytest.mark.parametrize("chat_template", ["raw", "plain", "auto"])
def test_a_classifier_without_a_template_reads_the_policys_ids_as_they_are(chat_template, classifier, load_sharp):
    """As TRL's PPO does: prompt and response end to end, up to the end token or where the response was cut off."""
    folder, _, model = classifier()
    policy = load_sharp("tiny-llama", chat_template=chat_template)
    prompt, encoding = policy.tokenization.prompt_ids(ASKED), policy.tokenization
    ids = [encoding.response_ids("Io."), encoding.response_ids("Europa")[:-1]]
    answers = [
        SampledResponse(ASKED, prompt, row, encoding.text(row), ended) for row, ended in zip(ids, (1, 0), strict=True)
    ]
    found = scorer_in_ppo(folder, policy, chat_template)(answers)
    assert found == pytest.approx(logits(model, [prompt + row for row in ids]), abs=1e-5)
    assert abs(found[0] - found[1]) > 0.01


def test_a_classifier_of_another_vocabulary_without_a_template_reads_by_the_policys_setting(classifier, load_sharp):
    folder, tokenizer, model = classifier(added=["moon"])
    policy = load_sharp("tiny-llama", chat_template="raw")
    answers = [SampledResponse(ASKED, [1], [2], "A moon.", ended) for ended in (True, False)]
    text = tokenizer("Name a moon.").input_ids + tokenizer("A moon.", add_special_tokens=False).input_ids
    assert tokenizer.convert_tokens_to_ids("moon") in text
    expected = logits(model, [[*text, tokenizer.eos_token_id], text])
    assert scorer_in_ppo(folder, policy, "raw")(answers) == pytest.approx(expected, abs=1e-5)


def test_a_template_of_its_own_stays_and_writes_no_end_behind_what_was_cut_off(classifier, load_sharp):
    folder, tokenizer, model = classifier(CHATML)
    policy = load_sharp("tiny-llama", chat_template="raw")
    texts = ["Io.", "Io and", "with <|im_end|> inside", ""]
    expected = []
    for text in texts:
        turns = [*ASKED, {"role": "assistant", "content": text}]
        settings = {"return_dict": False, "sanitize_control_tokens": True, "continue_final_message": text != "Io."}
        expected.append(tokenizer.apply_chat_template(turns, **settings))
    answers = [SampledResponse(ASKED, [1], [2], text, ended=text == "Io.") for text in texts]
    assert scorer_in_ppo(folder, policy, "raw")(answers) == pytest.approx(logits(model, expected), abs=1e-5)


@pytest.mark.parametrize("template", ["auto", "raw"])
def test_a_reward_model_of_this_package_reads_an_end_behind_what_was_cut_off(template, load_sharp):
    """It reads the score at the end token, by the policy's ids or by another template."""
    own = load_sharp("tiny-gpt2")
    model = RewardModel(own.backbone, ScalarHead(own.backbone.hidden_size, bias=False), None)
    policy = load_sharp("tiny-gpt2", chat_template=template).tokenization
    scorer = RewardModelScorer.from_loaded(LoadedReward(model, own, 0.0), policy, Accelerator(cpu=True), 4096)
    prompt, ids = policy.prompt_ids(ASKED), policy.response_ids("Io.")
    responses = [SampledResponse(ASKED, prompt, row, "Io.", row == ids) for row in (ids, ids[:-1])]
    assert scorer.encode(responses[0]) == scorer.encode(responses[1])
    assert scorer.encode(responses[1]).response == [*own.tokenization.text_ids("Io."), own.tokenization.end_id]
    first, second = scorer(responses)
    assert first == pytest.approx(second, abs=1e-5)
    empty = [SampledResponse(ASKED, [1], [], "", ended=False)]
    assert len(scorer(empty)) == 1
    # Where the context has no room for one more token, the end token takes the place of the last one.
    full = [7] * (own.backbone.context_length - len(prompt))
    assert scorer.encode(SampledResponse(ASKED, prompt, full, "", False, True)).response == [*full[:-1], policy.end_id]


@pytest.mark.parametrize("template", [None, CHATML])
def test_prompts_as_token_ids_are_read_as_they_are_by_a_classifier_of_the_same_vocabulary(template, classifier, load_sharp):
    """No template of the classifier is applied to them, and a token that only pads in the policy's tokenizer is no other."""
    folder, tokenizer, model = classifier(template)
    loaded = load_sharp("tiny-llama")
    padded = loaded.tokenization.tokenizer
    padded.add_special_tokens({"pad_token": "[PAD]"})
    assert len(padded) > len(tokenizer)
    policy = dataclasses.replace(loaded, tokenization=Tokenization(padded))
    prompt, response = [9, 10, 11], [20, 21, policy.tokenization.end_id]
    text = policy.tokenization.text(response)
    given, written = (SampledResponse(ASKED, prompt, response, text, True, as_ids) for as_ids in (True, False))
    scorer = scorer_in_ppo(folder, policy, "auto")
    found = scorer([given])
    assert found == pytest.approx(logits(model, [prompt + response]), abs=1e-5)
    assert (scorer([written]) == found) == (template is None)


@pytest.mark.parametrize(("template", "added"), [(None, ()), (CHATML, ()), (None, ["moon"]), (CHATML, ["moon"])])
def test_a_response_has_the_reward_in_align_sample_that_it_has_in_ppo(
    template, added, classifier, trainer, sharp_folders, monkeypatch
):
    """Every second response ends with an end token; the others ran into the length limit."""
    folder, _, _ = classifier(template, added)
    drawn = []

    def sample(backbone, prompts, uniforms, sampling, end_ids, *rest):
        found = plain(backbone, prompts, uniforms, sampling, end_ids, *rest)
        ended = [row % 2 == 0 for row in range(len(found.ids))]
        ids = [[*row[:2], min(end_ids)] if ends else row for row, ends in zip(found.ids, ended, strict=True)]
        drawn.append(Responses(ids, ended))
        return drawn[-1]

    plain = command.sample
    monkeypatch.setattr(command, "sample", sample)
    given = {"max_new_tokens": 4, "dtype": "float32", "chat_template": "raw"}
    config = SampleConfig(
        model=[sharp_folders["tiny-llama"]], prompt=["Hi"], samples_per_prompt=6, reward_model=folder, **given
    )
    (row,) = sample_rows(config)
    setup, (responses,) = trainer([folder], **given).setup, drawn
    texts = [setup.policy.tokenization.text(ids) for ids in responses.ids]
    scores = setup.rewards(Rollout(setup.prompts * 6, responses.ids, responses.ended, texts)).total
    assert row["responses"] == texts
    assert row["rewards"] == pytest.approx(scores.tolist(), abs=1e-5)


@pytest.mark.parametrize(("added", "starts"), [((), True), (["moon"], False)])
def test_a_critic_starts_from_a_reward_model_only_where_ids_mean_the_same(added, starts, classifier, load_sharp):
    folder, _, _ = classifier(added=added)
    policy, reward = load_sharp("tiny-llama"), load_reward_model(folder, "float32")
    module = build_actor_critic(policy, "separate", reward)
    critic = dict(module.critic.model.named_parameters())
    source = (reward.loaded if starts else policy).backbone.model
    name = "model.layers.0.self_attn.q_proj.weight"
    embedding = module.critic.model.get_input_embeddings().weight
    assert torch.equal(embedding, source.get_input_embeddings().weight)
    assert critic[name].data_ptr() != dict(source.named_parameters())[name].data_ptr()
    head = module.value_head.linear.weight
    assert torch.equal(head, reward.model.head.linear.weight) if starts else not head.any()
    assert all(weight.requires_grad for key, weight in critic.items() if "lm_head" not in key and "score" not in key)


@pytest.mark.parametrize("starts_from_reward", [False, True])
def test_copies_of_a_policy_read_shared_rows_by_its_attention(starts_from_reward, classifier, load_sharp):
    """The reference and the critic of full fine-tuning; a dense mask takes the memory that block attention saves."""
    policy = load_sharp("tiny-llama")
    use_block_attention(policy.backbone)
    reward = load_reward_model(classifier()[0], "float32") if starts_from_reward else None
    critic = build_actor_critic(policy, "separate", reward).critic
    assert copy_backbone(policy.backbone).block_attention
    assert critic.block_attention
    if reward:
        assert not reward.loaded.backbone.block_attention
        reward.loaded.backbone.model.set_attn_implementation("eager")
        assert not build_actor_critic(policy, "separate", reward).critic.block_attention


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_critic_may_be_smaller_than_the_policy(classifier, trainer):
    """InstructGPT's values start from a reward model of 6B, also for a policy of 175B (section 3.5)."""
    folder, _, model = classifier(hidden_size=16, intermediate_size=24, ignore_mismatched_sizes=True)
    ppo = trainer(
        [folder], ["red", "green"], critic="separate", value_fit="none", chat_template="raw", gradient_checkpointing=True
    )
    module = ppo.setup.engine.module
    assert module.critic.recomputes
    assert module.critic.hidden_size == module.value_head.linear.in_features == 16 < module.backbone.hidden_size
    assert torch.equal(module.value_head.linear.weight, model.score.weight)
    ppo.train()
    assert not torch.equal(module.value_head.linear.weight, model.score.weight)


def test_a_context_that_the_longest_response_will_exceed_is_refused_before_training(classifier, trainer, tmp_path):
    folder, tokenizer, _ = classifier(max_position_embeddings=24)
    words, longest = ["red", "green, blue"], len(tokenizer("green, blue").input_ids)
    with pytest.raises(
        UserError, match=rf"its context of 24 tokens is too short for a prompt of {longest} and a response of"
    ):
        trainer([folder], words, chat_template="raw", max_new_tokens=25 - longest)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    trainer([folder], words, chat_template="raw", max_new_tokens=24 - longest)


def test_a_scoring_template_that_drops_a_turn_of_the_prompts_is_refused_before_training(classifier, trainer, tmp_path):
    template = CHATML.replace("%}<|im_start|>{{ m.role", "if m.role != 'system' %}<|im_start|>{{ m.role")
    folder, _, _ = classifier(template)
    asked = {"prompt": [*ASKED]}
    told = {"prompt": [{"role": "system", "content": "Be brief."}, *ASKED]}
    trainer([folder], [asked], folder="fine")
    with pytest.raises(UserError, match=r"classifier: the chat template .*system"):
        trainer([folder], [asked, told])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("prompt", ["Name a moon.", ASKED, None, "a<eos>b"])
def test_markup_of_token_ids_is_no_text_for_another_vocabulary(prompt, classifier, sharp_folders, trainer):
    folder, _, _ = classifier(CHATML, added=["moon"])
    policy = load_tokenization(sharp_folders["tiny-llama"])
    row = {"input_ids": policy.chat.template_ids("User: Name a moon.<eos>Assistant: "), "prompt": prompt}
    if prompt in ("Name a moon.", ASKED):
        trainer([folder], [row])
        return
    with pytest.raises(UserError, match=r"classifier: reads texts, but a prompt of token ids contains '<eos>', as a chat"):
        trainer([folder], [row])


def test_special_tokens_around_a_prompt_of_token_ids_are_no_markup(classifier, sharp_folders, trainer):
    folder, _, _ = classifier(CHATML, added=["moon"])
    policy = load_tokenization(sharp_folders["tiny-llama"])
    ids = [policy.end_id, *policy.chat.template_ids("Name a moon."), policy.end_id]
    assert trainer([folder], [ids]).setup.prompts[0].conversation == ASKED


def test_a_model_in_memory_needs_its_tokenizer_unless_it_has_the_policys_vocabulary(classifier, sharp_folders, trainer):
    _, _, larger = classifier()
    larger.resize_token_embeddings(264 + 1025, mean_resizing=False)
    folder, tokenizer, model = classifier(CHATML)
    for reward, given in ((larger, {}), (model, {"selection_reward_model": larger, "validation_prompts": ["Hi"]})):
        with pytest.raises(
            UserError, match=r"reward: Llama.* has another vocabulary than the policy, .*reward_of_classifier"
        ):
            trainer([reward], given=given)
    reward = reward_of_classifier(model, tokenizer)
    policy, accelerator = load_reward_model(folder, "float32"), Accelerator(cpu=True)
    answer = [SampledResponse(ASKED, [1], [2], "Io.")]
    encoding = policy.loaded.tokenization
    both = [RewardModelScorer.from_loaded(each, encoding, accelerator, 4096)(answer) for each in (reward, policy)]
    assert both[0] == pytest.approx(both[1], abs=1e-6)
    trainer([reward]).train()
    with pytest.raises(UserError, match="is no sequence classifier"):
        reward_of_classifier(AutoModelForCausalLM.from_pretrained(sharp_folders["tiny-llama"]), tokenizer)


def policy_with(token, special, classifier):
    """Add a token to a tokenizer and to a policy; returns both, and a classifier without the token."""
    folder, tokenizer, model = classifier()
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer.add_tokens([token], special_tokens=special)
    if token == "[PAD]":
        tokenizer.pad_token = token
    policy.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return policy, tokenizer, model, folder


@pytest.mark.parametrize("kind", ["in memory", "with its tokenizer", "folder"])
def test_a_padding_token_that_is_sampled_is_left_out_for_a_reward_model_without_it(kind, classifier, trainer):
    policy, tokenizer, model, folder = policy_with("[PAD]", True, classifier)
    pad_id, expected = len(tokenizer) - 1, copy.deepcopy(model)
    rewards = {"in memory": lambda: model, "folder": lambda: folder}
    rewards["with its tokenizer"] = lambda: reward_of_classifier(model, AutoTokenizer.from_pretrained(folder))
    made = trainer([rewards[kind]()], [{"input_ids": [9, 10, 11]}], policy, {"tokenizer": tokenizer})
    (scorer,) = made.setup.rewards.models
    response = SampledResponse(ASKED, [9, 10, 11], [20, pad_id, 21, pad_id], "", given_as_ids=True)
    assert scorer([response]) == pytest.approx(logits(expected, [[9, 10, 11, 20, 21]]), abs=1e-5)
    assert made.setup.policy.tokenization.pad_id == pad_id


def test_a_critic_needs_a_row_for_each_id_that_the_policy_samples(classifier, load_sharp):
    folder, _, _ = classifier()
    policy = load_sharp("tiny-llama")
    policy.backbone.model.resize_token_embeddings(265, mean_resizing=False)
    module = build_actor_critic(policy, "separate", load_reward_model(folder, "float32"))
    assert module.critic.model.get_input_embeddings().num_embeddings == 265
    assert not module.value_head.linear.weight.any()


@pytest.mark.parametrize(
    ("token", "special", "kind"), [("moon", False, "in memory"), ("[ASK]", True, "in memory"), ("[ASK]", True, "folder")]
)
def test_a_reward_model_without_a_row_for_a_token_of_a_text_is_refused(token, special, kind, classifier, trainer):
    policy, tokenizer, model, folder = policy_with(token, special, classifier)
    prompts = [{"input_ids": [9, 264] if special else [9]}]
    line = (
        r"its embedding matrix has 264 rows, but the policy can sample any id below 265; call resize_token_embeddings\(265\)"
    )
    with pytest.raises(UserError, match=line):
        trainer([model if kind == "in memory" else folder], prompts, policy, {"tokenizer": tokenizer})


def test_a_reward_model_with_more_rows_of_the_same_vocabulary_reads_the_policys_ids(classifier, trainer):
    _, _, model = classifier()
    model.resize_token_embeddings(264 + 128, mean_resizing=False)
    expected = copy.deepcopy(model)
    (scorer,) = trainer([model]).setup.rewards.models
    assert scorer([SampledResponse(ASKED, [9], [20], "")]) == pytest.approx(logits(expected, [[9, 20]]), abs=1e-5)


def test_a_model_from_a_folder_with_another_tokenizer_of_the_same_size_is_refused(classifier, trainer):
    folder, tokenizer, _ = classifier()
    path = Path(folder) / "tokenizer.json"
    stored = json.loads(path.read_text())
    vocabulary, size = stored["model"]["vocab"], len(tokenizer)
    stored["model"]["vocab"] = {token: size - 1 - id for token, id in vocabulary.items()}
    path.write_text(json.dumps(stored))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    for role, reward, given in (("reward", model, {}), ("value_model", len, {"value_model": model})):
        with pytest.raises(UserError, match=f"{role}: Llama.* has another vocabulary than the policy"):
            trainer([reward], given=given)
