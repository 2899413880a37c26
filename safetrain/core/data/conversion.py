"""The exact command that turns one file into rows where training looks for them, with the original kept."""

from pathlib import Path
from shlex import quote

KEEPS_SUFFIX = (".jsonl", ".json", ".csv", ".tsv", ".txt")
JSON_LINES = "json.dumps(r,ensure_ascii=False)+'\\n'"


def command(path: Path, suffix: str, template: str) -> str:
    """``template`` with ``{old}`` and ``{new}`` filled in for ``path``.

    The old file keeps its name where that ends in ``suffix``, as it should for what it is; else it is moved aside
    first, so that the new one stands where training looks for it.
    """
    if path.name.lower().endswith(suffix):
        old, new = path, path.with_name(path.name[: -len(suffix)])
        if new.suffix not in KEEPS_SUFFIX:
            new = new.with_name(f"{new.name}.jsonl")
        if new.exists():
            new = new.with_name(f"{new.stem}.new.jsonl")
        return f"{_filled(template, old, new)}, then give {new} as data"
    old = path.with_name(path.name + suffix)
    return f"mv -n {quote(str(path))} {quote(str(old))} && {_filled(template, old, path)}"


def python_command(path: Path, suffix: str, program: str) -> str:
    """The same for a Python program that reads file ``a`` and yields the rows ``r``: ``… for r in …``."""
    write = f"open(b,'w',encoding='utf-8').writelines({JSON_LINES} {program})"
    return command(path, suffix, f'python3 -c "import json,sys; a,b=sys.argv[1:]; {write}" {{old}} {{new}}')


def _filled(template: str, old: Path, new: Path) -> str:
    return template.replace("{old}", quote(str(old))).replace("{new}", quote(str(new)))
