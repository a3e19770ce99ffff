"""Faults that can be planted in Python source, each a change of one expression or statement."""

import ast
import dataclasses
from collections.abc import Iterator

_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
}
_EXTREMES = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "any": "all",
    "all": "any",
}


@dataclasses.dataclass(frozen=True)
class SourceFault:
    """A replacement of one stretch of source.

    Args:
      kind: The change in a few words.
      line: Line on which the replaced source begins, from 1.
      start: Offset of its first byte in the UTF-8 source.
      end: Offset of the byte after its last.
      new: The source that replaces it.
    """

    kind: str
    line: int
    start: int
    end: int
    new: str

    def plant(self, source: str) -> str:
        """Return the source with this fault planted."""
        data = source.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()


def all_faults(source: str) -> list[SourceFault]:
    """Return every fault that can be planted in a module, in the order of the source."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    found = []
    for node, kind, new in _Finder().find(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        found.append(SourceFault(kind, node.lineno, start, end, new))
    return sorted(found, key=lambda fault: (fault.start, fault.end, fault.kind, fault.new))


class _Finder:
    """Visits the code of a module except annotations, messages and docstrings."""

    def find(self, tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
        """Yield (node, kind of fault, source that replaces the node)."""
        # Parts of an f-string have no offsets in Python 3.11; a raised error is mostly prose.
        if isinstance(tree, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom):
            return
        yield from _of_expression(tree) if isinstance(tree, ast.expr) else _of_statement(tree)
        for name, value in ast.iter_fields(tree):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.find(child)


def _of_statement(node):
    match node:
        case ast.Expr(value=ast.Call()):
            yield node, "drop a call", "pass"
        case ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "drop an assignment", "pass"
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield node, "return None", "return None"
        case ast.If(test=test) | ast.While(test=test):
            yield test, "negate a condition", f"(not ({ast.unparse(test)}))"
        case ast.Continue():
            yield node, "break instead of continue", "break"
        case ast.FunctionDef(body=[*_, last]) if len(node.body) > 2 and isinstance(
            last, ast.Return
        ):
            yield node.body[-2], "return early", ast.unparse(last)


def _of_expression(node):
    match node:
        case ast.Compare(ops=[op]):
            changed = ast.Compare(node.left, [_COMPARISONS[type(op)]()], node.comparators)
            yield node, "change a comparison", f"({ast.unparse(changed)})"
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
            changed = ast.BinOp(node.left, _ARITHMETIC[type(op)](), node.right)
            yield node, "change an operator", f"({ast.unparse(changed)})"
        case ast.BoolOp(op=op):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, "exchange and with or", f"({ast.unparse(ast.BoolOp(other, node.values))})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, "drop a sign", f"({ast.unparse(operand)})"
        case ast.IfExp(test=test):
            yield test, "negate a condition", f"(not ({ast.unparse(test)}))"

        # bool comes first, as True and False are ints too.
        case ast.Constant(value=bool() as value):
            yield node, "change a constant", str(not value)
        case ast.Constant(value=int() as value):
            yield node, "change a constant", str(value + 1)
        case ast.Constant(value=float() as value):
            yield node, "change a constant", repr(value * 2 if value else 1.0)
        case ast.Call():
            yield from _of_call(node)


def _of_call(node):
    if len(node.args) >= 2 and not any(isinstance(one, ast.Starred) for one in node.args[:2]):
        first, second, *rest = node.args
        changed = ast.Call(node.func, [second, first, *rest], node.keywords)
        if ast.dump(first) != ast.dump(second):
            yield node, "exchange two arguments", ast.unparse(changed)
    for index in range(len(node.keywords)):
        changed = ast.Call(node.func, node.args, node.keywords[:index] + node.keywords[index + 1 :])
        yield node, "drop an argument", ast.unparse(changed)

    name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
    if name in _EXTREMES:
        head = ast.unparse(node.func).removesuffix(name)
        yield node.func, "exchange min with max", head + _EXTREMES[name]


def _is_none(value):
    return isinstance(value, ast.Constant) and value.value is None
