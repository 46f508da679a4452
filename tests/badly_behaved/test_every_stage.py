import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from align.core.errors import UserError
from align.core.seeds import RngStream
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.data.records import Demonstration
from align.dpo import DPOConfig, run_dpo
from align.eval.reward import RewardEvalConfig, run_reward_eval
from align.eval.toxicity import ToxicityConfig, run_toxicity
from align.eval.truthfulness import TruthfulnessConfig, run_truthfulness
from align.eval.winrate import WinrateConfig, run_winrate
from align.models.loading import load
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.reward.checkpoint import load_reward_model
from align.sampling.generation import SamplingParams, row_uniforms, sample
from align.sft import SFTConfig, run_sft
from align.tokenization import encode_demonstration
from tests.badly_behaved.specimens import SPECIMENS, Specimen, write
from tests.files import read_rows, write_rows
from tests.settings import run_settings

QUESTIONS = ("Name a moon of Mars.", "Is ice warm?", "Add 2 and 2.", "Say hello.")
ANSWERS = ("Phobos.", "No, ice is cold.", "4", "Hello!")
TRAINED = [specimen for specimen in SPECIMENS if not specimen.refused]


class Trained(NamedTuple):
    """The models of all stages that started from one specimen."""

    source: Path
    sft: Path
    reward: Path
    ppo: Path
    dpo: Path


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    """Four rows of each kind of record."""
    folder, pairs = tmp_path_factory.mktemp("data"), list(zip(QUESTIONS, ANSWERS, strict=True))
    rows = {
        "prompts": [{"prompt": question} for question, _ in pairs],
        "demonstrations": [{"prompt": question, "completion": answer} for question, answer in pairs],
        "pairs": [{"prompt": question, "chosen": answer, "rejected": "I do not know"} for question, answer in pairs],
    }
    return {kind: write_rows(folder / f"{kind}.jsonl", rows[kind]) for kind in rows}


@pytest.fixture(scope="module")
def source(sharp_folders, tmp_path_factory) -> Callable[[Specimen], Path]:
    """The folder of a specimen, written once."""

    @cache
    def of(specimen: Specimen) -> Path:
        return write(specimen, tmp_path_factory.mktemp("specimens") / specimen.name, sharp_folders[specimen.base])

    return of


@pytest.fixture(scope="module")
def trained(request, source, data, tmp_path_factory) -> Trained:
    """Every stage, in the order of the recipe."""
    specimen, rank = request.param
    folder, start = tmp_path_factory.mktemp("runs"), source(specimen)
    common = run_settings(lora_r=rank, learning_rate=1e-4)
    common["gradient_checkpointing"] = "dropout" in specimen.name

    def settings(stage, **more):
        return common | {"output_dir": str(folder / stage)} | more

    sft = run_sft(SFTConfig(**settings("sft", model=str(start), train_data=data["demonstrations"], batch_size=2)))
    pairs = {"model": str(sft), "train_data": data["pairs"], "batch_size": 2}
    reward = run_reward(RewardConfig(**settings("reward", **pairs, demonstrations=data["demonstrations"])))
    dpo = run_dpo(DPOConfig(**settings("dpo", **pairs)))
    sizes = {"total_updates": 2, "rollout_batch_size": 4, "num_mini_batches": 2, "max_new_tokens": 8, "num_ppo_epochs": 1}
    given = {"model": str(sft), "reward_model": str(reward), "prompts": data["prompts"]}
    ppo = run_ppo(PPOConfig(**settings("ppo", **given, **sizes)))
    return Trained(start, Path(sft), Path(reward), Path(ppo), Path(dpo))


def every(specimens: list[Specimen]) -> list[pytest.param]:
    """Full fine-tuning of one for each habit; in the full run all of them, and LoRA."""
    return [
        pytest.param(
            (specimen, rank),
            id=f"{specimen.name}-{rank or 'full'}",
            marks=[pytest.mark.slow] * bool(rank or not specimen.core),
        )
        for specimen in specimens
        for rank in (0, 4)
    ]


