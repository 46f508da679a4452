"""Over-optimization of a learned reward (Gao et al. 2022), with one proxy and with an ensemble's worst case.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.overoptimization --sft runs/demo/sft/model [--seeds 0 1 2]

A gold model ranks a pair of answers to each prompt; proxies are trained on those pairs, with a share of them reversed
(Coste et al. 2024, arXiv 2310.02743: a quarter). PPO climbs a proxy, or the lowest of three (`wco`), nearly without a KL
penalty. The gold model and the shipped judge, which was trained on a part of the gold model's labels, only evaluate. Best of
n by the same proxies is the baseline.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from align.core.files import read_json, read_json_lines, write_json
from align.core.launch import quiet_libraries, run_unless_finished
from align.core.statistics import mean_interval
from align.eval.reward import RewardEvalConfig, run_reward_eval
from align.extras.loop_labels import ModelScorer
from align.ppo import PPOConfig, run_ppo
from align.training.run_folder import read_metrics
from benchmarks.kept import kept
from benchmarks.studies.gold import SIZES, GoldLabels, Row
from benchmarks.studies.runner import study_arguments

MEMBERS = 3
Condition = tuple[str, float]
"""How rewards are combined, and the share of wrong labels."""
CONDITIONS: tuple[Condition, ...] = (("single", 0.25), ("wco", 0.25), ("single", 0.0))
Point = dict[str, float]


def main() -> None:
    """Do the steps that are not done yet, and write figures.json and curves.svg."""
    parser = study_arguments(__doc__, "overoptimization", seeds=3)
    parser.set_defaults(samples=16, runs=Path("runs/gold-studies"))
    parser.add_argument("--size", choices=list(SIZES), default="smollm2-135m", help="the settings of the stages")
    parser.add_argument("--limit", type=int, default=0, help="prompts of each part; 0: all")
    options = parser.parse_args()
    quiet_libraries()
    labels = GoldLabels(options.sft, options.runs, options.size, options.limit)
    labels.prepare()
    for seed in options.seeds:
        for condition in CONDITIONS:
            run = labels.runs / name_of(condition, seed)
            train_policy(labels, condition, seed)
            kept(run / "judged.json", lambda run=run: judge_answers(run, options.judge))
        curve = labels.runs / f"best-of-n-seed{seed}.json"
        kept(curve, lambda seed=seed: best_of_n(labels, seed, options.samples))
        write_figures(labels.runs, options.results, options.seeds)


def name_of(condition: Condition, seed: int) -> str:
    """The folder of a run of PPO."""
    rule, noise = condition
    return f"{rule}-noise{noise:g}-seed{seed}"


def train_policy(labels: GoldLabels, condition: Condition, seed: int) -> None:
    """PPO on one proxy or on the lowest of several; the gold model judges its answers to the held-out prompts."""
    rule, noise = condition
    models = labels.proxies(noise, seed, 1 if rule == "single" else MEMBERS)
    rewards: dict[str, object] = {"reward_model": models[0]}
    if len(models) > 1:
        rewards = {"reward_model": models, "reward_ensemble": rule}
    more = {
        "model": labels.sft,
        "prompts": labels.runs / "train-prompts.jsonl",
        "validation_prompts": labels.runs / "held-out-prompts.jsonl",
        "selection.reward_model": labels.model,
        "output_dir": labels.runs / name_of(condition, seed),
        "seed": seed,
    }
    run_unless_finished(run_ppo, labels.settings(PPOConfig, "ppo", **rewards, **more, **labels.size.ppo))


def best_of_n(labels: GoldLabels, seed: int, samples: int) -> list[Point]:
    """The curve of the first noisy proxy of a seed; the answers are the same for all seeds, and sampled once."""
    (proxy,) = labels.proxies(0.25, seed, 1)
    config = labels.settings(
        RewardEvalConfig,
        "",
        models=[labels.sft],
        reward_model=proxy,
        gold_model=labels.model,
        preferences="",
        prompts=labels.runs / "held-out-prompts.jsonl",
        samples=samples,
        output=labels.runs / "best-of-n",
        table=False,
        **labels.size.sample | {"temperature": labels.settings(PPOConfig, "ppo").temperature},
    )
    (evaluation,) = run_reward_eval(config)
    return list(evaluation.tables["curve"])


def judge_answers(run: Path, judge: str) -> dict[int, list[float]]:
    """The judge's win rate over the answers before training with its 95 % interval over prompts, by update."""
    answers: dict[int, list[Row]] = {}
    for row in read_json_lines(run / "samples.jsonl"):
        answers.setdefault(row["update"], []).append(row)
    scorer = ModelScorer(judge)
    scores = {
        update: np.array(scorer([row["prompt"] for row in rows], [row["response"] for row in rows]))
        for update, rows in answers.items()
    }
    wins = {update: (np.sign(found - scores[0]) + 1) / 2 for update, found in scores.items()}
    return {update: [float(won.mean()), *mean_interval(won)] for update, won in wins.items()}


# -------------------------------------------------------------------------------------------------------------- figures


