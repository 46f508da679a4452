"""Few-shot prompting: examples and an instruction before a prompt, for models that were not fine-tuned.

InstructGPT compares with such a baseline, "GPT-3 (prompted)" (Ouyang et al. 2022, figure 1).
"""

from dataclasses import dataclass

from align.core.errors import UserError
from align.data.conversation import Conversation
from align.data.readers import read_records
from align.data.records import Demonstration, Message


@dataclass(frozen=True)
class Primer:
    """Few-shot examples and an instruction that come before each conversation.

    Attributes:
        instruction: starts the first user turn, because some templates have no system role; may be empty.
        examples: questions with their answers, as earlier turns.
    """

    instruction: str = ""
    examples: tuple[tuple[str, str], ...] = ()

    def before(self, conversation: Conversation) -> Conversation:
        """The conversation with the primer in front, after a system turn; an example that asks the same is left out."""
        asked = conversation[-1]["content"].strip()
        start = 1 if conversation[0]["role"] == "system" else 0
        turns: list[Message] = [dict(turn) for turn in conversation[:start]]  # type: ignore[misc]
        for question, answer in self.examples:
            if question.strip() != asked:
                turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        turns += [dict(turn) for turn in conversation[start:]]  # type: ignore[misc]
        if self.instruction:
            turns[start]["content"] = f"{self.instruction}\n\n{turns[start]['content']}"
        return tuple(turns)


def read_primer(shots: int, source: str, instruction: str) -> Primer:
    """A primer of the first demonstrations of a source that have one user turn and one answer.

    Args:
        shots: how many; 0: none, and the source is not read.
        source: a file, a folder or the name of a hub data set.
        instruction: may be empty.

    Raises:
        UserError: if the source cannot be read, or has fewer such demonstrations.
    """
    if not shots:
        return Primer(instruction)
    records = read_records(source, Demonstration)
    short = [record for record in records if len(record.prompt) == len(record.continuation) == 1]
    if len(short) < shots:
        raise UserError(f"{source}: shots is {shots}, but only {len(short)} of its demonstrations have a single turn")
    examples = tuple((record.prompt[0]["content"], record.continuation[0]["content"]) for record in short[:shots])
    return Primer(instruction, examples)
