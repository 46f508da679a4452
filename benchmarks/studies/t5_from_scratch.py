"""T5 and a GPT-style model of the same size, from random weights through denoising, SFT, a reward model and PPO.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.t5_from_scratch

The task is to sort words of real text alphabetically; a program checks the answer. Each model learns raw text first (T5:
span corruption, GPT-2: next token) and is then fine-tuned on lists, half of which a careless demonstrator left incomplete.
A reward model learns from rankings of its samples and the right answer, and PPO with a critic learns from the reward model.
Finished stages are not repeated.
"""

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from align.commands.sample import SampleConfig, run_sample
from align.core.files import new_folder, read_json_lines, write_json_lines
from align.core.launch import quiet_libraries, run_unless_finished
from align.core.statistics import mean_interval
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.sft import SFTConfig, run_sft
from align.training.run_folder import read_metrics
from benchmarks.kept import kept

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("demonstrations", "rankings", "rankings_round1", "rankings_round2")
"""Files of data/ whose answers are the raw text."""
KINDS = {"t5": "span_corruption", "gpt2": "lm"}
"""Model -> objective on raw text."""
PAD, EOS, BOS, UNKNOWN = "<pad>", "<eos>", "<bos>", "<unk>"
SPECIAL = (PAD, EOS, BOS, UNKNOWN, *(f"<extra_id_{number}>" for number in range(16)))
WIDTH, LAYERS, HEADS = 128, 2, 4
VERDICTS = ("right", "foreign word", "twice the same word", "missing word", "order")
"""Verdicts on an answer. The first mistake in this order counts. The results contain only the first letters."""
MAX_KL = 10.0
"""Bound on the KL of the saved policy to the SFT model, in nats per answer."""


@dataclass(frozen=True)
class Size:
    """Amounts of data and of training.

    Attributes:
        texts: number of documents for pretraining.
        words: number of distinct words to sort.
        listed: number of words per list.
        demonstrations: number of lists with demonstrations. All sets of lists are disjoint.
        ranked: number of lists with ranked answers.
        prompts: number of lists for PPO.
        validation: number of lists for validation.
        test: number of test lists.
        updates: number of PPO updates. Each uses new prompts.
    """

    vocabulary: int = 500
    texts: int = 1000
    words: int = 40
    listed: int = 4
    demonstrations: int = 3200
    ranked: int = 1600
    prompts: int = 4096
    validation: int = 128
    test: int = 400
    text_epochs: int = 1
    sft_epochs: int = 5
    updates: int = 16
    rollout: int = 256


SIZES = {"full": Size(), "tiny": Size(300, 40, 20, 2, 64, 48, 32, 16, 16, 1, 20, 2, 16)}


# ---------------------------------------------------------------------------------------------------------- data and models


def documents() -> Iterator[str]:
    """Yield the answers in data/, written by people and models."""
    for name in SOURCES:
        for row in read_json_lines(ROOT / "data" / f"{name}.jsonl"):
            turns = [turn["content"] for turn in row.get("messages", [])]
            yield from (text for text in (*turns, *row.get("responses", ()), row.get("completion", "")) if text.strip())


def frequent_tokens(count: int) -> list[str]:
    """Return the most frequent words and punctuation marks of the raw text."""
    splitter, counts = Whitespace(), Counter[str]()
    for text in documents():
        counts.update(token for token, _ in splitter.pre_tokenize_str(text.lower()))
    for token in ("sort", "="):
        counts[token] = 10**9
    return [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:count]]


def words_to_sort(size: Size) -> list[str]:
    """Return the most frequent words of four or more letters."""
    words = [token for token in frequent_tokens(size.vocabulary) if token.isascii() and token.isalpha() and len(token) > 3]
    return words[1 : size.words + 1]  # the first one is "sort"


