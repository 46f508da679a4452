"""Mixtures of experts: the balance loss by hand and in a run, the load of each expert, routers, and adapters."""

import re
from pathlib import Path

import pytest
import torch

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.dpo import DPOConfig, run_dpo
from align.model_registry.tiny import byte_tokenizer
from align.models.backbone import wrap
from align.models.backbone.experts import balance_loss, routers_of
from align.models.loading import load
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.sft import SFTConfig, run_sft
from tests.files import metrics_of, write_rows
from tests.models.architectures import make_model

MIXTRAL, SWITCH = "Mixtral, experts", "Switch, experts"
PROMPTS, OWNER = [[5, 6, 7], [8, 9]], [0, 0, 1]
RESPONSES = [[20, 21, 22, 23], [24], [25, 26]]


def sequences(fractions, probability):
    """Ten tokens whose choices have these shares, and a router of the same opinion on each."""
    chosen = torch.zeros(1, 10, len(fractions))
    start = 0
    for expert, fraction in enumerate(fractions):
        count = round(10 * fraction)
        chosen[0, start : start + count, expert] = 1.0
        start += count
    return chosen, torch.tensor(probability).expand(1, 10, -1), torch.ones(1, 10, dtype=torch.bool)


@pytest.mark.parametrize(
    ("fractions", "probability", "expected"),
    [
        ([0.4, 0.3, 0.3], [0.4, 0.3, 0.3], 3 * 0.34),  # .16 + .09 + .09
        ([0.4, 0.3, 0.3], [0.7, 0.2, 0.1], 3 * 0.37),  # .28 + .06 + .03
        ([0.8, 0.1, 0.1], [0.7, 0.2, 0.1], 3 * 0.59),  # .56 + .02 + .01
        ([0.4, 0.3, 0.3], [0.384, 0.308, 0.308], 3 * 0.3384),  # .1536 + .0924 + .0924
        ([0.8, 0.1, 0.1], [0.663, 0.17, 0.167], 3 * 0.5641),  # .5304 + .0170 + .0167
        ([0.5, 0.5], [0.5, 0.5], 1.0),  # even
        ([1.0, 0.0], [1.0, 0.0], 2.0),  # all to one: as many as there are experts
    ],
)
def test_the_balance_by_hand(fractions, probability, expected):
    assert balance_loss(*sequences(fractions, probability)).tolist() == pytest.approx([expected])


def test_padding_does_not_count_and_only_probabilities_learn():
    chosen, probability, real = sequences([0.5, 0.5], [0.8, 0.2])
    real[0, 5:] = False  # the first five tokens, all to expert 0: 2 x (1 x .8)
    probability = probability.clone().requires_grad_()
    loss = balance_loss(chosen, probability, real)
    assert float(loss) == pytest.approx(1.6)
    loss.sum().backward()
    assert probability.grad[0, 0].tolist() == pytest.approx([2 / 5, 0.0])  # N f_i / tokens
    assert probability.grad[0, 5:].abs().max() == 0


@pytest.mark.parametrize("name", [MIXTRAL, SWITCH])
def test_the_balance_is_the_same_alone_in_a_batch_and_packed(name, sharpen):
    backbone = wrap(sharpen(make_model(name)))
    routing = backbone.record_routing()
    prompts, responses = Padded.from_lists(PROMPTS), Padded.from_lists(RESPONSES)

    def read(prompt, response, prompt_of_response=None, rows=3):
        backbone.hidden(prompt, response, prompt_of_response)
        return routing.take(rows)

    alone = [
        read(Padded.from_lists([PROMPTS[o]]), Padded.from_lists([r]), rows=1) for o, r in zip(OWNER, RESPONSES, strict=True)
    ]
    values = torch.stack([balance for balance, _ in alone])
    counts = torch.stack([count for _, count in alone]).sum(0)
    assert values.std() > 1e-3
    tokens = sum(len(PROMPTS[o]) + len(r) for o, r in zip(OWNER, RESPONSES, strict=True))
    if name == MIXTRAL:
        assert counts.sum() == 2 * 2 * tokens  # two layers, two experts each
    else:
        assert counts.sum() == tokens + 3  # a layer of the encoder, one of the decoder with its start token
    for rows in (read(prompts.rows(OWNER), responses), read(prompts, responses, torch.tensor(OWNER))):
        torch.testing.assert_close(rows[0], values.sum(), atol=1e-5, rtol=0)
        assert torch.equal(rows[1], counts)
    # Where a row is a ranking, its responses count as one.
    by_ranking = read(prompts, responses, torch.tensor(OWNER), rows=2)[0]
    torch.testing.assert_close(by_ranking, (values[0] + values[1]) / 2 + values[2], atol=1e-5, rtol=0)
    with torch.no_grad():
        backbone.hidden(prompts.rows(OWNER), responses)
    assert routing.take(3) is None


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
    backbone.hidden(Padded.from_lists(PROMPTS), Padded.from_lists(RESPONSES[:2])).float().sum().backward()
    assert router.weight.grad.abs().max() > 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for name in (MIXTRAL, SWITCH):
        folder = tmp_path_factory.mktemp("experts")
        model = make_model(name)
        with torch.no_grad():  # routers that prefer one expert
            for router in routers_of(model):
                weight = next(router.module.parameters())
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))
        model.save_pretrained(folder)
        byte_tokenizer(append_eos=name == SWITCH).save_pretrained(folder)
        found[name] = str(folder)
    return found


