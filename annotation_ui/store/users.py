"""User names (validation, normal form and lookalikes), lookup by name, and protection of the last lead."""

import re
import unicodedata

from sqlalchemy import select
from sqlalchemy.orm import Session

from align.core.errors import UserError
from annotation_ui.store.database import Database
from annotation_ui.store.schema import User

MAX_NAME = 64
_SIGNS = "._@+-"  # proxies may identify users by e-mail address
# Letters of these alphabets look alike. A name uses only one alphabet, and its Latin lookalike must be unique.
_ALPHABETS = frozenset({"LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE", "COPTIC"})
_LOOKALIKES = str.maketrans("авеікмнорстухјѕһԁԛԝьαβεικνορτυχϲϳı", "abeikmhopctyxjshdqwbabeikvoptuxcji")
# Invisible marks, such as variation selectors. Names that differ only in these would look the same.
_INVISIBLE = re.compile("[\u034f\u17b4\u17b5\u180b-\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]")


def normal_name(name: str) -> str:
    """Return a user name in Unicode normal form NFKC, or an empty string if the name is invalid."""
    name = unicodedata.normalize("NFKC", name)
    alphabets = {unicodedata.name(each, "").partition(" ")[0] for each in name if each.isalpha()}
    # Vowel signs of Devanagari, Thai and other scripts are marks, like accents.
    allowed = all(each.isalnum() or each in _SIGNS or unicodedata.category(each)[0] == "M" for each in name)
    is_name = allowed and 0 < len(name) <= MAX_NAME and name[0].isalnum() and len(alphabets & _ALPHABETS) <= 1
    return name if is_name and not _INVISIBLE.search(name) else ""


def stored_name(name: str) -> str:
    """Return the stored form of a user name. Invalid names are returned unchanged."""
    return normal_name(name) or name


def lookalike(name: str) -> str:
    """Return a name in lower case with lookalike letters replaced. Names must be unique in this form."""
    return name.casefold().translate(_LOOKALIKES)


def user_named(session: Session, name: str) -> User:
    """Return the user with this name, locked until the transaction ends. Raise UserError if there is no such user."""
    user = session.scalar(select(User).where(User.name == stored_name(name)).with_for_update())
    if user is None:
        raise UserError(f"no user {name!r}")
    return user


def keep_a_lead(database: Database, session: Session, user: User) -> None:
    """Raise UserError if the user is the last active lead."""
    database.lock_table(session, User)  # two leads may deactivate each other simultaneously
    other = select(User.id).where(User.role == "lead", User.active, User.id != user.id).limit(1)
    if user.role == "lead" and user.active and session.scalar(other) is None:
        raise UserError(f"{user.name} is the only active lead; add another lead first")
