"""The checks of preflight as its source names them: identifier and remedy."""

import ast
import inspect
from dataclasses import dataclass

from safetrain.plan import preflight

MAKERS = ("Check", "verdict", "skipped")
REMEDY = 6  # its place among the arguments of the first two


@dataclass(frozen=True)
class NamedCheck:
    """A check: its identifier, and what to do when it fails."""

    id: str
    remedy: str


def named_checks() -> list[NamedCheck]:
    """Every check, in the order in which preflight knows them."""
    remedies = dict[str, str]()
    for call in _calls():
        identifier, *_ = texts = [_text(argument) for argument in call.args]
        remedies[identifier] = remedies.get(identifier) or (texts[REMEDY] if len(texts) > REMEDY else "")
    return [NamedCheck(each, remedies.get(each, "")) for each in preflight.IDS]


def _calls() -> list[ast.Call]:
    """The calls that make a check under a name that is written out."""
    nodes = ast.walk(ast.parse(inspect.getsource(preflight)))
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS]
    return [call for call in calls if call.args and isinstance(call.args[0], ast.Constant)]


def _text(node: ast.expr) -> str:
    """A text that is written out, with … for what is filled in; empty for anything else."""
    if isinstance(node, ast.IfExp):
        return _text(node.body) or _text(node.orelse)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