COMMON = {"dtype": "float32", "report_to": ["none"], "max_prompt_tokens": 64, "batch_size": 4}
ROWS = [
    {"prompt": "Hi " * number, "completion": "Yes, it is. " * number, "chosen": "Yes " * number, "rejected": "no"}
    for number in (1, 2, 3, 5)
]


def rows_with(*names):
    return [{name: row[name] for name in names} for row in ROWS]


def balanced(stage, config, folder, tmp_path, number, **settings):
    kept = ("prompt", "completion") if stage is run_sft else ("prompt", "chosen", "rejected")
    data, output = write_rows(tmp_path / "rows.jsonl", rows_with(*kept)), tmp_path / str(number)
    stage(config(**COMMON, model=folder, train_data=data, output_dir=str(output), **settings))
    return [row for row in metrics_of(output) if "experts/balance" in row]


@pytest.mark.parametrize(
    ("stage", "config"),
    [(run_sft, SFTConfig), pytest.param(run_reward, RewardConfig, marks=pytest.mark.slow)],
    ids=["sft", "reward"],
)
def test_micro_batches_change_neither_the_loss_nor_the_load(stage, config, folders, tmp_path):
    one, cut = (
        balanced(stage, config, folders[MIXTRAL], tmp_path, tokens, micro_batch_tokens=tokens, router_aux_loss_coef=0.5)[0]
        for tokens in (4096, 30)
    )
    for name in ("loss", "grad_norm", *(key for key in one if key.startswith("experts/"))):
        assert cut[name] == pytest.approx(one[name], rel=1e-4), name
    load = [one[f"experts/load/{expert}"] for expert in range(4)]
    assert sum(load) == pytest.approx(4.0)
    assert (max(load), min(load)) == (one["experts/load_max"], one["experts/load_min"])
    plain = balanced(stage, config, folders[MIXTRAL], tmp_path, "plain")[0]
    assert one["loss"] == pytest.approx(plain["loss"] + 0.5 * plain["experts/balance"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [MIXTRAL, SWITCH])
def test_ppo_and_dpo_balance_the_policys_experts(name, folders, tmp_path):
    """PPO checks at the first minibatch that the ratio is 1: sampling sends tokens where training does."""
    prompts = write_rows(tmp_path / "prompts.jsonl", rows_with("prompt"))
    pairs = write_rows(tmp_path / "pairs.jsonl", rows_with("prompt", "chosen", "rejected"))
    settings = {name: value for name, value in COMMON.items() if name != "batch_size"}
    settings |= {"model": folders[name], "router_aux_loss_coef": 0.5}
    ppo = {"prompts": prompts, "rollout_batch_size": 4, "num_mini_batches": 1, "total_updates": 1, "max_new_tokens": 6}
    rewards = {"reward_functions": ["align.ppo.toy_rewards:brevity"]}
    run_ppo(PPOConfig(**settings, **ppo, **rewards, output_dir=str(tmp_path / "ppo")))
    run_dpo(DPOConfig(**settings, train_data=pairs, batch_size=4, output_dir=str(tmp_path / "dpo")))
    for stage in ("ppo", "dpo"):
        row = next(row for row in metrics_of(tmp_path / stage) if "experts/balance" in row)
        assert sum(row[f"experts/load/{expert}"] for expert in range(4)) == pytest.approx(4.0)
        assert row["experts/balance"] > 1.0 + 1e-3


def test_the_metrics_are_those_of_the_page(folders, tmp_path):
    (row, *_) = balanced(run_sft, SFTConfig, folders[SWITCH], tmp_path, "names")
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = page.partition("## Mixtures of experts")[2].partition("| metric |")[0]
    found = {re.sub(r"/\d+$", "/<n>", name) for name in row if name.startswith("experts/")}
    assert set(re.findall(r"`(experts/[^`]+)`", table)) == found


def test_the_loss_evens_the_load_out(folders, tmp_path):
    settings = {"num_train_epochs": 15, "learning_rate": 3e-3, "lr_scheduler_type": "constant", "router_aux_loss_coef": 10.0}
    rows = balanced(run_sft, SFTConfig, folders[MIXTRAL], tmp_path, "even", **settings)
    assert rows[0]["experts/balance"] > 1.1
    assert rows[-1]["experts/balance"] < 1.0 + 0.6 * (rows[0]["experts/balance"] - 1.0)


def test_a_model_without_experts_has_none_to_balance(tmp_path):
    with pytest.raises(
        UserError, match=r"^router_aux_loss_coef is 0.01, but model type 'gpt2' has no experts; set it to 0$"
    ):
        balanced(run_sft, SFTConfig, "tiny-gpt2", tmp_path, "none", router_aux_loss_coef=0.01)


def test_no_adapter_goes_onto_a_router(folders):
    for name in (MIXTRAL, SWITCH):
        config = ModelConfig(model=folders[name], lora_r=2)
        adapted = {key for key, _ in load(config, torch.float32).backbone.model.named_parameters() if "lora_A" in key}
        assert adapted
        assert not [key for key in adapted if "router" in key or "gate." in key]
        assert (name == SWITCH) == any("experts" in key for key in adapted)
