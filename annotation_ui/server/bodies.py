"""Request bodies of the labelers' routes.

Validation rejects text that is not valid Unicode, numbers that JSON cannot represent, and structures nested too deeply.
Each error is one line.
"""

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

from annotation_ui.tasks import TASKS, Json
from annotation_ui.tasks.fields import MAX_TEXT, is_unicode


def known_task(name: str) -> str:
    """Return the name. Raise ValueError if no task has it."""
    if name not in TASKS:
        raise ValueError("no such task")
    return name


TaskName = Annotated[str, AfterValidator(known_task)]

RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{8,64}$")]
MAX_DEPTH = 50  # nesting levels of lists and objects


class Body(BaseModel):
    """A JSON object that can be stored unchanged."""

    @model_validator(mode="before")
    @classmethod
    def check(cls, body: Any) -> Any:
        """Raise ValueError if the body contains a value that cannot be stored. Pydantic reports it in one line."""
        level = [body]
        for _ in range(MAX_DEPTH):
            level = [inner for value in level for inner in _inner_values(value)]
            if not level:
                return body
        raise ValueError(f"more than {MAX_DEPTH} levels within each other")


class Draft(Body):
    """Body of a draft. The server keeps the draft with the highest `sequence`."""

    draft: Json
    sequence: int = Field(ge=0, le=2**31 - 1)
    seen: int | None = Field(None, ge=0, le=2**31 - 1)  # sequence of the newest draft known to this window


class Next(Body):
    """Body of a request for the next item."""

    midnight: float = Field(0, ge=0, le=1e11)  # start of the labeler's day, in seconds since 1970


class Submission(Body):
    """Body of a submitted answer or a skip."""

    request_id: RequestId
    answer: Json = {}
    reason: str = ""
    seconds: float = Field(0, ge=0, le=1e7)
    guidelines: int | None = Field(None, ge=1, le=2**31 - 1)  # version shown on the page


class Undo(Body):
    """Body of an undo. Default: undo the last answer."""

    request_id: RequestId
    assignment: int | None = Field(None, ge=1, le=2**31 - 1)


class NextDecision(Body):
    """Body of a lead's request for a disagreement. Default: the next item."""

    item: int | None = Field(None, ge=1, le=2**31 - 1)


class Text(Body):
    """Body of a message or a preview."""

    text: str = Field(max_length=MAX_TEXT)


def _inner_values(value: Any) -> list[Any]:
    """Check a value, and return the values inside it if it is a list or an object."""
    if isinstance(value, str) and not is_unicode(value):
        raise ValueError("not valid Unicode")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a number that JSON has")
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else []
