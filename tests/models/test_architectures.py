"""Every architecture of docs/models.md: what it reads, what it costs, and all three stages, full and with LoRA."""

import copy
import shutil

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification, BertConfig

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.model_registry.tiny import byte_tokenizer
from align.models.backbone import cache_elements_per_token, flops_profile, is_encoder, wrap
from align.models.backbone.decoder import sliding_window
from align.models.backbone.determinism import routers_of
from align.models.backbone.kinds import make_prefix_lm
from align.models.heads import LanguageModel, RewardModel, ScalarHead
from align.models.loading import load
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.reward.checkpoint import load_reward_model
from align.reward.loss import pairs_of, ranking_loss
from align.runtime.flops import forward_flops
from align.sft import SFTConfig, run_sft
from tests.files import metrics_of
from tests.models.architectures import ARCHITECTURES, DECODERS, PATHS, has_classifier, make_model, marked
from tests.models.reading import CLOSE, OWNER, PROMPTS, RESPONSES, assert_reads_alike
from tests.settings import run_settings


@pytest.fixture(params=marked(ARCHITECTURES))
def name(request):
    return request.param


@pytest.fixture
def sharp(name, sharpen):
    return wrap(sharpen(make_model(name)))


def test_a_text_is_read_alike_in_every_way(name, sharp):
    assert sharp.shares_prompts == ARCHITECTURES[name].packed
    assert_reads_alike(sharp)


@pytest.mark.parametrize("name", marked(architecture.name for architecture in DECODERS), indirect=True)
def test_a_prompt_is_read_whole_where_the_table_says_so(name, sharpen):
    model, found = sharpen(make_model(name)), ARCHITECTURES[name]

    def read_whole():
        make_prefix_lm(model.config, name)
        return wrap(model)

    if found.prefix_lm:
        assert_reads_alike(read_whole())
    else:  # a window, or positions that are part of attention
        reason = r"a layer of model '.*' sees only 8 tokens back" if sliding_window(found.config) else "takes no mask"
        with pytest.raises(UserError, match=f"^prefix_lm: .*{reason}"):
            read_whole()


def ranking_gradients(backbone, shared):
    """Loss and gradients of the ranking loss, with prompts read once or once for every response."""
    backbone = copy.deepcopy(backbone)
    torch.manual_seed(3)
    model = RewardModel(backbone, ScalarHead(backbone.hidden_size, bias=False), None)
    if shared:
        rewards = model(Padded.from_lists(PROMPTS), Padded.from_lists(RESPONSES), torch.tensor(OWNER))
    else:
        rows = zip(OWNER, RESPONSES, strict=True)
        rewards = torch.cat([model(Padded.from_lists([PROMPTS[o]]), Padded.from_lists([ids])) for o, ids in rows])
    pairs = pairs_of([[1, 3, 2], [1], [2, 1]])
    loss = ranking_loss(rewards, pairs._replace(margin=torch.tensor([0.0, 0.0, 0.5])[pairs.ranking]))
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def test_the_ranking_loss_of_a_shared_row_equals_separate_rows_in_loss_and_gradients(sharp):
    (loss, gradients), (expected, theirs) = (ranking_gradients(sharp, shared) for shared in (True, False))
    torch.testing.assert_close(loss, expected, **CLOSE)
    assert set(gradients) == set(theirs)
    assert max(gradient.abs().max() for gradient in theirs.values()) > 1e-2
    for name, gradient in gradients.items():
        # Elements of a gradient are sums over many places: 1e-5 of the tensor's largest element, at least of 1.
        bound = 1e-5 * max(1.0, float(theirs[name].abs().max()))
        torch.testing.assert_close(gradient, theirs[name], atol=bound, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@torch.no_grad()
def test_the_cache_holds_as_many_numbers_as_are_counted(name, sharp):
    state, _ = sharp.prefill(Padded.from_lists([[5, 6, 7, 8, 9]]))
    own = getattr(state.cache, "self_attention_cache", state.cache)  # an encoder-decoder has read its start token alone
    read = 5 if own is state.cache else 1
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in own.layers)
    assert cache_elements_per_token(sharp) * read == kept == ARCHITECTURES[name].cached * read


@torch.no_grad()
def test_torch_counts_the_same_flops(name):
    """Of experts, those that a token goes through. LongT5's encoder multiplies only near tokens: fewer than are counted."""
    backbone = wrap(make_model(name, countable=True))
    policy = LanguageModel(backbone)
    prompt, response = Padded.from_lists([[9] * 20]), Padded.from_lists([[8] * 12])
    with FlopCounterMode(display=False) as counter:
        policy(prompt, response, response.mask())
    expected = forward_flops(flops_profile(backbone, None), 20, [12], 12)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.05 if "LongT5" not in name else 0.2)


COMMON = run_settings(max_prompt_tokens=64)


