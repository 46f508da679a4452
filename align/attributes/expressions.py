"""Expressions over attributes: `3*sensible+specific+interesting` to rank by, `unsafe<0.2, rating>=4` to filter by.

They are read as arithmetic and comparisons of names and numbers; nothing else is ever evaluated.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from align.core.errors import UserError, nearest_name_hint

ARITHMETIC: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
COMPARISONS: dict[type, Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Expression:
    """An arithmetic expression over attributes.

    Args:
        text: as written in the settings; a name may have hyphens.
        names: all attributes.
        where: the setting, for an error.

    Raises:
        UserError: for anything but numbers, known names, + - * / and brackets.
    """

    def __init__(self, text: str, names: Iterable[str], where: str) -> None:
        self.text, self.where, self.names = text, where, list(names)
        self.tree = self._check(self._parse(text))

    def __call__(self, values: Mapping[str, float]) -> float:
        """Its value for a response.

        Raises:
            UserError: for a division by zero.
        """
        try:
            return self._value(self.tree, values)
        except ZeroDivisionError as error:
            raise UserError(f"{self.where} {self.text!r}: divides by zero") from error

    def _parse(self, text: str) -> ast.expr:
        self.aliases: dict[str, str] = {f"a{number}_": name for number, name in enumerate(self.names)}
        by_length = sorted(self.aliases.items(), key=lambda pair: -len(pair[1]))
        pattern = "|".join(re.escape(name) for _, name in by_length)
        alias_of = {name: alias for alias, name in by_length}
        if pattern:
            text = re.sub(rf"(?<!\w)(?:{pattern})(?!\w)", lambda match: alias_of[match[0]], text)
        try:
            return ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise UserError(f"{self.where} {self.text!r}: cannot be read ({error.msg})") from error

    def _check(self, node: ast.expr) -> ast.expr:
        return self._check_value(node)

    def _check_value(self, node: ast.expr) -> ast.expr:
        allowed = isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)
        if isinstance(node, ast.Name):
            if node.id not in self.aliases:
                known = ", ".join(self.names)
                hint = nearest_name_hint(node.id, self.names)
                raise UserError(f"{self.where} {self.text!r}: no attribute '{node.id}' among {known}{hint}")
            allowed = True
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            allowed = bool(self._check_value(node.operand))
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            allowed = bool(self._check_value(node.left)) and bool(self._check_value(node.right))
        if not allowed:
            raise UserError(f"{self.where} {self.text!r}: write numbers, attributes, + - * / and brackets alone")
        return node

    def _value(self, node: Any, values: Mapping[str, float]) -> float:
        if isinstance(node, ast.Constant):
            return float(node.value)  # type: ignore[arg-type]
        if isinstance(node, ast.Name):
            return values[self.aliases[node.id]]
        if isinstance(node, ast.UnaryOp):
            value = self._value(node.operand, values)
            return -value if isinstance(node.op, ast.USub) else value
        return ARITHMETIC[type(node.op)](self._value(node.left, values), self._value(node.right, values))


class Condition(Expression):
    """Comparisons of expressions, separated by commas, all of which have to hold."""

    def holds(self, values: Mapping[str, float]) -> bool:
        """Whether a response passes."""
        return all(self._holds(node, values) for node in self.parts)

    def _check(self, node: ast.expr) -> ast.expr:
        self.parts: Sequence[ast.expr] = node.elts if isinstance(node, ast.Tuple) else [node]
        for part in self.parts:
            if not (isinstance(part, ast.Compare) and all(type(op) in COMPARISONS for op in part.ops)):
                raise UserError(f"{self.where} {self.text!r}: write comparisons such as unsafe<0.2, separated by commas")
            for side in (part.left, *part.comparators):
                self._check_value(side)
        return node

    def _holds(self, node: Any, values: Mapping[str, float]) -> bool:
        sides = [self._value(side, values) for side in (node.left, *node.comparators)]
        return all(COMPARISONS[type(op)](left, right) for op, left, right in zip(node.ops, sides, sides[1:], strict=False))


def choose(candidates: Sequence[Mapping[str, float]], condition: Condition | None, rank: Expression | None) -> int | None:
    """The best of several candidates: the highest rank among those that pass; None if none does.

    Args:
        candidates: the attributes of each.
        condition: a candidate must pass it; None: every candidate passes.
        rank: highest for the best candidate; None: the first that passes is the best.
    """
    passing = [number for number, values in enumerate(candidates) if condition is None or condition.holds(values)]
    if not passing:
        return None
    return max(passing, key=lambda number: rank(candidates[number])) if rank else passing[0]