def curve(run: Path) -> list[Point]:
    """Update, KL in nats a response, the proxy's and the gold model's reward and the judge's win rate at each evaluation."""
    names = {"kl": "validation/kl", "proxy": "validation/reward", "gold": "validation/selection_reward"}
    names |= {"error": "validation/selection_reward_error", "tokens": "validation/length"}
    judged = read_json(run / "judged.json")
    return [
        {"update": row["update"]}
        | {name: row[key] for name, key in names.items() if key in row}
        | dict(zip(("win rate", "low", "high"), judged[str(row["update"])], strict=True))
        for row in read_metrics(run)
        if "validation/selection_reward" in row
    ]


def fit_ppo(points: Sequence[Point]) -> tuple[float, float]:
    """Alpha and beta of gain = d (alpha - beta ln d), d the root of KL: Gao et al.'s form for PPO."""
    return _fit(points, np.log)


def fit_best_of_n(points: Sequence[Point]) -> tuple[float, float]:
    """Alpha and beta of gain = d (alpha - beta d): their form for the best of n."""
    return _fit(points, lambda d: d)


def _fit(points: Sequence[Point], form: Callable[[np.ndarray], np.ndarray]) -> tuple[float, float]:
    d, gain = (np.array([point[name] for point in points]) for name in ("d", "gain"))
    alpha, beta = np.linalg.lstsq(np.stack([d, -d * form(d)], axis=1), gain, rcond=None)[0]
    return float(alpha), float(beta)


def gains(points: Sequence[Point]) -> list[Point]:
    """The gold model's gain over the start by the root of KL, for every evaluation but the first, which is the start."""
    start = points[0]["gold"]
    return [{"d": max(point["kl"], 1e-3) ** 0.5, "gain": point["gold"] - start} for point in points[1:]]


def summary(runs: Sequence[Sequence[Point]]) -> dict[str, object]:
    """What several seeds of one condition came to: gold at the start, at its highest, at the end, and so on."""
    return {
        "start": [run[0]["gold"] for run in runs],
        "end": [run[-1]["gold"] for run in runs],
        "highest": [max(point["gold"] for point in run) for run in runs],
        "win rate": [[run[0]["win rate"], max(p["win rate"] for p in run), run[-1]["win rate"]] for run in runs],
        "standard error": [run[-1].get("error", 0.0) for run in runs],
        "proxy": [[run[0]["proxy"], run[-1]["proxy"]] for run in runs],
        "KL": [run[-1]["kl"] for run in runs],
        "tokens": [[run[0]["tokens"], run[-1]["tokens"]] for run in runs],
        "alpha, beta": fit_ppo([point for run in runs for point in gains(run)]),
    }


def write_figures(runs: Path, results: Path, seeds: Sequence[int]) -> None:
    """figures.json and curves.svg, of all runs that are finished."""
    names = {name_of(condition, seed): condition for condition in CONDITIONS for seed in seeds}
    curves = {name: curve(runs / name) for name in names if (runs / name / "judged.json").exists()}
    groups: dict[Condition, list[list[Point]]] = {}
    for name, found in curves.items():
        groups.setdefault(names[name], []).append(found)
    best = {str(seed): read_json(path) for seed in seeds if (path := runs / f"best-of-n-seed{seed}.json").exists()}
    points = [
        {"d": row["KL bound"] ** 0.5, "gain": row["gold"] - rows[0]["gold"]} for rows in best.values() for row in rows[1:]
    ]
    conditions = {f"{rule}, noise {noise:g}": summary(found) for (rule, noise), found in groups.items()}
    figures: dict[str, object] = {"curves": curves, "conditions": conditions, "best of n": best}
    if points:
        figures["best of n, alpha, beta"] = fit_best_of_n(points)
    write_json(results / "figures.json", figures)
    draw(groups, points, results / "curves.svg")


def draw(groups: dict[Condition, list[list[Point]]], best: Sequence[Point], path: Path) -> None:
    """Over the root of KL: the gold model's gain with the fitted curve of each condition, and the judge's win rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes, judged_axes = figure.subplots(1, 2)

    def plot(points: Sequence[Point], form: Callable[[np.ndarray], np.ndarray], label: str, color: str) -> None:
        d = np.linspace(0.05, max(point["d"] for point in points), 100)
        alpha, beta = _fit(points, form)
        axes.plot([point["d"] for point in points], [point["gain"] for point in points], "o", color=color, ms=4, alpha=0.6)
        axes.plot(d, d * (alpha - beta * form(d)), color=color, label=label)

    for ((rule, noise), runs), color in zip(groups.items(), ("#b5442e", "#1f5fa8", "#3c8d5a"), strict=False):
        plot([point for run in runs for point in gains(run)], np.log, f"{rule}, {noise:.0%} wrong labels", color)
        for run in runs:
            kl, rates = ([point[name] for point in run] for name in ("kl", "win rate"))
            judged_axes.plot(np.sqrt(kl), rates, "o-", color=color, ms=4)
    if best:
        plot(best, lambda d: d, "best of n, 25% wrong labels", "#777777")
    levels = ((axes, 0.0, "gain in the gold model's reward"), (judged_axes, 0.5, "win rate over the start, by the judge"))
    for side, level, label in levels:
        side.axhline(level, color="#999999", lw=0.8)
        side.set_xlabel("root of KL to the start, nats a response")
        side.set_ylabel(label)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
