"""The checks of preflight as its source names them: identifier, name and remedy."""

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from safetrain.plan import checks, hosts, preflight

MAKERS = ("Check", "verdict", "graded", "skipped")
REMEDY = 7  # its place among the arguments of the first three


@dataclass(frozen=True)
class NamedCheck:
    """A check: its identifier, what it looks at, and what to do when it fails."""

    id: str
    name: str
    remedy: str


def named_checks() -> list[NamedCheck]:
    """Every check, in the order in which preflight knows them."""
    names, remedies = dict[str, str](), dict[str, str]()
    for call in _calls((checks, preflight, hosts)):
        identifier, name, *_ = texts = [_text(argument) for argument in call.args]
        remedy = texts[REMEDY] if len(texts) > REMEDY else ""
        names[identifier] = names.get(identifier) or name
        remedies[identifier] = remedies.get(identifier) or remedy
    return [NamedCheck(each, names.get(each, ""), remedies.get(each, "")) for each in preflight.IDS]


def _calls(modules: Sequence[ModuleType]) -> list[ast.Call]:
    """The calls that make a check under a name that is written out."""
    nodes = [node for module in modules for node in ast.walk(ast.parse(inspect.getsource(module)))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS]
    return [call for call in calls if call.args and isinstance(call.args[0], ast.Constant)]


def _text(node: ast.expr) -> str:
    """A text that is written out, with … for what is filled in; empty for anything else."""
    if isinstance(node, ast.IfExp):
        return _text(node.body) or _text(node.orelse)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