def each_path():
    """The architectures that stand for others, with all weights and with LoRA; the rest of the suite trains tiny models."""
    always = (("Falcon, multi-query", 0), ("Mixtral, experts", 4), ("Switch, experts", 0))
    cases = [(name, rank) for name in PATHS for rank in (0, 4)]
    return [pytest.param(*case, marks=[pytest.mark.slow] * (case not in always)) for case in cases]


@pytest.mark.parametrize(("name", "rank"), each_path())
def test_all_stages(name, rank, stage_data, tmp_path):
    """An update each of SFT, of the reward model where transformers has a classifier to save it as, and of PPO."""
    model = make_model(name)
    model.save_pretrained(tmp_path / "base")
    byte_tokenizer(append_eos=model.config.is_encoder_decoder).save_pretrained(tmp_path / "base")
    common = COMMON | {"lora_r": rank}
    demonstrations, pairs, prompts = stage_data
    sft = run_sft(
        SFTConfig(
            **common, model=str(tmp_path / "base"), train_data=demonstrations, batch_size=4, output_dir=str(tmp_path / "sft")
        )
    )
    settings = common | {"model": str(sft), "output_dir": str(tmp_path / "reward")}
    rewards = {"reward_functions": ["align.ppo.toy_rewards:brevity"]}
    if has_classifier(name):
        reward = run_reward(RewardConfig(**settings, train_data=pairs, batch_size=4))
        rewards = {"reward_model": str(reward)}
        found = load_reward_model(str(reward), "float32")
        assert_transformers_agrees(found, reward, rank)
    else:
        with pytest.raises(UserError, match="transformers has no sequence classifier of it"):
            run_reward(RewardConfig(**settings, train_data=pairs, batch_size=4))
    settings = common | {"model": str(sft), "output_dir": str(tmp_path / "ppo")}
    run_ppo(
        PPOConfig(
            **settings,
            **rewards,
            prompts=prompts,
            total_updates=1,
            rollout_batch_size=4,
            num_mini_batches=1,
            num_ppo_epochs=1,
            max_new_tokens=6,
        )
    )
    (row,) = metrics_of(tmp_path / "ppo")
    assert row["kl/k1"] == pytest.approx(0.0, abs=1e-4)  # the policy begins at its reference; the run checks the ratio
    assert row["policy/clipfrac"] == 0.0


def assert_transformers_agrees(found, folder, rank):
    """A decoder's reward model is a classifier of transformers, and read as any other library's without what is ours."""
    if rank or not found.loaded.backbone.prompt_in_row:
        return
    ids = [[9, 10, 11], [20, 21, 1]]
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        score = classifier(input_ids=torch.tensor([ids[0] + ids[1]])).logits
        expected = found.model(Padded.from_lists([ids[0]]), Padded.from_lists([ids[1]]))
    torch.testing.assert_close(score[:, 0], expected, atol=1e-4, rtol=0)
    theirs = folder.parent.parent / "theirs"
    shutil.copytree(folder, theirs, ignore=shutil.ignore_patterns("reward*"))
    foreign = load_reward_model(str(theirs), "float32")
    assert foreign.reads_whole_turns
    torch.testing.assert_close(
        foreign.model(Padded.from_lists([ids[0]]), Padded.from_lists([ids[1]])), expected, atol=1e-6, rtol=0
    )


def test_which_models_are_encoders_is_read_from_their_config():
    assert not any(is_encoder(architecture.config) for architecture in ARCHITECTURES.values())
    assert is_encoder(BertConfig())
    assert not is_encoder(BertConfig(is_decoder=True))


# Mixtures of experts

MIXTRAL, SWITCH = "Mixtral, experts", "Switch, experts"


@pytest.mark.parametrize("name", [MIXTRAL, "OLMoE, experts", "Qwen 3 MoE, experts"])
def test_routers_multiply_in_float32(name):
    model = make_model(name).to(torch.bfloat16)
    backbone = wrap(model)
    router = routers_of(model)[0].module
    states = torch.randn(64, 32).to(torch.bfloat16)
    logits, scores, _ = router(states)
    assert (logits.dtype, scores.dtype, router.weight.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    expected = states.double() @ router.weight.double().T
    torch.testing.assert_close(logits.double(), expected, atol=1e-6, rtol=1e-6)
    backbone.hidden(Padded.from_lists([[5, 6, 7], [8, 9]]), Padded.from_lists([[20, 21, 22], [24]])).float().sum().backward()
    assert router.weight.grad.abs().max() > 0


@pytest.mark.parametrize("name", [MIXTRAL, SWITCH])
def test_no_adapter_goes_onto_a_router(name, tmp_path):
    make_model(name).save_pretrained(tmp_path)
    byte_tokenizer(append_eos=name == SWITCH).save_pretrained(tmp_path)
    loaded = load(ModelConfig(model=str(tmp_path), lora_r=2), torch.float32)
    adapted = {key for key, _ in loaded.backbone.model.named_parameters() if "lora_A" in key}
    assert adapted
    assert not [key for key in adapted if "router" in key or "gate." in key]
    assert (name == SWITCH) == any("experts" in key for key in adapted)
