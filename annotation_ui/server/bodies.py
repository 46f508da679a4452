"""Request bodies of the labelers' routes, each validated first: text that no database or file
can hold, a number that JSON does not have, or too deep a structure is refused with one line."""

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

from annotation_ui.tasks import TASKS, Json
from annotation_ui.tasks.fields import MAX_TEXT, is_unicode


def known_task(name: str) -> str:
    """The name of a task."""
    if name not in TASKS:
        raise ValueError("no such task")
    return name


TaskName = Annotated[str, AfterValidator(known_task)]

RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{8,64}$")]
MAX_DEPTH = 50  # levels of lists and objects within each other


class Body(BaseModel):
    """A JSON object that can be stored unchanged."""

    @model_validator(mode="before")
    @classmethod
    def check(cls, body: Any) -> Any:
        """Raise ValueError for values that cannot be stored. Pydantic reports it in one line."""
        level = [body]
        for _ in range(MAX_DEPTH):
            level = [inner for value in level for inner in _inner_values(value)]
            if not level:
                return body
        raise ValueError(f"more than {MAX_DEPTH} levels within each other")


class Draft(Body):
    """The body of a draft. The server keeps the draft with the highest `sequence`."""

    draft: Json
    sequence: int = Field(ge=0, le=2**31 - 1)
    seen: int | None = Field(None, ge=0, le=2**31 - 1)  # the newest draft that this window knows


class Next(Body):
    """The body of a request for the next item."""

    midnight: float = Field(0, ge=0, le=1e11)  # when the labeler's day began


class Submission(Body):
    """The body of a submit or a skip."""

    request_id: RequestId
    answer: Json = {}
    reason: str = ""
    seconds: float = Field(0, ge=0, le=1e7)
    guidelines: int | None = Field(None, ge=1, le=2**31 - 1)  # the version that the page showed


class Undo(Body):
    """The body of an undo, of the last answer or of the given assignment."""

    request_id: RequestId
    assignment: int | None = Field(None, ge=1, le=2**31 - 1)


class NextDecision(Body):
    """The body of a lead's request for a disagreement, by item or the next one."""

    item: int | None = Field(None, ge=1, le=2**31 - 1)


class Text(Body):
    """The body of a message or a preview."""

    text: str = Field(max_length=MAX_TEXT)


def _inner_values(value: Any) -> list[Any]:
    """The values in a list or an object, after a check of a single value."""
    if isinstance(value, str) and not is_unicode(value):
        raise ValueError("not valid Unicode")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a number that JSON has")
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else []
