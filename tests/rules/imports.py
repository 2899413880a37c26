"""Which of the project's modules each module imports, read from the source."""

import ast
import functools
from pathlib import Path

from tests.conftest import ROOT


def python_files(folder: str) -> list[Path]:
    """Every Python file below a folder of the project."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"no Python file in {folder}"
    return files


def module_name(path: Path) -> str:
    """safetrain/core/storage/files.py -> safetrain.core.storage.files."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imported_modules(path: Path) -> frozenset[str]:
    """Full names of everything that a file imports, inside functions too, and modules it starts by command line."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("safetrain."):
            found.add(node.value)
    return frozenset(found)


def transitive_files(path: Path) -> set[Path]:
    """The project's files that ``path`` reaches, itself included."""
    by_name = {module_name(file): file for folder in ("safetrain", "stages") for file in python_files(folder)}
    reached, waiting = set(), [path]
    while waiting:
        file = waiting.pop()
        if file in reached:
            continue
        reached.add(file)
        waiting += [by_name[name] for name in imported_modules(file) if name in by_name]
    return reached