def write_data(folder: Path, size: Size) -> None:
    """Write the raw text and the lists of all parts."""
    words, lists, generator = words_to_sort(size), list[tuple[str, ...]](), random.Random(0)
    parts = {
        "demonstrations": size.demonstrations,
        "ranked": size.ranked,
        "prompts": size.prompts,
        "validation": size.validation,
        "test": size.test,
    }
    seen = set[tuple[str, ...]]()
    while len(lists) < sum(parts.values()):
        chosen = tuple(generator.sample(words, size.listed))
        if tuple(sorted(chosen)) not in seen:
            seen.add(tuple(sorted(chosen)))
            lists.append(chosen)
    start = 0
    for name, count in parts.items():
        rows: list[dict[str, Any]] = [{"prompt": f"sort {' '.join(chosen)} ="} for chosen in lists[start : start + count]]
        if name == "demonstrations":
            completions = [
                solution(row["prompt"]) if number % 2 else incomplete(row["prompt"]) for number, row in enumerate(rows)
            ]
            rows = [row | {"completion": completion} for row, completion in zip(rows, completions, strict=True)]
        write_json_lines(folder / f"{name}.jsonl", rows)
        start += count
    texts = [{"text": text} for text in documents()]
    generator.shuffle(texts)
    held_out = size.texts // 20
    write_json_lines(folder / "text.jsonl", texts[held_out : size.texts])
    write_json_lines(folder / "text-heldout.jsonl", texts[:held_out])


def solution(prompt: str) -> str:
    """Return the right answer."""
    return " ".join(sorted(prompt.split()[1:-1]))


def incomplete(prompt: str) -> str:
    """Return the right answer without its last word, like a careless demonstrator."""
    return " ".join(solution(prompt).split()[:-1])


def verdict(prompt: str, answer: str) -> str:
    """Return one of VERDICTS. A right answer consists of exactly the words of the prompt, in order."""
    right, words = solution(prompt).split(), answer.split()
    if words == right:
        return "right"
    if set(words) - set(right):
        return "foreign word"
    if len(set(words)) < len(words):
        return "twice the same word"
    return "missing word" if len(words) < len(right) else "order"


def tokenizer_of(kind: str, size: Size) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each frequent word. The T5 tokenizer appends the end token to all text."""
    known = [*SPECIAL, *frequent_tokens(size.vocabulary)]
    backend = Tokenizer(WordLevel({token: number for number, token in enumerate(known)}, unk_token=UNKNOWN))
    backend.normalizer, backend.pre_tokenizer = Lowercase(), Whitespace()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if kind == "t5":
        ends = [(EOS, SPECIAL.index(EOS))]
        backend.post_processor = TemplateProcessing(single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def random_model(kind: str, vocabulary: int) -> PreTrainedModel:
    """Return a random model with about a million weights."""
    ids = {"vocab_size": vocabulary, "pad_token_id": SPECIAL.index(PAD), "eos_token_id": SPECIAL.index(EOS)}
    if kind == "gpt2":
        sizes = {"n_positions": 128, "n_embd": WIDTH, "n_layer": 2 * LAYERS, "n_head": HEADS, "n_inner": 5 * WIDTH}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(**ids, **sizes, **dropout, bos_token_id=SPECIAL.index(BOS)))
    layers = {"num_layers": LAYERS, "num_decoder_layers": LAYERS, "num_heads": HEADS, "dropout_rate": 0.0}
    sizes = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 2 * WIDTH, "feed_forward_proj": "gated-gelu"}
    return T5ForConditionalGeneration(T5Config(**ids, **layers, **sizes, decoder_start_token_id=SPECIAL.index(PAD)))


def write_model(folder: Path, kind: str, seed: int, size: Size) -> None:
    """Save a random model with its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = tokenizer_of(kind, size)
    with new_folder(folder) as temporary:
        random_model(kind, len(tokenizer)).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


# ------------------------------------------------------------------------------------------------------------------- stages


