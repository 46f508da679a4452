"""Measures judges of answers on questions and on groups of answers that they were not trained on.

    python -m benchmarks.truthfulness_judge --data FOLDER

FOLDER holds TruthfulQA.csv, truthfulqa-finetune-truth.jsonl.gz and truthfulqa-finetune-info.jsonl.gz of TruthfulQA (Lin et
al. 2021, Apache-2.0). The files of labeled answers hold the reference answers, which people wrote, and one answer of each of
19 models to each question (sections 3.1 and 3.3), shuffled and without the models' names.

`recover_groups` sorts the models' answers into 19 groups of one answer per question, by style alone: hard EM for a mixture
of Bernoulli distributions over frequent words, first words, length, case and punctuation, with annealing. Labels are not
used. The groups are proxies for the models, which cannot be verified. Each answer is then scored by a judge trained without
its question and its group: both questions and groups are split into folds, and one judge is trained for each pair of folds.
"""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_matrix
from scipy.special import expit
from scipy.stats import kendalltau, spearmanr
from sklearn.metrics import adjusted_rand_score

from align.core.statistics import resample, roc_auc
from align.eval.answer_features import AnswerFeatures, Encode, SentenceEncoder
from align.eval.questions import Question
from align.eval.truthfulness_judge import (
    Aspect,
    LabeledAnswer,
    features_of,
    fit_judge,
    is_reference,
    judge_logits,
    labels_of,
    match_references,
    read_labeled_answers,
)

MODELS = 19
"""GPT-3 in 4 sizes and with 5 other prompts, GPT-Neo and GPT-J in 4, GPT-2 in 2 and UnifiedQA in 4."""
REFERENCE, UNASSIGNED = -1, -2
STARTS = 3
"""Number of random starts of the mixture to compare."""
FREQUENT = 25
"""Minimum number of questions with a style feature in an answer. Rarer features indicate a topic."""
SENTENCE_END = re.compile(r"[.!?](?:\s|$)")
STEPS, ANNEALED, TEMPERATURE, PRIOR = 25, 15, 9.0, 20.0


def style(question: str, answer: str) -> set[str]:
    """Return the style of an answer as named features."""
    words, asked = re.findall(r"\w+|[^\w\s]", answer), set(re.findall(r"\w+", question.lower()))
    repeated = [word.lower() in asked for word in words]
    case = "lower" if answer == answer.lower() else "upper" if answer[0].isupper() else "mixed"
    features = {
        f"case {case}",
        f"ends with {'a letter' if answer[-1:].isalnum() else answer[-1:]}",
        f"length {min(9, int(1.6 * np.log2(1 + len(words))))}",
        f"sentences {min(4, len(SENTENCE_END.findall(answer)))}",
        f"several lines {len(answer.splitlines()) > 1}",
        f"repeats {round(5 * float(np.mean(repeated))) if words else 9}",
        f"new from {repeated[:6].index(False) if False in repeated[:6] else 6}",
    }
    features |= {f"first {count} {' '.join(words[:count])}" for count in (1, 2, 3)}
    return features | {f"word {word}" for word in words} | {f"pair {' '.join(pair)}" for pair in pairwise(words)}


def recover_groups(rows: Sequence[LabeledAnswer], references: dict[str, Question], seed: int = 0) -> np.ndarray:
    """Return the group [N] of each answer: 0 to 18, REFERENCE for one copy of each reference answer, or UNASSIGNED."""
    group = np.full(len(rows), UNASSIGNED)
    answers_to: dict[str, list[int]] = defaultdict(list)
    left = {name: {_plain(answer) for answer in question.answers} for name, question in references.items()}
    for number, row in enumerate(rows):
        plain = _plain(row.answer)
        if plain in left.get(row.question, ()):
            left[row.question].remove(plain)
            group[number] = REFERENCE
        else:
            answers_to[row.question].append(number)
    numbers = np.flatnonzero(group == UNASSIGNED)
    styles = _style_matrix([rows[number] for number in numbers])
    place = {number: index for index, number in enumerate(numbers)}
    members = [np.array([place[number] for number in part]) for part in answers_to.values()]
    group[numbers] = _constrained_mixture(styles, members, seed)
    return group


