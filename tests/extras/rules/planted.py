"""Judgments by a rule whose truth a program knows: a response with a digit violates `no-digits`."""

import random
import re

from align.tokenization.encoded import SampledResponse

WORDS = ["the", "a", "cat", "dog", "sun", "moon", "runs", "sings", "red", "blue", "over", "under", "seven", "time", "door"]
RULES = ["forms/rules/plain-style.yaml"]


def has_digit(text: str) -> bool:
    return bool(re.search(r"\d", text))


def response(rng: random.Random, with_digit: bool) -> str:
    words = rng.choices(WORDS, k=rng.randint(2, 5))
    if with_digit:
        words[rng.randrange(len(words))] = str(rng.randint(0, 999))
    return " ".join(words)


def judgments(prompts: int, seed: int = 0, rules: tuple[str, ...] = ("no-digits",)) -> list[dict[str, str]]:
    """Two responses to each of several prompts, about half of them with digits; no other rule is ever violated."""
    rng = random.Random(seed)
    rows = []
    for number in range(prompts):
        prompt = f"{' '.join(rng.choices(WORDS, k=2))} {number}?"
        for _ in range(2):
            text = response(rng, rng.random() < 0.5)
            for rule in rules:
                broken = rule == "no-digits" and has_digit(text)
                verdict = "violates" if broken else "follows"
                rows.append({"prompt": prompt, "response": text, "rule": rule, "verdict": verdict})
    return rows


def sampled(tokenization, prompt, text):
    """A response to a prompt as a policy with this tokenization samples it."""
    conversation = ({"role": "user", "content": prompt},)
    return SampledResponse(conversation, tokenization.prompt_ids(conversation), tokenization.response_ids(text), text)
