"""The algebra's own notation, `-0.6*hp1 + compress(hp2 - hp3, rank=32)`: read safely, and written as code and formula.

An expression is parsed by Python's own parser and walked over a short list of allowed nodes; nothing is ever evaluated.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hf_taskvec.algebra.expressions import FUNCTIONS, LONGEST, check_expression
from hf_taskvec.algebra.provenance import ModelRecord, Origin, Provenance
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.merging import combine

_UNKNOWN = "...  # how it was made is not known"
_CHOICES = {"vocabulary": ("truncate", "extend", "union"), "heads": ("exclude", "match")}


# Reading


def names_in(expression: str) -> list[str]:
    """The names that an expression uses, each once, in order.

    >>> names_in("-0.6*hp1 + 0.2*(hp2 - hp1)")
    ['hp1', 'hp2']
    """
    return list(dict.fromkeys(_names(_tree(expression))))


def _names(node: ast.AST) -> Iterator[str]:
    """The names of vectors, in order: not those of functions, nor what options are."""
    if isinstance(node, ast.Name):
        yield node.id
    if isinstance(node, ast.Call):
        children = node.args if isinstance(node.func, ast.Name) else [node.func, *node.args]  # a method has its vector
    for child in children if isinstance(node, ast.Call) else ast.iter_child_nodes(node):
        yield from _names(child)


def evaluate_expression(expression: str, vectors: Mapping[str, TaskVector]) -> TaskVector:
    """The vector that an expression stands for.

    It may have numbers, names, `+ - * /`, brackets, `compress(v, rank=8)`, `prune_rows(v, fraction=0.25)`,
    `filter(v, include="*.mlp.*")`, `scale(v, by={"*.mlp.*": 0.5})`, `noise(v, seed=0)` and merging rules,
    `combine([v, w], "ties", density=0.2)`. A pattern may be a regular expression, `re.compile("mlp|attn")`.

    Args:
        expression (`str`):
            What to calculate.
        vectors (`Mapping[str, TaskVector]`):
            What the names stand for.
    """
    try:
        result = _value(_tree(expression), expression, vectors)
    except RecursionError:
        raise BadValueError("the expression is nested too deeply. Combine it in steps.") from None
    if not isinstance(result, TaskVector):
        raise BadValueError(f"{expression!r} is a number, not a task vector: name at least one vector in it.")
    return result


def _tree(expression: str) -> ast.expr:
    if len(expression) > LONGEST:
        raise BadValueError(f"the expression has more than {LONGEST} characters. Combine it in steps.")
    try:
        return ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        place = f" at character {error.offset}" if isinstance(error, SyntaxError) and error.offset else ""
        raise BadValueError(
            f"{expression!r} is not an expression{place}. Write one like '-0.6*hp1 + 0.2*hp2'."
        ) from None


def _value(node: ast.expr, whole: str, vectors: Mapping[str, TaskVector]) -> "TaskVector | float":
    match node:
        case ast.Name(id=name):
            if name not in vectors:
                known = ", ".join(vectors) or "none"
                raise MissingNameError(
                    f"no vector is called {name!r}.{did_you_mean(name, vectors)} The given names are: {known}."
                )
            return vectors[name]
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _number(number, whole)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, whole, vectors)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner, whole, vectors)
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _value(left, whole, vectors), _value(right, whole, vectors), whole)
        case ast.Call(func=ast.Name(id=name), args=[inner], keywords=keywords) if name in FUNCTIONS:
            return _call(name, _value(inner, whole, vectors), keywords)
        case ast.Call(func=ast.Name(id="combine"), args=[ast.List(elts=parts), *rest], keywords=keywords):
            given: list[Any] = [_value(part, whole, vectors) for part in parts]
            return combine(given, *(_plain(each, "combine(...)") for each in rest), **_options("combine", keywords))
    text = ast.get_source_segment(whole.strip(), node) or type(node).__name__
    raise BadValueError(
        f"{text!r} has no place in an expression. Use numbers, names, + - * /, brackets, "
        f"{', '.join(FUNCTIONS)}, and combine([...], 'rule')."
    )


def _number(number: int | float, whole: str) -> float:
    try:
        return float(number)
    except OverflowError:
        raise BadValueError(f"a number in {whole[:60]!r} is too large.") from None


def _binary(op: ast.operator, left: "TaskVector | float", right: "TaskVector | float", whole: str) -> Any:
    vectors = isinstance(left, TaskVector) + isinstance(right, TaskVector)
    if isinstance(op, ast.Add | ast.Sub) and vectors != 1:
        return left + right if isinstance(op, ast.Add) else left - right  # type: ignore[operator]
    if isinstance(op, ast.Mult) and vectors < 2:
        return left * right
    if isinstance(op, ast.Div) and not isinstance(right, TaskVector):
        if right == 0:
            raise BadValueError(f"{whole!r} divides by 0.")
        return left / right
    raise BadValueError(
        f"{whole!r} does not add vectors to vectors or multiply them by numbers, which is all that vectors do."
    )


def _call(name: str, vector: "TaskVector | float", keywords: list[ast.keyword]) -> TaskVector:
    if not isinstance(vector, TaskVector):
        raise BadValueError(f"{name}() takes a task vector first, not a number.")
    options = _options(name, keywords)
    for given in options:
        if given not in FUNCTIONS[name]:
            raise MissingNameError(f"{name}() has no option {given!r}.{did_you_mean(given, FUNCTIONS[name])}")
    if name == "scale":
        if "by" not in options:
            raise BadValueError("scale() takes by={'pattern': number}.")
        return vector.scale(options.pop("by"), **options)
    if name == "prune_rows" and "fraction" not in options:
        raise BadValueError("prune_rows() takes fraction=number.")
    result: TaskVector = getattr(vector, name)(**options)
    return result


def _options(name: str, keywords: list[ast.keyword]) -> dict[str, Any]:
    return {keyword.arg or "**": _plain(keyword.value, f"{name}({keyword.arg}=...)") for keyword in keywords}


def _plain(node: ast.expr, where: str) -> Any:
    match node:
        case ast.List(elts=elements):
            return [_plain(each, where) for each in elements]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_plain(key, where): _plain(each, where) for key, each in zip(keys, values, strict=True) if key}
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="re"), attr="compile"),
            args=[ast.Constant(value=str() as pattern), *flags],
            keywords=[],
        ) if len(flags) < 2:
            try:
                return re.compile(pattern, _flags(flags[0], where) if flags else 0)
            except (re.error, RecursionError, OverflowError) as error:
                raise BadValueError(f"{where}: {pattern[:60]!r} is not a regular expression ({error}).") from None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise BadValueError(f"{where} takes a plain value.") from None


def _flags(node: ast.expr, where: str) -> int:
    match node:
        case ast.Attribute(value=ast.Name(id="re"), attr=name) if name in re.RegexFlag.__members__:
            return int(re.RegexFlag[name])
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _flags(left, where) | _flags(right, where)
    raise BadValueError(f"{where} takes flags such as re.IGNORECASE | re.VERBOSE in a regular expression.")


# Writing


def as_formula(provenance: Provenance, base: str = r"\theta_0") -> str:
    r"""`base + vector` in LaTeX.

    >>> print(as_formula(Provenance((("hp1", -0.6), ("hp2", 1.0)))))
    \theta = \theta_0 - 0.6 \cdot \tau_{\text{hp1}} + \tau_{\text{hp2}}
    """
    return rf"\theta = {base}" + "".join(_terms(provenance))


def _terms(provenance: Provenance) -> list[str]:
    terms = []
    for atom, weight in provenance.weights:
        factor = "" if abs(weight) == 1.0 else rf"{abs(weight):.12g} \cdot "
        symbol = rf"\tau_{{\text{{{_latex(atom)}}}}}" if atom.isidentifier() else rf"\text{{{_latex(atom)}}}"
        terms.append(f" {'-' if weight < 0 else '+'} {factor}{symbol}")
    return terms


def _latex(text: str) -> str:
    r"""Plain text inside `\text{}`, with no backslash before punctuation: Markdown would take it away.

    Markdown is read before formulas are: nothing that makes a link, HTML or code there may stand in one, either.
    """
    for old, new in {"{": "(", "}": ")", "*": "∗", **dict.fromkeys("\\^~#%&$<>`@!|", " ")}.items():
        text = text.replace(old, new)
    text = re.sub(r":(?=//)|(?<=www)\.", " ", text.replace("](", "] ("), flags=re.IGNORECASE)
    return text.replace("_", r"\textunderscore ")


def as_code(provenance: Provenance) -> str:
    """Python that builds the vector again and calls it `vector`, as far as that can be told."""
    lines = [_origin_code(origin) for origin in provenance.origins if origin.base or origin.tuned]
    # A vector that was given a name of its own stands before what it is made of.
    named = [origin for origin in provenance.origins if not (origin.base or origin.tuned)]
    labels = {origin.label for origin in provenance.origins}
    for origin in reversed(named):
        code = _expression_code(origin.how, labels)
        made = _UNKNOWN if code is None else f"({code}).named({origin.label!r})"
        lines.append(f"{origin.label} = {made}")
    lines.append(f"vector = {_expression_code(provenance.expression, labels) or _UNKNOWN}")
    imports = {"re.compile(": "import re\n", "combine([": "from hf_taskvec import combine\n"}
    needed = [line for use, line in imports.items() if any(use in each for each in lines)]
    return "\n".join([*needed, *lines])


def _origin_code(origin: Origin) -> str:
    if origin.how == "given as tensors" or origin.tuned is None:
        return f"{origin.label} = TaskVector.from_tensors(...)  # made from tensors in memory: not to be had again"
    tuned, base = _where(origin.tuned), _where(origin.base) if origin.base else None
    name = f", name={origin.label!r}"
    if not origin.how.startswith("full fine-tune"):
        return f"{origin.label} = TaskVector.from_adapter({tuned}{f', base={base}' if base else ''}{name})"
    choices = [f", {what}={each!r}" for what, every in _CHOICES.items() for each in every]
    stated = "".join(choice for choice in choices if choice in origin.how)
    return f"{origin.label} = TaskVector.from_finetuned({base}, {tuned}{name}{stated})"


def _where(model: ModelRecord) -> str:
    if model.hub_id is None:
        return repr(f"./{model.name}")
    return repr(f"{model.hub_id}@{model.revision}" if model.revision else model.hub_id)


def _expression_code(expression: str, labels: Collection[str]) -> str | None:
    """The notation as Python: functions of one vector become its methods; None for what is not in our notation."""
    try:
        check_expression(expression, labels)
        return ast.unparse(_Methods().visit(_tree(expression)))
    except BadValueError:
        return None


class _Methods(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or not node.args or node.func.id == "combine":
            return node
        positional = [each.value for each in node.keywords if each.arg == "by"]
        keywords = [each for each in node.keywords if each.arg != "by"]
        method = ast.Attribute(node.args[0], node.func.id, ast.Load())
        return ast.Call(method, positional, keywords)
