"""Mutations of Python by its syntax tree. Triton kernels are Python too.

Annotations, decorators, strings, raised exceptions, assertions, warnings, and hints to the compiler (QUIET) are left
out, because no test should notice a change in them or because no result can change.
"""

from __future__ import annotations

import ast

from .sites import Change

SHIFTED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
FLIPPED = {ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "=="} | {
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ORDERED = {ast.Sub: "-", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.LShift: "<<", ast.RShift: ">>"} | {
    ast.Pow: "**",
    ast.MatMult: "@",
}
EXTREMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin"}
CLAMPS = {"clamp", "clamp_", "clamp_min", "clamp_max", "clip"}
COMMUTATIVE = {*EXTREMES, "isinstance", "issubclass", "getattr", "hasattr", "range", "zip", "cast", "NewType"}
QUIET = {"multiple_of", "max_contiguous", "max_constancy", "assume", "static_assert", "static_print", "warn", "warning"}
QUIET |= {"debug_barrier", "print", "TypeVar", "namedtuple"}


def changes(text: str) -> list[Change]:
    finder = _Finder(text)
    finder.visit(ast.parse(text))
    return finder.found


def compiles(text: str) -> bool:
    """Whether the text of a mutated file is Python."""
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


class _Finder(ast.NodeVisitor):
    def __init__(self, text: str):
        self.text, self.found, self.scope = text, [], []
        lines = text.splitlines(keepends=True)
        self.starts = [sum(map(len, lines[:n])) for n in range(len(lines))]
        self.lines = lines

    # ---- positions

    def _at(self, line: int, column: int) -> int:
        """Returns a position in the text. Columns of the syntax tree count UTF-8 bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def _range(self, node) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _text(self, node) -> str:
        start, end = self._range(node)
        return self.text[start:end]

    def _add(self, kind: str, node, new: str) -> None:
        self._put(kind, *self._range(node), new)

    def _put(self, kind: str, start: int, end: int, new: str) -> None:
        self.found.append(Change(".".join(self.scope) or "module", kind, start, end, new))

    # ---- scopes, and what is left out

    def _visit_definition(self, node) -> None:
        self.scope.append(node.name)
        if not isinstance(node, ast.ClassDef):
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.scope.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_definition

    def _skip(self, node) -> None:
        pass

    visit_Raise = visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = _skip

    def visit_AnnAssign(self, node) -> None:
        if node.value:
            self.visit(node.value)

    # ---- operators

    def visit_Compare(self, node) -> None:
        if len(node.ops) == 1:
            left, right, op = self._text(node.left), self._text(node.comparators[0]), type(node.ops[0])
            for kind, table in (("comparison shifted", SHIFTED), ("comparison flipped", FLIPPED)):
                if op in table:
                    self._add(kind, node, f"(({left}) {table[op]} ({right}))")
        else:
            for op, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators, strict=False):
                if type(op) in SHIFTED:
                    start, end = self._range(left)[1], self._range(right)[0]
                    between = self.text[start:end]
                    mark = next(x for x in ("<=", ">=", "<", ">") if x in between)
                    new = between.replace(mark, SHIFTED[type(op)], 1)
                    self._put("comparison shifted", start, end, new)
        self.generic_visit(node)

    def visit_Constant(self, node) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._add(
                "constant", node, f"({node.value!r} + 1)" if isinstance(node.value, float) else f"{node.value + 1}"
            )

    def visit_BinOp(self, node) -> None:
        left, right = self._text(node.left), self._text(node.right)
        text = isinstance(node.left, ast.Constant | ast.JoinedStr) and not _is_number(node.left)
        if not text and not isinstance(node.op, ast.BitOr):
            self._add("term dropped", node, f"({left})")
            if isinstance(node.op, ast.Add | ast.Mult):
                self._add("first term dropped", node, f"({right})")
            if type(node.op) in ORDERED:
                self._add("operands exchanged", node, f"(({right}) {ORDERED[type(node.op)]} ({left}))")
        elif not text and not _is_type(node):
            self._add("term dropped", node, f"({left})")
        self.generic_visit(node)

    def visit_BoolOp(self, node) -> None:
        start, end = self._range(node)
        for dropped in range(len(node.values)):
            kept = [f"({self._text(x)})" for n, x in enumerate(node.values) if n != dropped]
            word = " and " if isinstance(node.op, ast.And) else " or "
            self._add("condition dropped", node, f"({word.join(kept)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node) -> None:
        if isinstance(node.op, ast.USub | ast.Not | ast.Invert):
            self._add("sign dropped", node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def _visit_test(self, node) -> None:
        if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            self._add("condition flipped", node.test, f"(not ({self._text(node.test)}))")
        self.generic_visit(node)

    visit_If = visit_IfExp = visit_While = _visit_test

    def visit_AugAssign(self, node) -> None:
        self._add("statement dropped", node, "pass")
        self.generic_visit(node)

    def visit_Expr(self, node) -> None:
        if isinstance(node.value, ast.Call) and _name(node.value) not in QUIET:
            self._add("statement dropped", node, "pass")
        self.generic_visit(node)

    def visit_Call(self, node) -> None:
        name = _name(node)
        if name in QUIET or name.endswith(("Error", "Warning")):
            return
        starred = any(isinstance(x, ast.Starred) for x in node.args)
        if name in EXTREMES:
            start, end = self._range(node.func)
            self._put("min for max", end - len(name), end, EXTREMES[name])
            if len(node.args) == 2 and not starred and not node.keywords:
                for argument in node.args:
                    self._add("clamp dropped", node, f"({self._text(argument)})")
        elif name in CLAMPS and isinstance(node.func, ast.Attribute):
            self._add("clamp dropped", node, f"({self._text(node.func.value)})")
        elif name not in COMMUTATIVE:
            for first, second in zip(node.args, node.args[1:], strict=False):
                texts = self._text(first), self._text(second)
                if texts[0] != texts[1] and not any(isinstance(x, ast.Starred) or _is_text(x) for x in (first, second)):
                    start, end = self._range(first)[0], self._range(second)[1]
                    between = self.text[self._range(first)[1] : self._range(second)[0]]
                    new = f"{texts[1]}{between}{texts[0]}"
                    self._put("arguments exchanged", start, end, new)
        for keyword in node.keywords:
            if keyword.arg and keyword.arg not in ("num_warps", "num_stages", "stacklevel", "strict", "flags"):
                self._drop_keyword(node, keyword)
        self.generic_visit(node)

    def _drop_keyword(self, call, keyword) -> None:
        start, end = self._range(keyword)
        while self.text[end] in " \n":
            end += 1
        end += self.text[end] == ","
        self._put("argument dropped", start, end, "")


def _name(call: ast.Call) -> str:
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def _is_number(node) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _is_text(node) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_type(node) -> bool:
    """Whether a | b is a union of types, such as Tensor | None."""
    names = [x.id for x in ast.walk(node) if isinstance(x, ast.Name)]
    nothing = any(isinstance(x, ast.Constant) and x.value is None for x in ast.walk(node))
    return nothing or any(
        name[:1].isupper() or name in ("int", "float", "str", "bool", "dict", "list") for name in names
    )
