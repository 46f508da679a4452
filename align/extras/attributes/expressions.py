"""Expressions over attributes: `3*sensible+specific+interesting` to rank by, `unsafe<0.2, rating>=4` to filter by.

The text is parsed, and compiled only if it contains nothing but numbers, attributes, arithmetic and comparisons. Other text
is an error.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

from align.core.errors import UserError, nearest_name_hint

ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)
COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class Expression:
    """Arithmetic expression over attributes, whose names may contain hyphens. `where` is the setting in error messages.

    Raises:
        UserError: if it contains anything but numbers, known names, + - * / and brackets.
    """

    def __init__(self, text: str, names: Iterable[str], where: str) -> None:
        self.text, self.where, self.names = text, where, list(names)
        self.aliases = {f"a{number}_": name for number, name in enumerate(self.names)}
        tree = ast.Expression(self._checked(self._parse(text)))
        self._code = compile(ast.fix_missing_locations(tree), where, "eval")

    def __call__(self, values: Mapping[str, float]) -> float:
        """Evaluate for a response. Raise a UserError on division by zero."""
        return float(self._evaluate(values))

    def _evaluate(self, values: Mapping[str, float]) -> Any:
        variables = {alias: values[name] for alias, name in self.aliases.items() if name in values}
        try:
            return eval(self._code, {"__builtins__": {}}, variables)
        except ZeroDivisionError as error:
            raise UserError(f"{self.where} {self.text!r}: division by zero") from error

    def _parse(self, text: str) -> ast.expr:
        by_length = sorted(self.aliases.items(), key=lambda pair: -len(pair[1]))
        pattern = "|".join(re.escape(name) for _, name in by_length)
        alias_of = {name: alias for alias, name in by_length}
        if pattern:
            text = re.sub(rf"(?<!\w)(?:{pattern})(?!\w)", lambda match: alias_of[match[0]], text)
        try:
            return ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise UserError(f"{self.where} {self.text!r}: invalid expression ({error.msg})") from error

    def _checked(self, node: ast.expr) -> ast.expr:
        self._check_value(node)
        return node

    def _check_value(self, node: ast.expr) -> None:
        if isinstance(node, ast.Name):
            if node.id not in self.aliases:
                known, hint = ", ".join(self.names), nearest_name_hint(node.id, self.names)
                raise UserError(f"{self.where} {self.text!r}: unknown attribute '{node.id}' (known: {known}){hint}")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            self._check_value(node.operand)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC):
            self._check_value(node.left)
            self._check_value(node.right)
        elif not (isinstance(node, ast.Constant) and type(node.value) in (int, float)):
            raise UserError(f"{self.where} {self.text!r}: only numbers, attributes, + - * / and parentheses are allowed")


class Condition(Expression):
    """Comma-separated comparisons, all of which must hold. Evaluation stops at the first failure."""

    def holds(self, values: Mapping[str, float]) -> bool:
        """Return whether a response passes."""
        return bool(self._evaluate(values))

    def _checked(self, node: ast.expr) -> ast.expr:
        parts = node.elts if isinstance(node, ast.Tuple) and node.elts else [node]
        for part in parts:
            if not (isinstance(part, ast.Compare) and all(isinstance(op, COMPARISONS) for op in part.ops)):
                raise UserError(f"{self.where} {self.text!r}: use comparisons such as unsafe<0.2, separated by commas")
            for side in (part.left, *part.comparators):
                self._check_value(side)
        return ast.BoolOp(ast.And(), parts) if len(parts) > 1 else parts[0]


def choose(candidates: Mapping[int, Mapping[str, float]], condition: Condition | None, rank: Expression | None) -> list[int]:
    """Return the indices of candidates that pass, or with `rank` only the highest-ranked one."""
    passing = [number for number, values in candidates.items() if condition is None or condition.holds(values)]
    return [max(passing, key=lambda number: rank(candidates[number]))] if rank and passing else passing