def _plain(answer: str) -> str:
    return " ".join(re.findall(r"\w+", answer.lower()))


def _style_matrix(rows: Sequence[LabeledAnswer]) -> csr_matrix:
    styles = [style(row.question, row.answer) for row in rows]
    questions_with: dict[str, set[str]] = defaultdict(set)
    for row, features in zip(rows, styles, strict=True):
        for name in features:
            questions_with[name].add(row.question)
    names = sorted(name for name, questions in questions_with.items() if len(questions) >= FREQUENT)
    column = {name: index for index, name in enumerate(names)}
    places = [(row, column[name]) for row, features in enumerate(styles) for name in features if name in column]
    return csr_matrix((np.ones(len(places)), tuple(zip(*places, strict=True))), shape=(len(rows), len(names)))


def _constrained_mixture(styles: csr_matrix, members: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """Return the component [N] of each row, or UNASSIGNED. Each of `members` has at most one row per component."""
    random, component = np.random.default_rng(seed), np.full(styles.shape[0], UNASSIGNED)
    for rows in members:
        chosen = random.permutation(rows)[:MODELS]
        component[chosen] = np.arange(len(chosen))
    mean = np.asarray(styles.mean(0)).ravel()
    for step in range(STEPS):
        assigned = np.flatnonzero(component >= 0)
        one_hot = csr_matrix((np.ones(len(assigned)), (component[assigned], assigned)), shape=(MODELS, styles.shape[0]))
        counts, sizes = (one_hot @ styles).toarray(), np.asarray(one_hot.sum(1))
        probability = ((counts + PRIOR * mean) / (sizes + PRIOR)).clip(1e-5, 1 - 1e-5)
        scores = styles @ (np.log(probability) - np.log1p(-probability)).T + np.log1p(-probability).sum(1)
        scores += random.gumbel(size=scores.shape) * TEMPERATURE * max(0.0, 1 - step / ANNEALED)
        component[:] = UNASSIGNED
        for rows in members:
            first, second = linear_sum_assignment(-scores[rows])
            component[rows[first]] = second
    return component


def agreement_of_starts(rows: Sequence[LabeledAnswer], references: dict[str, Question]) -> list[float]:
    """Return the adjusted Rand index of the groups from each pair of random starts."""
    starts = [recover_groups(rows, references, seed) for seed in range(STARTS)]
    grouped = np.all([group >= 0 for group in starts], axis=0)
    return [float(adjusted_rand_score(first[grouped], second[grouped])) for first, second in combinations(starts, 2)]


def crossed_logits(
    features: AnswerFeatures, labels: np.ndarray, questions: np.ndarray, group: np.ndarray, folds: int
) -> np.ndarray:
    """Return each answer's logit [N] from a judge trained on other questions and groups, or NaN for answers in no group."""
    random = np.random.default_rng(0)
    question_fold = (random.permutation(questions.max() + 1) % folds)[questions]
    group_fold = np.where(group >= 0, (random.permutation(MODELS) % folds)[group], -1)
    logits = np.full(len(labels), np.nan)
    for first in range(folds):
        for second in range(folds):
            test = (question_fold == first) & (group_fold == second)
            learned = np.flatnonzero((question_fold != first) & (group_fold != second))
            weights = fit_judge(features.rows(learned), labels[learned], [str(number) for number in questions[learned]])
            logits[test] = judge_logits(weights, features.rows(np.flatnonzero(test)))
            print(
                f"  fold {first}.{second}: AUC {roc_auc(logits[test], labels[test]):.3f} on {test.sum()} answers", flush=True
            )
    return logits


def report(logits: np.ndarray, labels: np.ndarray, questions: np.ndarray, group: np.ndarray) -> None:
    """Print the AUC over all answers, and the agreement between judged and human rates of the groups."""
    rows_of = [np.flatnonzero(questions == number) for number in range(questions.max() + 1)]

    def by_group(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.bincount(group[rows], values[rows], MODELS) / np.bincount(group[rows], minlength=MODELS)

    def statistics(rows: np.ndarray) -> list[float]:
        people, judged = by_group(labels.astype(float), rows), by_group((logits > 0).astype(float), rows)
        mean = by_group(expit(logits), rows)
        found = [roc_auc(logits[rows], labels[rows]), ((logits > 0) == labels)[rows].mean()]
        found += [spearmanr(judged, people)[0], spearmanr(mean, people)[0]]
        return [*found, kendalltau(judged, people)[0], float(np.abs(judged - people).mean())]

    everything = np.concatenate(rows_of)

    def of_questions(drawn: np.ndarray) -> np.ndarray:
        return np.array([statistics(np.concatenate([rows_of[number] for number in row])) for row in drawn])

    low, high = np.percentile(resample(of_questions, len(rows_of), resamples=100), [2.5, 97.5], axis=0)
    names = ("AUC", "accuracy", "Spearman of shares", "Spearman of mean probabilities", "Kendall of shares")
    for index, name in enumerate((*names, "mean difference of shares")):
        print(f"  {name} {statistics(everything)[index]:.3f} ({low[index]:.3f} to {high[index]:.3f})", flush=True)
    people, judged = by_group(labels.astype(float), everything), by_group((logits > 0).astype(float), everything)
    pairs = ", ".join(f"{people[number]:.2f} {judged[number]:.2f}" for number in np.argsort(people))
    print(f"  share by people and by the judge, each group: {pairs}", flush=True)


def labeled_answers(folder: Path, aspect: Aspect) -> tuple[list[LabeledAnswer], dict[str, Question]]:
    """Return the labeled answers in sorted order, because the files differ in order, and the reference answers."""
    read = read_labeled_answers(str(folder / f"truthfulqa-finetune-{aspect}.jsonl.gz"), aspect)
    rows = sorted(read, key=lambda row: (row.question, row.answer))
    return rows, match_references(rows, str(folder / "TruthfulQA.csv"))


def measure(folder: Path, aspect: Aspect, encode: Encode, folds: int) -> None:
    """Measure a judge of one aspect."""
    rows, references = labeled_answers(folder, aspect)
    group = recover_groups(rows, references)
    questions = np.unique([row.question for row in rows], return_inverse=True)[1]
    labels = labels_of(rows)
    sizes = Counter(group.tolist())
    print(
        f"{aspect}: {len(rows)} answers, {sizes[REFERENCE]} of them references, {sizes[UNASSIGNED]} in no group", flush=True
    )
    logits = crossed_logits(features_of(rows, references, encode), labels, questions, group, folds)
    repeats = np.array([is_reference(row, references) for row in rows])
    for name, kept in (("all answers in groups", group >= 0), ("without repeated references", (group >= 0) & ~repeats)):
        print(f"{aspect}, {name}: {kept.sum()}")
        report(logits[kept], labels[kept], questions[kept], group[kept])


def main() -> None:
    """Measure the judges of both aspects."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with TruthfulQA's three files")
    parser.add_argument("--folds", type=int, default=5, help="folds of the questions, and of the groups")
    parser.add_argument("--starts", action="store_true", help="compare the groups of several random starts, train no judge")
    arguments = parser.parse_args()
    if arguments.starts:
        rows, references = labeled_answers(arguments.data, "truth")
        indices = ", ".join(f"{index:.2f}" for index in agreement_of_starts(rows, references))
        print(f"adjusted Rand index of the groups, each pair of {STARTS} random starts: {indices}")
        return
    encode = SentenceEncoder("minilm-l6")
    aspects: tuple[Aspect, ...] = ("truth", "info")
    for aspect in aspects:
        measure(arguments.data, aspect, encode, arguments.folds)


if __name__ == "__main__":
    main()
