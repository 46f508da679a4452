"""Passwords that are hashed in a thousandth of the time."""

from __future__ import annotations

from argon2 import PasswordHasher

from annotation_ui import auth


def use_quick_hashes() -> None:
    """Hash with argon2's least memory and time from now on: what is tested is never how hard a hash is to break."""
    hasher = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    auth._HASHER, auth._UNKNOWN_USER_HASH = hasher, hasher.hash("nobody")
