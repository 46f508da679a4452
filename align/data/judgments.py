"""Records of one labeler's judgment of one response: by rules, or of its qualities."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from align.data.conversation import Conversation, check_prompt
from align.data.fields import check_attributes, check_id, check_optional_text, check_text, field_error, short_repr
from align.data.records import Record, field_values, set_fields

VERDICTS = ("violates", "unsure", "follows")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleJudgment(Record):
    """Whether one response breaks one rule.

    As the rule judgments of Sparrow (Glaese et al. 2022).

    Attributes:
        prompt: the conversation that the response answers.
        response: its text; may be empty, as policies write it.
        rule: the rule's id in forms/rules.
        verdict: violates, unsure or follows.
        labeler: who judged.
        note: the labeler's comment; may be empty.
        model: which model wrote the response, if known.
        id: the row's id, if it has one.
        category: its category, if it has one.

    Raises:
        UserError: for another verdict or empty text.
    """

    prompt: Conversation
    response: str
    rule: str
    verdict: str
    labeler: str | None = None
    note: str | None = None
    model: str | None = None
    id: str | None = None
    category: str | None = None

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise field_error("verdict", f"is {short_repr(self.verdict)}", f"use one of {', '.join(VERDICTS)}")
        set_fields(
            self,
            prompt=check_prompt(self.prompt),
            response=check_text(self.response, "response", may_be_empty=True),
            rule=check_text(self.rule, "rule"),
            labeler=check_optional_text(self.labeler, "labeler"),
            note=None if self.note is None else check_text(self.note, "note", may_be_empty=True),
            model=check_optional_text(self.model, "model"),
            id=check_id(self.id),
            category=check_optional_text(self.category, "category"),
        )

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """From `prompt`, `response`, `rule`, `verdict` and the optional fields; misspelled ones are refused."""
        return cls(**field_values(row, cls, prompt="add it", response="add it", rule="add it", verdict="add it"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeJudgment(Record):
    """One labeler's judgment of the qualities of one response.

    As LaMDA's labels (Thoppilan et al. 2022, section 4): sensible, specific, interesting, unsafe.

    Attributes:
        prompt: the conversation that the response answers.
        response: its text; may be empty, as policies write it.
        attributes: finite numbers by name: 0 or 1 for a yes or no, 1 to 7 for a rating.
        labeler: who judged.
        id: the row's id, if it has one.
        category: its category, if it has one.

    Raises:
        UserError: for a value that is no finite number, for no value at all, or empty text.
    """

    prompt: Conversation
    response: str
    attributes: Mapping[str, float] = field(hash=False)
    labeler: str | None = None
    id: str | None = None
    category: str | None = None

    def __post_init__(self) -> None:
        set_fields(
            self,
            prompt=check_prompt(self.prompt),
            response=check_text(self.response, "response", may_be_empty=True),
            attributes=check_attributes(self.attributes),
            labeler=check_optional_text(self.labeler, "labeler"),
            id=check_id(self.id),
            category=check_optional_text(self.category, "category"),
        )

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """From `prompt`, `response`, `attributes` and the optional fields; misspelled ones are refused."""
        return cls(**field_values(row, cls, prompt="add it", response="add it", attributes="add it"))
