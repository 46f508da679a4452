import random

import pytest
import torch
from accelerate import Accelerator

from align.core.errors import UserError
from align.extras.rules import RuleConfig, RuleTrainer
from align.extras.rules.judgments import RuleScorer, rules_of_model
from align.extras.rules.rule_terms import RULE_ADAPTER, RuleTermSettings
from align.models.roles import Roles
from align.ppo import PPOConfig
from align.ppo.actor_critic import build_actor_critic
from align.ppo.scoring_models import load_source
from align.ppo.trainer import PPOTrainer
from align.reward.checkpoint import RULE
from align.sft import SFTConfig
from align.sft.train import SFTTrainer
from tests.extras.running import command, settings
from tests.files import read_rows, write_rows

from .planted import RULES, WORDS, has_digit, judgments, response, sampled


@pytest.fixture(scope="module")
def writer_and_judge(tmp_path_factory, align_cache):
    """A tiny model that answers in words and digits, half of each, and a rule model that knows digits."""
    folder, rng = tmp_path_factory.mktemp("planted"), random.Random(1)
    demonstrations = [
        {"prompt": f"{rng.choice(WORDS)} {number}?", "completion": response(rng, number % 2 == 0)} for number in range(320)
    ]
    config = SFTConfig(**settings(folder / "sft"), num_train_epochs=6, batch_size=16)
    writer = str(SFTTrainer("tiny-llama", demonstrations, config).train())
    config = RuleConfig(**settings(folder / "rules"), num_train_epochs=3, batch_size=8, rules=RULES)
    return writer, str(RuleTrainer(writer, judgments(200), config).train())


@pytest.fixture(scope="module")
def quick_judge(tmp_path_factory, sharp_folders):
    """A rule model that has hardly learned anything."""
    config = RuleConfig(**settings(tmp_path_factory.mktemp("quick")), num_train_epochs=1, rules=RULES)
    return str(RuleTrainer(sharp_folders["tiny-llama"], judgments(16), config).train())


def known_words(prompts, responses):
    """The preference: the share of a response's words that are words or numbers."""
    words = [text.split() for text in responses]
    return [sum(word in WORDS or word.isdigit() for word in row) / max(1, len(row)) for row in words]


def metrics_of_ppo(writer, judge, folder, updates):
    """Of the model before the first update, of each update, and of the model after the last one."""
    config = PPOConfig(
        **settings(folder, learning_rate=1e-3),
        total_updates=updates,
        rollout_batch_size=32,
        num_ppo_epochs=2,
        max_new_tokens=24,
        missing_eos_score=None,
        eval_steps=updates,
        rules=RuleTermSettings(model=judge),
    )
    prompts = [f"{word} {number}?" for number, word in enumerate(WORDS * 12)]  # 120 are held out: 30 differ by 0.08
    PPOTrainer(writer, [known_words], prompts[:60], config, prompts[60:]).train()
    return read_rows(folder / "metrics.jsonl")


@pytest.mark.slow  # half a minute of training
def test_ppo_lowers_a_planted_rules_violations_at_no_less_preference(writer_and_judge, tmp_path):
    writer, judge = writer_and_judge
    rows = metrics_of_ppo(writer, judge, tmp_path / "ppo", updates=15)
    before, after = rows[0], rows[-1]
    assert before["validation/rule/no-digits"] > 0.25
    assert after["validation/rule/no-digits"] < 0.6 * before["validation/rule/no-digits"]
    assert after["validation/preference"] > before["validation/preference"] - 0.02
    assert after["validation/reward"] > before["validation/reward"]
    assert rows[1]["reward/rule/no-digits"] > rows[-1]["reward/rule/no-digits"]
    samples = read_rows(tmp_path / "ppo" / "samples.jsonl")
    by_update = [[has_digit(row["response"]) for row in samples if row["update"] == update] for update in (0, 15)]
    assert sum(by_update[1]) < sum(by_update[0])  # what the model of the rule says is so


def test_the_kept_one_of_several_is_the_first_that_obeys_or_the_one_that_obeys_most(quick_judge, sharp_folders, tmp_path):
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{word}?"} for word in WORDS[:8]])
    words = f"--model {sharp_folders['tiny-llama']} --prompts {prompts} --dtype float32 --max_new_tokens 8"
    multiplied = "--best_of 4 --rules.use multiply --rules.rules no-digits"
    shares = {}
    for name, more in (("every", "--samples_per_prompt 4"), ("filter", "--best_of 4"), ("multiply", multiplied)):
        command(f"sample {words} --rules.model {quick_judge} --output {tmp_path / name}.jsonl {more}")
        shares[name] = [row["violates"]["no-digits"] for row in read_rows(tmp_path / f"{name}.jsonl")]
    kept = [next((share for share in row if share < 0.5), min(row)) for row in shares["every"]]
    assert [row[0] for row in shares["filter"]] == pytest.approx(kept, abs=1e-5)
    assert [row[0] for row in shares["multiply"]] == pytest.approx([min(row) for row in shares["every"]], abs=1e-5)
    assert len({round(share, 5) for row in shares["every"] for share in row}) > 16


def test_an_adapter_shares_the_policys_base_and_says_the_same(load_sharp, sharp_folders, tmp_path):
    config = RuleConfig(**settings(tmp_path / "rules"), num_train_epochs=1, lora_r=4, rules=RULES)
    folder = str(RuleTrainer(sharp_folders["tiny-llama"], judgments(16), config).train())
    policy = load_sharp("tiny-llama", adapter="policy", lora_r=4)
    shared = load_source(folder, policy, "float32", RULE_ADAPTER, RULE)
    other = load_sharp("tiny-llama")  # all weights are trained: nothing to share
    apart = load_source(folder, other, "float32", RULE_ADAPTER, RULE)
    assert shared.adapter_on_policy is not None
    assert apart.loaded is not None
    roles = Roles(build_actor_critic(policy, adapters=[shared.adapter_on_policy]))
    tokenization = policy.tokenization
    responses = [sampled(tokenization, "How many?", text) for text in ("seven 7", "seven")]
    scorers = [
        RuleScorer(source.scorer(loaded, roles, Accelerator(cpu=True), 4096), rules_of_model(folder), tokenization)
        for source, loaded in ((shared, policy), (apart, other))
    ]
    assert torch.allclose(scorers[0](responses), scorers[1](responses), atol=1e-5)


def test_mistakes_are_one_line(quick_judge, sharp_folders, tmp_path):
    writer, judge = sharp_folders["tiny-llama"], quick_judge

    def start(**rules):
        PPOTrainer(writer, [], ["Hi"], PPOConfig(**settings(tmp_path), rules=rules))

    with pytest.raises(UserError, match="among the model's training rules: no rule 'no-digit'; did you mean no-digits"):
        start(model=judge, rules=["no-digit"])
    with pytest.raises(UserError, match="not a rule model of this package"):
        start(model=writer)
    with pytest.raises(UserError, match=r"rules\.model is ''"):
        start(rules=["no-digits"])
