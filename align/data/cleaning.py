"""Cleaning of raw web pages by C4's rules (Raffel et al. 2020, section 2.2)."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from align.core.errors import UserError
from align.core.files import new_file
from align.core.plugins import require_extra
from align.data.readers import Text, read_texts

SENTENCES, WORDS = 5, 3
"""Minimum sentences per page and words per line, as in the paper's first version; its last one has 3 and 5."""
LANGUAGE_PROBABILITY = 0.99
"""Minimum probability of the required language, as in C4, which used langdetect."""
SPAN = 3
"""Number of consecutive sentences to deduplicate over all pages."""
LINE_ENDS = (".", "!", "?", '"', "\u201d")
"""Terminal punctuation: a line that ends otherwise is a menu or a title."""
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'\u201d)\]]*\s+")


class Cleaner:
    """Cleans pages one after another, and remembers the spans of sentences that it has seen.

    Args:
        bad_words: words in lower case that a page may not contain.
        language: ISO 639 code of the required language. If empty, any language is accepted.

    Attributes:
        removed: number of removed lines, pages and repeated sentences, by reason.
        kept: number of pages.
    """

    def __init__(self, bad_words: Collection[str] = (), language: str = "") -> None:
        self.language, self.removed, self.kept = language, Counter[str](), 0
        spelled = "|".join(map(re.escape, sorted(bad_words)))
        self._bad = re.compile(rf"(?<!\w)(?:{spelled})(?!\w)") if spelled else None
        self._identifier = language_identifier(language) if language else None
        self._spans: set[bytes] = set()

    def clean(self, text: str) -> str | None:
        """Return the cleaned page, or None if it is dropped."""
        reason = self._page_problem(text)
        if reason is None:
            lines = self._without_repeated_spans([split_sentences(line) for line in self._kept_lines(text)])
            kept = "\n".join(" ".join(line) for line in lines if line)
            if sum(map(len, lines)) < SENTENCES:
                reason = f"pages with fewer than {SENTENCES} sentences"
            elif self._identifier and dict(self._identifier.rank(kept))[self.language] < LANGUAGE_PROBABILITY:
                reason = f"pages in another language than {self.language}"
            else:
                self.kept += 1
                return kept
        self.removed[reason] += 1
        return None

    def _page_problem(self, text: str) -> str | None:
        lowered = text.lower()
        if "lorem ipsum" in lowered:
            return "pages with lorem ipsum"
        if "{" in text:  # code, not prose
            return "pages with a brace"
        return "pages with a bad word" if self._bad and self._bad.search(lowered) else None

    def _kept_lines(self, text: str) -> Iterator[str]:
        for line in map(str.strip, text.splitlines()):
            if not line.endswith(LINE_ENDS) or line.endswith("..."):
                self.removed["lines without end punctuation"] += bool(line)
            elif len(line.split()) < WORDS:
                self.removed[f"lines of fewer than {WORDS} words"] += 1
            elif "javascript" in line.lower():  # "please enable JavaScript"
                self.removed["lines about Javascript"] += 1
            else:
                yield line

    def _without_repeated_spans(self, lines: list[list[str]]) -> list[list[str]]:
        """Remove the sentences of spans that occurred before, on this page or an earlier one."""
        positions = [(number, index) for number, line in enumerate(lines) for index in range(len(line))]
        repeated: set[tuple[int, int]] = set()
        for start in range(len(positions) - SPAN + 1):
            span = positions[start : start + SPAN]
            sentences = (" ".join(lines[number][index].lower().split()) for number, index in span)
            digest = hashlib.blake2b("\n".join(sentences).encode(), digest_size=16).digest()
            if digest in self._spans:
                repeated.update(span)
            self._spans.add(digest)
        self.removed["repeated sentences"] += len(repeated)
        return [
            [sentence for index, sentence in enumerate(line) if (number, index) not in repeated]
            for number, line in enumerate(lines)
        ]


def language_identifier(language: str) -> Any:
    """Return py3langid's identifier, whose model comes with it. Raise a UserError if it does not know the language."""
    with require_extra("clean"):
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    if language not in identifier.labels:
        raise UserError(f"--language: unknown language {language!r}; use one of {', '.join(sorted(identifier.labels))}")
    return identifier


def split_sentences(line: str) -> list[str]:
    """Split a line into sentences, each with its end mark and a closing quotation mark."""
    starts = [0, *(match.end() for match in _SENTENCE_END.finditer(line)), len(line)]
    parts = (line[start:end].strip() for start, end in zip(starts, starts[1:], strict=False))
    return [part for part in parts if part]


def clean_file(source: str, target: Path, cleaner: Cleaner, skip_bad_rows: bool = False) -> str:
    """Write the pages of a source (file, folder or hub name) that C4's rules keep, and describe the removed text."""
    if target.suffix != ".jsonl":
        raise UserError(f"{target}: texts are written as JSON Lines; use the extension .jsonl")
    total = 0

    def lines(texts: Iterable[Text]) -> Iterator[bytes]:
        nonlocal total
        for page in texts:
            total += 1
            kept = cleaner.clean(page.text)
            if kept is not None:
                row = {"text": kept} | ({"id": page.id} if page.id else {})
                yield json.dumps(row, ensure_ascii=False).encode() + b"\n"

    try:
        with new_file(target) as file:
            file.writelines(lines(read_texts(source, skip_bad_rows)))
            if not cleaner.kept:
                raise UserError(f"{source}: all {total} pages were removed: {_counts_in_words(cleaner.removed)}")
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error})") from error
    return f"{target}: {cleaner.kept} of {total} pages\nremoved: {_counts_in_words(cleaner.removed) or 'nothing else'}"


def read_bad_words(path: str) -> frozenset[str]:
    """Read a list of words or phrases, one per line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    return frozenset(line.strip().lower() for line in lines if line.strip())


def _counts_in_words(removed: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in removed.most_common() if count)
