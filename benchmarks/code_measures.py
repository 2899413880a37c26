"""The size and shape of the code: files, functions, annotations, docstrings, tests beside them.

python -m benchmarks.code_measures
"""

import ast
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "code_measures.md"
LONGEST_SHOWN = 15
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        """All of them, empty ones too."""
        return self.text.count("\n")

    @property
    def functions(self) -> list[Function]:
        """Methods and inner functions too."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]


def main() -> None:
    """Print the tables and write them."""
    product, tests, benchmarks = (
        sources(*folders) for folders in (("safetrain", "stages"), ("tests",), ("benchmarks",))
    )
    lines = ["# The code in figures", "", f"Again: `python -m {__spec__.name}`", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in measures(product, tests, benchmarks)]
    lines += ["", "| room | files | lines |", "|---|---|---|", *rooms(product)]
    lines += ["", "Longest functions: " + "; ".join(longest(product)) + "."]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def sources(*folders: str) -> list[Source]:
    """Every Python file below these folders."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    return [Source(file, text, ast.parse(text)) for file, text in zip(files, texts, strict=True)]


def measures(product: list[Source], tests: list[Source], benchmarks: list[Source]) -> Iterable[tuple[str, str]]:
    """Of safetrain and stages, if nothing else is said."""
    functions = [function for source in product for function in source.functions]
    sizes, nodes = sorted(map(length, functions)), [node for source in product for node in ast.walk(source.tree)]
    total, file_sizes = sum(source.lines for source in product), [source.lines for source in product]
    yield "files / lines", f"{len(product)} / {total:,}"
    yield "lines of a file: median / most", f"{statistics.median(file_sizes):g} / {max(file_sizes)}"
    ninth = sizes[int(0.9 * len(sizes))]
    yield (
        "functions; lines: median / 90th percentile / most",
        f"{len(sizes)}; {statistics.median(sizes):g} / {ninth} / {sizes[-1]}",
    )
    yield (
        "functions of more than 60 / 40 lines",
        f"{sum(size > 60 for size in sizes)} / {sum(size > 40 for size in sizes)}",
    )
    arguments = [argument for function in functions for argument in arguments_of(function)]
    annotated = sum(argument.annotation is not None for argument in arguments)
    yield "arguments annotated", f"{annotated} of {len(arguments)}"
    yield "returns annotated", f"{sum(function.returns is not None for function in functions)} of {len(functions)}"
    public = [node for source in product for node in public_of(source.tree)]
    for kind, name in ((Function, "functions"), (ast.ClassDef, "classes")):
        asked = [node for node in public if isinstance(node, kind)]
        yield (
            f"public {name} with a docstring",
            f"{sum(bool(ast.get_docstring(node)) for node in asked)} of {len(asked)}",
        )
    kinds = Counter(type(node) for node in nodes)
    yield "assert / raise / except Exception", f"{kinds[ast.Assert]} / {kinds[ast.Raise]} / {sum(map(is_broad, nodes))}"
    yield "functions of more than 6 arguments", str(sum(len(arguments_of(function)) > 6 for function in functions))
    yield "the word Any", str(sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes))
    yield (
        "lines that are a comment alone",
        str(sum(line.lstrip().startswith("#") for s in product for line in s.text.splitlines())),
    )
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    yield "class names in two modules", ", ".join(name for name, count in classes.items() if count > 1) or "none"
    stages = [f"{source.path.stem} {source.lines}" for source in product if source.path.parent.name == "stages"]
    yield "lines of the files in stages/", ", ".join(stages)
    yield "keys of params.yaml", str(leaves(yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))))
    for name, others in (("tests", tests), ("benchmarks", benchmarks)):
        size = sum(source.lines for source in others)
        yield f"{name}: files / lines / beside the source", f"{len(others)} / {size:,} / {size / total:.2f}"


def length(function: Function) -> int:
    """Lines, its first to its last."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def arguments_of(function: Function) -> list[ast.arg]:
    """All but self and cls."""
    given = function.args
    extra = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [
        each for each in [*given.posonlyargs, *given.args, *given.kwonlyargs, *extra] if each.arg not in ("self", "cls")
    ]


def public_of(tree: ast.Module) -> Iterable[ast.AST]:
    """Functions and classes of a module, and methods of its classes, whose name does not begin with an underscore."""
    for node in tree.body:
        if isinstance(node, (Function, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (each for each in node.body if isinstance(each, Function) and not each.name.startswith("_"))


def is_broad(node: ast.AST) -> bool:
    """Whether it is ``except Exception``, or an ``except`` of everything."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    return node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))


def leaves(value: object) -> int:
    """Keys that hold no other keys."""
    return sum(map(leaves, value.values())) if isinstance(value, dict) else 1


def rooms(product: list[Source]) -> Iterable[str]:
    """Files and lines of each folder."""
    found: dict[str, list[int]] = {}
    for source in product:
        found.setdefault(source.path.parent.relative_to(ROOT).as_posix(), []).append(source.lines)
    return [f"| {name} | {len(sizes)} | {sum(sizes):,} |" for name, sizes in sorted(found.items())]


def longest(product: list[Source]) -> list[str]:
    """The longest functions, with their lines and where they are."""
    found = [
        (length(function), f"{source.path.relative_to(ROOT)} `{function.name}`")
        for source in product
        for function in source.functions
    ]
    return [f"{name} {size}" for size, name in sorted(found, reverse=True)[:LONGEST_SHOWN]]


if __name__ == "__main__":
    main()