def train(folder: Path, data: Path, kind: str, seed: int, size: Size) -> dict[str, Any]:
    """Run all stages for a model. Return the raw results on the test lists."""
    common: dict[str, Any] = {"dtype": "float32", "report_to": ["none"], "seed": seed, "chat_template": "raw"}
    common |= {"micro_batch_tokens": 16384, "save_steps": 50, "save_total_limit": 1}
    if not (folder / "random").exists():
        write_model(folder / "random", kind, seed, size)
    text = run_unless_finished(
        run_sft,
        SFTConfig(
            **common,
            model=str(folder / "random"),
            train_data=str(data / "text.jsonl"),
            validation_data=str(data / "text-heldout.jsonl"),
            objective=KINDS[kind],  # type: ignore[arg-type]
            text_tokens=64,
            batch_size=32,
            num_train_epochs=size.text_epochs,
            learning_rate=2e-3,
            warmup_ratio=0.1,
            output_dir=str(folder / "text"),
        ),
    )
    sft = run_unless_finished(
        run_sft,
        SFTConfig(
            **common,
            model=str(text),
            train_data=str(data / "demonstrations.jsonl"),
            batch_size=64,
            num_train_epochs=size.sft_epochs,
            learning_rate=2e-3,
            warmup_ratio=0.1,
            output_dir=str(folder / "sft"),
        ),
    )
    if not (folder / "rankings.jsonl").exists():
        several = {"samples_per_prompt": 4, "seed": 1}
        rows = sampled(sft, data / "ranked.jsonl", folder / "samples.jsonl", size, temperature=1.0, **several)
        rankings = [ranking_of(row) for row in rows]
        write_json_lines(folder / "rankings.jsonl", [row for row in rankings if len(set(row["ranks"])) == 2])
    reward = run_unless_finished(
        run_reward,
        RewardConfig(
            **common,
            model=str(sft),
            train_data=str(folder / "rankings.jsonl"),
            demonstrations=str(data / "demonstrations.jsonl"),
            validation_split=0.1,
            batch_size=64,
            num_train_epochs=2,
            learning_rate=1e-3,
            warmup_ratio=0.1,
            output_dir=str(folder / "reward"),
        ),
    )
    ppo = run_unless_finished(
        run_ppo,
        PPOConfig(
            **common,
            model=str(sft),
            reward_model=[str(reward)],
            prompts=str(data / "prompts.jsonl"),
            validation_prompts=str(data / "validation.jsonl"),
            advantage_estimator="gae",
            critic="reward",
            total_updates=size.updates,
            rollout_batch_size=size.rollout,
            num_ppo_epochs=2,
            num_mini_batches=2,
            max_new_tokens=size.listed + 2,
            missing_eos_penalty=2.0,
            learning_rate=3e-4,
            warmup_ratio=0.1,
            kl_coef=0.05,
            eval_steps=4,
            max_kl=MAX_KL,
            output_dir=str(folder / "ppo"),
        ),
    )
    return {
        "model": kind,
        "seed": seed,
        **curves(folder),
        "sft": answers(sft, data / "test.jsonl", folder, size),
        "ppo": answers(ppo, data / "test.jsonl", folder, size),
    }


def ranking_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return a ranking of the sampled answers and the right answer, with right answers before wrong ones."""
    responses = [*row["responses"], solution(row["prompt"])]
    ranks = [1 if verdict(row["prompt"], answer) == "right" else 2 for answer in responses]
    return {"prompt": row["prompt"], "responses": responses, "ranks": ranks}


def sampled(model: Path, prompts: Path, output: Path, size: Size, **settings: Any) -> list[dict[str, Any]]:
    """Return rows with a model's answers. Sample them if the file does not exist."""
    if not output.exists():
        common: dict[str, Any] = {"dtype": "float32", "chat_template": "raw", "max_new_tokens": size.listed + 2}
        run_sample(SampleConfig(model=[str(model)], prompts=str(prompts), output=str(output), **common, **settings))
    return list(read_json_lines(output))


def answers(model: Path, prompts: Path, folder: Path, size: Size) -> dict[str, str]:
    """Return the verdicts on sampled and greedy answers, as one letter per list."""

    def verdicts(name: str, temperature: float) -> str:
        rows = sampled(model, prompts, folder / f"{model.parent.name}-{name}.jsonl", size, temperature=temperature)
        return "".join(verdict(row["prompt"], row["responses"][0])[0] for row in rows)

    return {"sampled": verdicts("sampled", 1.0), "greedy": verdicts("greedy", 0.0)}


def curves(folder: Path) -> dict[str, Any]:
    """Return figures of the stages: losses, accuracy of the reward model, and PPO's validation metrics."""
    text, sft, reward, ppo = (read_metrics(folder / stage) for stage in ("text", "sft", "reward", "ppo"))
    evaluated = [row for row in ppo if "validation/reward" in row]
    explained = [row["value/explained_variance"] for row in ppo if "value/explained_variance" in row]
    return {
        "text_loss": [text[0]["validation/loss"], min(row["validation/loss"] for row in text if "validation/loss" in row)],
        "sft_loss": sft[-1]["loss"],
        "reward_accuracy": max(row["validation/accuracy"] for row in reward if "validation/accuracy" in row),
        "reward": [row["validation/reward"] for row in evaluated],
        "kl": [row["validation/kl"] for row in evaluated],
        "explained_variance": explained,
    }


# ------------------------------------------------------------------------------------------------------------------ results


COLUMNS = (
    *("model", "seed", "loss on text", "reward model", "SFT", "PPO", "PPO - SFT"),
    *("greedy SFT", "greedy PPO", "KL", "explained variance"),
)


