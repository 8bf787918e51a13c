"""Finds mutations of C++ and CUDA in their tokens, inside functions. Comments, strings, preprocessor lines,
static_assert, asm and checks that throw are left out. A mutant that does not compile does not count."""

from __future__ import annotations

import re

from .sites import Change

HIDDEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^[ \t]*#[^\n]*(?:\\\n[^\n]*)*'
    r"|\b(?:static_assert|asm(?: volatile)?|STD_TORCH_CHECK|fail)\s*\([^;]*;|\btemplate\s*<[^{;()]*?>\s*(?=\n)",
    re.S | re.M,
)
OPENED = re.compile(r"([\w~]+|operator\(\))\s*(?=\()")
NOT_FUNCTIONS = {"if", "for", "while", "switch", "return", "sizeof", "alignas", "decltype", "constexpr", "defined"}
SHIFTED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
FLIPPED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
SIGNS = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "+", "+=": "-=", "-=": "+=", "*=": "+="}
EXTREMES = {"min": "max", "max": "min", "fminf": "fmaxf", "fmaxf": "fminf"}
NUMBER = re.compile(r"(?<![\w.])(?:\d+\.\d*f?|\d+(?:ll|u)?)(?![\w.])")
OPERATOR = re.compile(r"(?<= )(<=|>=|==|!=|\+=|-=|\*=|[<>+\-*/%]|&&|\|\|)(?= )")
CALL = re.compile(r"\b([A-Za-z_]\w*)(<[\w:]+>)?\(")
PAIRS = {"(": ")", "[": "]", "{": "}"}


def masked(text: str) -> str:
    """Returns the text with everything that is left out replaced by spaces, so that positions stay."""
    return HIDDEN.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def functions(code: str) -> list[tuple[int, int, str]]:
    """Returns (start and end of the body, name) of every function of masked code."""
    found, depth, inside, open_since = [], 0, 0, (0, "")
    for match in re.finditer(r"[{}]", code):
        if match[0] == "{":
            if not inside and (name := _function_before(code, match.start())):
                inside, open_since = depth + 1, (match.start(), name)
            depth += 1
        else:
            if inside == depth:
                found.append((open_since[0], match.start(), open_since[1]))
                inside = 0
            depth -= 1
    return found


def _function_before(code: str, brace: int) -> str:
    """Returns the name of the function whose body opens here, or ""."""
    head = re.split(r"[;{}]", code[:brace])[-1]
    head = re.sub(r"__\w+__\s*(?:\((?:[^()]|\([^()]*\))*\))?", "", head)  # attributes of CUDA
    if re.search(r"\b(?:namespace|struct|class|enum|union)\b[^()]*$", head) or "=" in head.split("(")[0]:
        return ""
    return next((match[1] for match in OPENED.finditer(head) if match[1] not in NOT_FUNCTIONS), "")


def changes(text: str) -> list[Change]:
    code, found = masked(text), []
    bodies = functions(code)
    for start, end, name in bodies:
        found += [Change(name, *change) for change in _in_body(text, code, start, end)]
    return found


def _in_body(text: str, code: str, start: int, end: int) -> list[tuple]:
    found = []
    for match in OPERATOR.finditer(code, start, end):
        at, mark = match.span(1), match[1]
        for kind, table in (
            ("comparison shifted", SHIFTED),
            ("comparison flipped", FLIPPED),
            ("operator exchanged", SIGNS),
        ):
            if mark in table:
                found.append((kind, *at, table[mark]))
        if mark in "+-*/%" and (stop := _operand(code, at[1] + 1, end, products=mark in "+-")):
            found.append(("term dropped", at[0] - 1, stop, ""))
    for match in NUMBER.finditer(code, start, end):
        digits = re.match(r"[\d.]+", match[0])[0]
        changed = f"{float(digits) + 1:.9g}" if "." in digits else str(int(digits) + 1)
        point = "." if "." in digits and "." not in changed and "e" not in changed else ""
        found.append(("constant", *match.span(), changed + point + match[0][len(digits) :]))
    for match in re.finditer(r"\b(?:true|false)\b", code[:end]):
        if match.start() >= start:
            found.append(("constant", *match.span(), "false" if match[0] == "true" else "true"))
    for match in CALL.finditer(code, start, end):
        if match[1] not in NOT_FUNCTIONS:
            found += _of_call(text, code, match)
    return found


def _of_call(text: str, code: str, match) -> list[tuple]:
    found, (spans, _close) = [], arguments(code, match.end() - 1)
    if match[1] in EXTREMES:
        found.append(("min for max", *match.span(1), EXTREMES[match[1]]))
    prefix = re.search(r"(?:std::)?$", code[: match.start()]).start()
    if match[1] in {*EXTREMES, "clamp"} and len(spans) in (2, 3):
        for first, last in spans[:2] if len(spans) == 2 else spans[:1]:
            found.append(("clamp dropped", prefix, _close, f"({text[first:last]})"))
    elif match[1] not in EXTREMES:
        for (a, b), (c, d) in zip(spans, spans[1:], strict=False):
            if code[a:b].strip() != code[c:d].strip():
                found.append(("arguments exchanged", a, d, text[c:d] + text[b:c] + text[a:b]))
    return found


def arguments(code: str, opening: int) -> tuple[list[tuple[int, int]], int]:
    """Returns (the arguments of the call whose parenthesis opens here, the end of the call)"""
    depth, spans, at = 0, [], opening + 1
    for n in range(opening, len(code)):
        if code[n] in "([{":
            depth += 1
        elif code[n] in ")]}":
            depth -= 1
        if not depth or depth == 1 and code[n] == ",":
            piece = code[at:n]
            if piece.strip():
                spans.append((at + len(piece) - len(piece.lstrip()), n - len(piece) + len(piece.rstrip())))
            at = n + 1
        if not depth:
            return spans, n + 1
    return [], len(code)


PRIMARY = re.compile(r"[-!~*&]?(?:[A-Za-z_][\w:]*(?:<[\w:, ]+>(?=\())?|(?:\d+\.?\d*|\.\d+)\w*)?")


def _operand(code: str, at: int, end: int, products: bool) -> int:
    """Returns the end of the operand that begins here, or 0. products: whether factors that follow belong to the
    operand."""
    match = PRIMARY.match(code, at)
    here = match.end()
    while here < end:
        if code[here] in "([" and (here > at or code[here] == "("):
            here = arguments(code, here)[1]
        elif code[here] == "." or code.startswith("->", here):
            here = re.compile(r"(?:\.|->)\w+").match(code, here).end()
        else:
            break
    if here == at:
        return 0
    if products and (more := re.compile(r" [*/%] ").match(code, here)):
        return _operand(code, more.end(), end, products)
    return here
