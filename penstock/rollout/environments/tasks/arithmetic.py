"""Exact arithmetic on expressions that come from a model: + - * / and parentheses, of bounded size, never `eval`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

_LONGEST = 200
_LARGEST = 10**30
_DECIMALS = 6
_ALLOWED = re.compile(r"[0-9+\-*/(). ]+")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class ArithmeticProblem(ValueError):
    """An expression that is not evaluated; the message is for the model."""


def evaluate(expression: str) -> Fraction:
    """The value of an expression, exactly."""
    text = expression.strip()
    if len(text) > _LONGEST:
        raise ArithmeticProblem("too long")
    if not _ALLOWED.fullmatch(text):
        raise ArithmeticProblem("not arithmetic")
    try:
        tree = ast.parse(text, mode="eval")
        return _value(tree.body, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, ArithmeticProblem):
            raise
        raise ArithmeticProblem("not arithmetic") from error


def show(value: Fraction) -> str:
    """A whole number without decimals, any other with up to six."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**_DECIMALS)
    whole, decimals = divmod(abs(scaled), 10**_DECIMALS)
    sign = "-" if scaled < 0 else ""
    return f"{sign}{whole}.{decimals:0{_DECIMALS}d}".rstrip("0").rstrip(".")


def read_number(text: str) -> Fraction | None:
    """The number that a text spells, or None."""
    found = re.fullmatch(r"\s*(-?\d{1,40}(?:\.\d{1,40})?)\s*", text)
    return Fraction(found[1]) if found else None


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        # From the text itself, so that 0.1 is a tenth and no digit is lost.
        value = Fraction(ast.get_source_segment(text, node) or "")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand, text)
        value = -inner if isinstance(node.op, ast.USub) else inner
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Div) and right == 0:
            raise ArithmeticProblem("division by zero")
        value = _OPERATORS[type(node.op)](left, right)
    else:
        raise ArithmeticProblem("not arithmetic")
    if abs(value.numerator) > _LARGEST or value.denominator > _LARGEST:
        raise ArithmeticProblem("too large")
    return value