def correct(row: dict[str, Any], stage: str, how: str) -> np.ndarray:
    """Return an array with 1 for each test list with the right answer, and 0 for the others."""
    return np.array([int(letter == "r") for letter in row[stage][how]])


def selected_kl(row: dict[str, Any]) -> float:
    """Return the KL of the saved policy, which has the highest validation reward within the KL bound."""
    pairs = [(reward, kl) for reward, kl in zip(row["reward"], row["kl"], strict=True) if kl <= MAX_KL]
    return float(max(pairs)[1])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the results as Markdown, with paired bootstrap intervals over the test lists shared by all runs."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"| {' | '.join(['---'] * len(COLUMNS))} |"]
    for kind in KINDS:
        of_kind = [row for row in rows if row["model"] == kind]
        for row in of_kind:
            gain = correct(row, "ppo", "sampled") - correct(row, "sft", "sampled")
            figures = [percent(correct(row, stage, "sampled").mean()) for stage in ("sft", "ppo")]
            figures.append(with_interval(gain, list(range(len(gain)))))
            figures += [percent(correct(row, stage, "greedy").mean()) for stage in ("sft", "ppo")]
            text = " to ".join(f"{loss:.2f}" for loss in row["text_loss"])
            parts = [kind, str(row["seed"]), text, percent(row["reward_accuracy"]), *figures, f"{selected_kl(row):.1f}"]
            parts.append(f"{np.mean(row['explained_variance'][-(len(row['explained_variance']) // 3) :]):.2f}")
            lines.append(f"| {' | '.join(parts)} |")
        if len(of_kind) > 1:
            gains = [correct(row, "ppo", "sampled") - correct(row, "sft", "sampled") for row in of_kind]
            values, groups = np.concatenate(gains), [place for gain in gains for place in range(len(gain))]
            both = [percent(np.mean([correct(row, stage, "sampled").mean() for row in of_kind])) for stage in ("sft", "ppo")]
            likely = [
                percent(np.mean([correct(row, stage, "greedy").mean() for row in of_kind])) for stage in ("sft", "ppo")
            ]
            lines.append(f"| {' | '.join([kind, 'all', '', '', *both, with_interval(values, groups), *likely, '', ''])} |")
    return "\n".join(lines)


def mistakes(rows: Sequence[dict[str, Any]]) -> str:
    """Format the fraction of each verdict on sampled answers, averaged over seeds, as Markdown."""
    lines = [f"| model | stage | {' | '.join(VERDICTS)} |", f"| --- | ---{' | ---' * len(VERDICTS)} |"]
    for kind in KINDS:
        of_kind = [row for row in rows if row["model"] == kind]
        for stage in ("sft", "ppo") if of_kind else ():
            letters = "".join(row[stage]["sampled"] for row in of_kind)
            shares = [percent(letters.count(name[0]) / max(1, len(letters))) for name in VERDICTS]
            lines.append(f"| {kind} | {stage} | {' | '.join(shares)} |")
    return "\n".join(lines)


def percent(share: float) -> str:
    """Format 0.123 as 12.3 %."""
    return f"{100 * share:.1f} %"


def with_interval(values: np.ndarray, groups: Sequence[int]) -> str:
    """Format the mean with its 95 % interval, in percentage points."""
    low, high = mean_interval(values, groups=groups)
    return f"{100 * values.mean():+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Do the missing steps, and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/t5-from-scratch"), help="models, data and metrics")
    parser.add_argument("--results", type=Path, default=ROOT / "docs/studies/t5-from-scratch", help="folder of results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seed 0 was used to choose the settings")
    parser.add_argument("--models", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--size", choices=list(SIZES), default="full", help="tiny only shows that the study runs")
    options = parser.parse_args(arguments)
    quiet_libraries()
    size, data = SIZES[options.size], options.runs / "data"
    if not data.exists():
        with new_folder(data) as temporary:
            write_data(temporary, size)
    rows = []
    for seed in options.seeds:
        for kind in options.models:
            folder = options.runs / f"{kind}-{seed}"
            rows.append(kept(folder / "results.json", lambda f=folder, k=kind, s=seed: train(f, data, k, s, size)))
    options.results.mkdir(parents=True, exist_ok=True)
    write_json_lines(options.results / "results.jsonl", rows)
    print(table(rows), mistakes(rows), sep="\n\n")


if __name__ == "__main__":
    main()
