"""Scores by text, cached on disk: each text is scored once, whichever model wrote it, also after a restart."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from accelerate import Accelerator
from rich.progress import Progress

from align.errors import UserError
from align.eval.core.fingerprints import text_hash
from align.eval.toxicity.scorers import ToxicityScorer
from align.runtime.console import console
from align.runtime.distributed import map_across_processes

FILE = "scores.sqlite"
LOCK_TIMEOUT_S = 60.0
CHUNK = 1024
"""Texts between two updates of the progress bar; a crash loses at most as many scores on each process."""


class ScoreCache:
    """An SQLite file of scores by scorer and SHA-256 of the text. Several processes may share it.

    Raises:
        UserError: if it cannot be read or written.
    """

    def __init__(self, folder: Path, scorer: ToxicityScorer) -> None:
        self.path, self.scorer = folder / FILE, scorer
        folder.mkdir(parents=True, exist_ok=True)
        with self._open() as file:
            file.execute(
                "CREATE TABLE IF NOT EXISTS scores (scorer TEXT, text TEXT, score REAL, PRIMARY KEY (scorer, text))"
            )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_S)) as file, file:
                yield file
        except sqlite3.Error as error:
            raise UserError(f"{self.path}: {error}; free disk space, or remove the file to score anew") from error

    def lookup(self, texts: Sequence[str]) -> dict[str, float]:
        """The stored scores, by text."""
        keys = {text_hash(text): text for text in texts}
        query = "SELECT score FROM scores WHERE scorer = ? AND text = ?"
        with self._open() as file:
            rows = {key: file.execute(query, (self.scorer.title, key)).fetchone() for key in keys}
        return {keys[key]: row[0] for key, row in rows.items() if row is not None}

    def store(self, scores: dict[str, float]) -> None:
        """Add scores by text."""
        rows = [(self.scorer.title, text_hash(text), score) for text, score in scores.items()]
        with self._open() as file:
            file.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?, ?)", rows)

    def score(self, texts: Sequence[str], batch: int) -> list[float]:
        """The score of each text; the scorer is called for texts that are not stored yet, `batch` at a time.

        A text of only white space is not sent to the scorer: its score is 0.
        """
        nonempty = [text for text in dict.fromkeys(texts) if text.strip()]
        scores = self.lookup(nonempty)
        # The same order and the same batches on every run: shorter texts first.
        missing = sorted((text for text in nonempty if text not in scores), key=lambda text: (len(text), text))
        for start in range(0, len(missing), batch):
            part = missing[start : start + batch]
            fresh = dict(zip(part, self.scorer(part), strict=True))
            self.store(fresh)
            scores |= fresh
        return [scores.get(text, 0.0) for text in texts]


def score_texts(
    texts: Sequence[str], scorer: ToxicityScorer, folder: Path, batch: int, accelerator: Accelerator, label: str = "score"
) -> list[float]:
    """The score of each text, the same on every process; processes share the work.

    Raises:
        UserError: if the scorer fails; what was scored before is kept in `folder`.
    """
    cache = ScoreCache(folder, scorer)
    unique = list(dict.fromkeys(texts))
    scores: dict[str, float] = {}
    with Progress(console=console, transient=True, disable=not accelerator.is_main_process) as progress:
        task = progress.add_task(label, total=len(unique))
        for start in range(0, len(unique), CHUNK):
            part = unique[start : start + CHUNK]
            scores |= zip(part, map_across_processes(part, lambda own: cache.score(own, batch), accelerator), strict=True)
            progress.advance(task, len(part))
    return [scores[text] for text in texts]
