"""Training data larger than memory: rows are read block by block while a model trains.

A block is a fixed number of rows. Each process parses and tokenizes its share of them (every n-th of n processes) and then
gets the whole block's token ids: results do not depend on the number of processes. Examples are shuffled within a block. The
position in checkpoints is the rows before the block and the index within it. A resumed run skips those rows without parsing
them, reads the block again, and continues bit for bit.
"""

import hashlib
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

from accelerate import Accelerator

from align.batches.limits import EncodedRow, Limits, OverlongCounts
from align.core.errors import UserError, counted
from align.core.seeds import RngStream, generator
from align.data.sources import RawRow, SourceRow, iter_raw_rows
from align.runtime.distributed import map_across_processes, run_on_all

logger = logging.getLogger(__name__)
Example = TypeVar("Example")


class ExampleStream(Generic[Example]):
    """The examples of one source, pass after pass, with one block in memory.

    Args:
        source: a file, folder or hub name.
        encode: makes zero or more examples from a row; an `EncodedRow` also names the limits that the row exceeds.
        block: rows in memory at once.
        key: the run's seed, and numbers that distinguish the streams of one run.
        skip_bad_rows: leave out bad rows, and log how many a pass had.
        limits: of the rows. How many exceed them is logged after the first block and after each pass.

    Raises:
        UserError: if the source is missing, for a bad row in its first block, and if the limits leave hardly any row of it.
    """

    def __init__(
        self,
        source: str,
        encode: Callable[[SourceRow], Sequence[Example] | EncodedRow[Example]],
        block: int,
        key: tuple[int, ...],
        accelerator: Accelerator,
        skip_bad_rows: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self.source, self.encode, self.block, self.key = source, encode, block, key
        self.accelerator, self.skip_bad_rows, self.limits = accelerator, skip_bad_rows, limits
        self.load_state_dict({"start": 0, "number": 0, "place": 0})
        self._read_block()  # so that a mistake in its first rows stops the run before training
        if self.counts:
            self.counts.report(f"{source}: first block", "row")

    def take(self, count: int) -> list[Example]:
        """Return the next examples.

        Raises:
            UserError: for a bad row, and if a whole pass gave no example.
        """
        taken: list[Example] = []
        while len(taken) < count:
            new = self.examples[self.place : self.place + count - len(taken)]
            taken += new
            self.place += len(new)
            if self.place == len(self.examples) and len(taken) < count:
                self._read_block()
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the position: rows of the pass before the block, the block's number, index within it, digest of it."""
        return {"start": self.start, "number": self.number, "place": self.place, "digest": self.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position.

        Raises:
            UserError: if the source has other examples there.
        """
        self.start, self.number = state["start"], state["number"]
        self._rows = islice(iter_raw_rows(self.source), self.start, None)
        self.gives_any, self.bad = self.start > 0, 0
        self.counts = OverlongCounts(self.limits) if self.limits else None
        self.examples: list[Example] = []
        self.size, self.place, self.digest = 0, 0, ""
        if state["place"]:
            self._read_block()
            if state.get("digest", self.digest) != self.digest:
                raise UserError(
                    f"{self.source}: the rows from {self.start + 1} on are not those that this run read; resume it with the "
                    "same data, limits and block size, or give another output_dir"
                )
            self.place = state["place"]

    def _read_block(self) -> None:
        """Read the next block; after the end of the source, the first of another pass."""
        if self.size:
            self.start, self.number = self.start + self.size, self.number + 1
        raw: list[RawRow] = []
        run_on_all(lambda: raw.extend(self._read_rows()), self.accelerator)  # the disk or hub may fail on one process
        self.size = len(raw)
        outcomes = map_across_processes(raw, self._encode_rows, self.accelerator)
        problems = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if problems and not self.skip_bad_rows:
            raise UserError(problems[0])
        self.bad += len(problems)
        examples: list[Example] = []
        for row in outcomes:
            if not isinstance(row, str):
                examples += row.examples
                if self.counts:
                    self.counts.add(row.over, len(row.examples))
        order = generator(self.key[0], RngStream.STREAM_ORDER, *self.key[1:], self.number).permutation(len(examples))
        self.examples, self.place = [examples[number] for number in order.tolist()], 0
        self.digest = examples_digest(self.examples)
        self.gives_any |= bool(examples)

    def _read_rows(self) -> list[RawRow]:
        raw = list(islice(self._rows, self.block))
        if not raw:
            self._begin_pass()
            raw = list(islice(self._rows, self.block))
        return raw

    def _begin_pass(self) -> None:
        if not self.gives_any:
            raise UserError(f"{self.source}: a pass through it gave no example within the limits; raise them, or check it")
        if self.bad:
            logger.warning("%s: skipped %s", self.source, counted(self.bad, "bad row"))
        if self.counts:
            self.counts.log(f"{self.source}: pass", "row")
            self.counts = OverlongCounts(self.counts.limits)
        self._rows = islice(iter_raw_rows(self.source), 0, None)
        self.start, self.gives_any, self.bad = 0, False, 0

    def _encode_rows(self, rows: list[RawRow]) -> list[EncodedRow[Example] | str]:
        """Return each row's examples, or its error message: raising would leave the other processes waiting."""
        outcomes: list[EncodedRow[Example] | str] = []
        for raw in rows:
            try:
                found = self.encode(raw.read())
                outcomes.append(found if isinstance(found, EncodedRow) else EncodedRow(found))
            except UserError as error:
                outcomes.append(str(error))
        return outcomes


class StreamedBatches(Generic[Example]):
    """Batches of streamed sources; an example's source is drawn by the weights.

    Args:
        longest: an example as long as the limits allow.

    Attributes:
        updates_per_epoch: all updates of the run, because the length of a pass is unknown.
    """

    def __init__(
        self,
        seed: int,
        batch_size: int,
        updates: int,
        streams: Sequence[ExampleStream[Example]],
        weights: Sequence[float],
        longest: Example,
    ) -> None:
        self.seed, self.batch_size, self.updates_per_epoch, self.streams = seed, batch_size, updates, streams
        self.longest = longest
        self.shares = [weight / sum(weights) for weight in weights]

    def updates(self, epochs: int) -> int:
        """Return all updates of the run."""
        return self.updates_per_epoch

    def first_batches(self) -> list[list[Example]]:
        """Return a batch of the longest examples: those of the run are unknown."""
        return [[self.longest] * self.batch_size]

    def batch(self, update: int) -> list[Example]:
        """Read the examples of an update. Updates are read in their order."""
        random = generator(self.seed, RngStream.STREAM_ORDER, update)
        counts = random.multinomial(self.batch_size, self.shares).tolist()
        return [example for stream, count in zip(self.streams, counts, strict=True) for example in stream.take(count)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in each source, and their shares."""
        return {"streams": [stream.state_dict() for stream in self.streams], "shares": self.shares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position.

        Raises:
            UserError: if the checkpoint is of other sources.
        """
        positions, shares = state.get("streams", []), state.get("shares", self.shares)
        if len(positions) != len(self.streams) or shares != self.shares:
            now = f"{len(self.streams)} with shares {', '.join(f'{share:.3g}' for share in self.shares)}"
            raise UserError(
                f"the streamed sources of train_data are not those that this run began with ({now} now); resume it with the "
                "same ones and the same weights, or give another output_dir"
            )
        for stream, position in zip(self.streams, positions, strict=True):
            stream.load_state_dict(position)


def examples_digest(examples: Iterable[Any]) -> str:
    """Return a digest of examples in their order: token ids of prompts and responses, and other values as text."""
    digest = hashlib.sha256()
    for example in examples:
        lists = list(_contents(example))
        digest.update(array("q", [len(lists), *map(len, lists)]).tobytes())
        for values in lists:
            digest.update(array("q", values).tobytes())
    return digest.hexdigest()


def _contents(example: Any) -> Iterator[Sequence[int]]:
    for part in getattr(example, "parts", (example,)):
        if hasattr(part, "prompt"):
            yield part.prompt
            yield from part.responses if hasattr(part, "responses") else [part.response]
        else:
            yield list(repr(part).encode())


def require_same_examples(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume on other examples than those of the checkpoint.

    Args:
        what: the examples, for the message.
        before: their description in the checkpoint; `examples` is their number.
        now: the same of this run.

    Raises:
        UserError: if they differ.
    """
    if dict(before) == dict(now):
        return
    counts = [values.get("examples", "unknown") for values in (before, now)]
    how = f"then {counts[0]}, now {counts[1]}" if counts[0] != counts[1] else "others, or in another order"
    raise UserError(
        f"{what} are not those that this run began with ({how}); resume it with the same data, limits and weights of "
        "sources, or give another output_dir"
    )