def in_transformers(folder: Path, base: Path, classifier: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A saved folder as transformers and PEFT load it."""
    seq2seq = AutoConfig.from_pretrained(base).is_encoder_decoder
    auto = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    more = {"dtype": torch.float32}
    if classifier:
        auto, more["num_labels"] = AutoModelForSequenceClassification, 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not (folder / "adapter_config.json").exists():
        return auto.from_pretrained(folder, **more).eval(), tokenizer
    inner = auto.from_pretrained(base, **more)
    inner.config.pad_token_id = tokenizer.pad_token_id  # docs/howto/reward-elsewhere.md: an adapter has no config of its own
    return PeftModel.from_pretrained(inner, folder).eval(), tokenizer


def encoded(tokenization, question: str, answer: str):
    """A prompt, its answer, and the example that training reads."""
    prompt, turn = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    (example,) = encode_demonstration(tokenization, Demonstration(prompt=(prompt,), continuation=(turn,)), one_row=True)
    return prompt, turn, example


@pytest.mark.parametrize("trained", every(TRAINED), indirect=True)
class TestTrainedFromSpecimens:
    def test_the_first_ratio_is_one_and_the_first_kl_is_zero(self, trained: Trained) -> None:
        first = read_rows(trained.ppo.parent / "metrics.jsonl")[0]
        assert first["kl/k1"] == pytest.approx(0, abs=1e-5)
        assert first["kl/k3"] == pytest.approx(0, abs=1e-5)

    def test_transformers_reads_what_training_read(self, trained: Trained) -> None:
        loaded = load(ModelConfig(model=str(trained.sft), dtype="float32"), torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(trained.sft)
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
            prompt, turn, example = encoded(loaded.tokenization, question, answer)
            whole = tokenizer.apply_chat_template([prompt, turn], return_dict=False)
            if loaded.backbone.model.config.is_encoder_decoder:  # the encoder's text is closed behind the prompt
                asked = tokenizer.apply_chat_template([prompt], add_generation_prompt=True, return_dict=False)
                assert asked == example.prompt
                assert tokenizer.decode(example.response) == answer + tokenizer.eos_token
            else:
                read = example.prompt + example.response
                assert read == whole[: len(read)]
                assert not tokenizer.decode(whole[len(read) :]).strip()

    def test_transformers_generates_what_is_sampled_here(self, trained: Trained) -> None:
        for folder in (trained.sft, trained.ppo, trained.dpo):
            loaded = load(ModelConfig(model=str(folder), dtype="float32"), torch.float32)
            loaded.backbone.eval()
            model, tokenizer = in_transformers(folder, trained.source)
            settings = SamplingParams(16, temperature=0.0)
            prompts = [loaded.tokenization.prompt_ids(({"role": "user", "content": text},)) for text in QUESTIONS]
            uniforms = row_uniforms(len(prompts), settings, 0, RngStream.SAMPLE_COMMAND)
            found = sample(loaded.backbone, prompts, uniforms, settings, loaded.tokenization.end_ids)
            ends, listed = (GenerationConfig.from_pretrained(each).eos_token_id for each in (folder, trained.source))
            assert set(ends) >= set(listed if isinstance(listed, list) else [listed])
            for text, prompt, ids in zip(QUESTIONS, prompts, found.ids, strict=True):
                given = tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
                )
                assert given["input_ids"][0].tolist() == prompt
                limits = GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=ends, pad_token_id=0)
                whole = model.generate(**given, generation_config=limits)[0].tolist()
                answer = whole[1:] if model.config.is_encoder_decoder else whole[len(prompt) :]
                assert answer == ids

    def test_transformers_scores_as_here(self, trained: Trained) -> None:
        reward = load_reward_model(str(trained.reward), "float32")
        if reward.loaded.backbone.model.config.is_encoder_decoder:
            return  # transformers' classifier of T5 has a head with a hidden layer: there is no file to compare with
        classifier, _ = in_transformers(trained.reward, trained.source, classifier=True)
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
            _, _, example = encoded(reward.loaded.tokenization, question, answer)
            with torch.no_grad():
                there = float(classifier(input_ids=torch.tensor([example.prompt + example.response])).logits)
                found = float(reward.model(Padded.from_lists([example.prompt]), Padded.from_lists([example.response])))
            assert found == pytest.approx(there, abs=1e-4)

    def test_cards_name_no_path(self, trained: Trained) -> None:
        for folder in (trained.sft, trained.reward, trained.ppo, trained.dpo):
            head = yaml.safe_load(re.match(r"---\n(.*?)---\n", (folder / "README.md").read_text(), re.S).group(1))
            assert "base_model" not in head  # the base is a local folder, which means nothing elsewhere

    def test_evaluations_run(self, trained: Trained, data: dict[str, str], tmp_path: Path) -> None:
        common = {"dtype": "float32", "limit": 2, "models": [str(trained.sft), str(trained.ppo)]}
        sampled = {"prompts": data["prompts"], "max_new_tokens": 4}
        judged = common | sampled | {"reward_model": str(trained.reward)}
        scorer = "tests.badly_behaved.test_every_stage:no_toxicity"
        out = {name: str(tmp_path / name) for name in ("reward", "truthfulness", "winrate", "toxicity")}
        run_reward_eval(RewardEvalConfig(**judged, preferences=data["pairs"], samples=2, output=out["reward"]))
        run_truthfulness(TruthfulnessConfig(**common, output=out["truthfulness"]))
        run_winrate(WinrateConfig(**judged, output=out["winrate"]))
        run_toxicity(ToxicityConfig(**common, **sampled, scorer=scorer, samples=2, output=out["toxicity"]))
        for name in out:
            assert list((tmp_path / name).rglob("*.json*"))


def no_toxicity(texts: list[str]) -> list[float]:
    """A scorer for the test above."""
    return [0.0 for _ in texts]


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo"])
@pytest.mark.parametrize("specimen", [each for each in SPECIMENS if each.refused], ids=lambda each: each.name)
def test_what_cannot_be_trained_is_refused_in_one_line(specimen, stage, source, data, tmp_path) -> None:
    common = run_settings(tmp_path / "run", model=str(source(specimen)))
    ppo = {"prompts": data["prompts"], "reward_functions": ["tests.extras.running:code_points"], "total_updates": 1}
    run, kind, more = {
        "sft": (run_sft, SFTConfig, {"train_data": data["demonstrations"]}),
        "reward": (run_reward, RewardConfig, {"train_data": data["pairs"]}),
        "dpo": (run_dpo, DPOConfig, {"train_data": data["pairs"]}),
        "ppo": (run_ppo, PPOConfig, ppo),
    }[stage]
    with pytest.raises(UserError, match=specimen.refused) as found:
        run(kind(**common, **more))
    assert "\n" not in str(found.value)
