"""Raw text as training data: documents split into pieces, from which an objective draws new examples in each update."""

from collections.abc import Sequence

from align.batches.mixtures import Data, MixedExamples, data_name
from align.batches.raw_text import TextObjective, TextObjectiveName, cut_into_pieces
from align.core.errors import UserError
from align.core.seeds import RngStream, generator
from align.data.conversation import user_turn
from align.models.loading import LoadedModel
from align.tokenization.encoded import EncodedDemonstration, opening_digest
from align.training.data_order import DataOrder


class RawText:
    """Reads pieces of text, and creates training examples from them.

    A piece is an example without a prompt. `examples` draws its masked tokens, or the position of the split. Each
    epoch has other targets.

    Args:
        tokens: length of a piece.
        seed: seed of the random draws.

    Raises:
        UserError: if the tokenizer lacks the tokens that the objective needs.
    """

    def __init__(
        self, objective: TextObjectiveName, loaded: LoadedModel, tokens: int, seed: int, skip_bad_rows: bool = False
    ) -> None:
        self.objective, self.backbone = TextObjective(objective, loaded, "objective"), loaded.backbone
        self.tokens, self.seed, self.skip_bad_rows = tokens, seed, skip_bad_rows

    def read(self, data: Data) -> list[EncodedDemonstration]:
        """Return the pieces of all documents.

        Raises:
            UserError: if the data cannot be read, or no piece has two tokens.
        """
        pieces: list[EncodedDemonstration] = []
        for text, ids in self.objective.documents(data, self.skip_bad_rows):
            opening = opening_digest(user_turn(text.text))
            cut = cut_into_pieces([ids], self.tokens)
            pieces += [EncodedDemonstration([], piece, [True] * len(piece), opening) for piece in cut]
        if not pieces:
            raise UserError(f"{data_name(data)}: no text has two tokens, so nothing can be masked; give longer texts")
        longest = max(pieces, key=lambda piece: len(piece.response))
        self.examples([longest], 0)
        return pieces

    def read_examples(self, data: Data) -> list[EncodedDemonstration]:
        """Return the inputs and targets of all documents."""
        return self.examples(self.read(data), 0)

    def examples(self, pieces: Sequence[EncodedDemonstration], update: int) -> list[EncodedDemonstration]:
        """Return inputs and targets of pieces, which depend only on the update. Update 0 is for validation."""
        random = generator(self.seed, RngStream.TEXT_OBJECTIVE, update)
        examples = []
        for piece in pieces:
            prompt, response = self.objective.example(piece.response, random)
            self.backbone.require_fit(len(prompt), len(response), f"text_tokens {self.tokens}: an example")
            examples.append(EncodedDemonstration(prompt, response, [True] * len(response), piece.opening))
        return examples


class RawTextOrder(DataOrder[EncodedDemonstration]):
    """The order of pieces of text, whose batches are examples of the objective. Pieces identify the data in checkpoints."""

    def __init__(
        self,
        texts: RawText,
        mixed: MixedExamples[EncodedDemonstration],
        batch_size: int,
        cap: int = 0,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(mixed, texts.seed, batch_size, cap, temperature)
        self.texts = texts

    def batch(self, update: int) -> list[EncodedDemonstration]:
        return self.texts.examples(super().batch(update), update)
