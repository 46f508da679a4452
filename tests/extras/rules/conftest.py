"""The HTTP servers of the tests of evaluation, for a service that judges by rules."""

from tests.eval.conftest import serve

__all__ = ["serve"]
