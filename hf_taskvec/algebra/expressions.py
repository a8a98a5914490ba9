"""Expressions as text, `-0.6*hp1 + compress(hp2, rank=32)`: which texts are one, and which names can stand in one.

A saved vector's file tells the expression that made it, and the file may be anybody's. A text from there is shown as
code, on a card, only after Python's own parser has read it and every node of it is one that our notation has. Nothing
is ever evaluated.
"""

import ast
import keyword
import re
import unicodedata
from collections.abc import Collection

from hf_taskvec.errors import BadValueError

#: the functions of one vector, each with its options
FUNCTIONS = {
    "compress": ("rank", "energy", "tolerance", "dtype", "exact"),
    "filter": ("include", "exclude", "layers", "outside"),
    "moved": ("names",),
    "noise": ("seed",),
    "prune_rows": ("fraction", "include"),
    "scale": ("by", "default"),
}
LONGEST = 100_000  # characters
_LONGEST_LABEL = 1000  # of a name that is made from another, a fifth
# What the code on a card uses itself.
_RESERVED = ("TaskVector", "combine", "re")


def is_label(name: str) -> bool:
    """Whether a name can stand for a vector in an expression, as a variable stands in code.

    >>> is_label("phi_1_5_hp1"), is_label("epoch-1"), is_label("lambda")
    (True, False, False)
    """
    is_name = name.isidentifier() and not keyword.iskeyword(name) and name not in _RESERVED
    return is_name and len(name) <= _LONGEST_LABEL and unicodedata.normalize("NFKC", name) == name


def check_label(name: object) -> None:
    """Refuse a name for a vector that could not stand in an expression."""
    if not isinstance(name, str) or not is_label(name):
        advice = f" Take name={label_for(name)!r}." if isinstance(name, str) else ""
        raise BadValueError(
            f"name={name!r} cannot name a vector, since it stands in expressions as a variable does in code: use "
            f"letters, digits and _, with a letter first.{advice}"
        )


def label_for(name: str) -> str:
    """A model's name as a label, for use in an expression.

    >>> label_for("me/phi-1_5-hp1"), label_for("lambda")
    ('phi_1_5_hp1', 'v_lambda')
    """
    last = unicodedata.normalize("NFKC", name).rstrip("/").rsplit("/", 1)[-1]
    label = re.sub(r"\W", "_", last)[: _LONGEST_LABEL // 5]
    return label if is_label(label) else f"v_{label}"


def check_expression(text: str, labels: Collection[str]) -> None:
    """Refuse a text that is no expression over these labels in our notation.

    >>> check_expression("combine([a, -0.5*b], 'ties', density=0.2)", {"a", "b"})
    >>> check_expression("a.save('x')", {"a"})
    Traceback (most recent call last):
    ...
    hf_taskvec.errors.BadValueError: "a.save('x')" is no expression of task vectors over the given labels.
    """
    if not _is_expression(text, labels):
        raise BadValueError(f"{text[:200]!r} is no expression of task vectors over the given labels.")


def _is_expression(text: str, labels: Collection[str]) -> bool:
    if len(text) > LONGEST or not text.isprintable():
        return False
    try:
        tree = ast.parse(text, mode="eval").body
        # The whole text is the node's: a comment or brackets around it would be beside it.
        is_whole = (tree.col_offset, tree.end_col_offset) == (0, len(text.encode()))
        return is_whole and _is_sum(tree, labels)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def _is_sum(node: ast.expr, labels: Collection[str]) -> bool:
    match node:
        case ast.Name(id=name):
            return name in labels
        case ast.Constant(value=int() | float() as number):
            return not isinstance(number, bool)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return _is_sum(inner, labels)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult(), right=right):
            return _is_sum(left, labels) and _is_sum(right, labels)
        case ast.Call(func=ast.Name(id="combine"), args=[ast.List(elts=parts), rule], keywords=options):
            of_vectors = all(_is_sum(part, labels) for part in parts)
            return of_vectors and _is_text(rule) and all(each.arg and _is_value(each.value) for each in options)
        case ast.Call(func=ast.Name(id=name), args=[inner], keywords=options) if name in FUNCTIONS:
            known = all(each.arg in FUNCTIONS[name] and _is_value(each.value) for each in options)
            return known and _is_sum(inner, labels)
    return False


def _is_value(node: ast.expr) -> bool:
    """Whether an option's value is plain: numbers, texts, lists and mappings of them, and compiled patterns."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return True
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return True
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return all(map(_is_value, elements))
        case ast.Dict(keys=keys, values=values):
            return all(key is not None and _is_value(key) for key in keys) and all(map(_is_value, values))
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr="compile"), args=[pattern, *flags], keywords=[]):
            return _is_text(pattern) and len(flags) < 2 and all(map(_is_flag, flags))
    return False


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_flag(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="re"), attr=name):
            return name in re.RegexFlag.__members__
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _is_flag(left) and _is_flag(right)
    return False
