"""Builds the documentation as a site in build/site; a warning, such as a link that leads nowhere, is a failure.

usage: python -m tools.docs_site

The pages stand in docs/, and link to files of the repository as they can be followed there. What a page links to
outside of docs/ is copied beside the pages, so that each link leads somewhere in the site too.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from posixpath import normpath, relpath

ROOT = Path(__file__).resolve().parent.parent
DOCS, GATHERED, SITE = ROOT / "docs", ROOT / "build" / "docs", ROOT / "build" / "site"
BESIDE = "repository"  # the folder of the site in which files of the repository are
HOME = "README.md"  # which is no page: its place is that of index.md
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^(```.*?^```)", re.M | re.S)


def main() -> None:
    """Gather the pages, and build."""
    zensical = Path(sys.executable).with_name("zensical")
    if not zensical.is_file():
        sys.exit("error: zensical is not installed\n  do:       make docs")
    gather()
    shutil.rmtree(SITE, ignore_errors=True)
    built = subprocess.run(
        [str(zensical), "build", "--strict", "--clean"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if built.returncode or "Warning" in built.stdout + built.stderr:
        print(built.stdout, built.stderr, sep="\n", file=sys.stderr)
        sys.exit("error: the documentation cannot be built without warnings")


def gather() -> None:
    """Copy the pages into build/docs, and what they link to."""
    shutil.rmtree(GATHERED, ignore_errors=True)
    waiting = [(path, f"{path.relative_to(DOCS)}") for path in sorted(DOCS.rglob("*")) if path.is_file()]
    known = dict(waiting)
    for source, name in waiting:  # grows as links are found
        target = GATHERED / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copyfile(source, target)
            continue

        def place(linked: Path) -> str | None:
            if linked == ROOT / HOME:
                return "index.md"
            if linked not in known and linked.is_file():
                known[linked] = f"{BESIDE}/{linked.relative_to(ROOT).as_posix()}"
                waiting.append((linked, known[linked]))
            return known.get(linked)

        target.write_text(rewritten(source, name, place), encoding="utf-8")


def rewritten(source: Path, name: str, place: Callable[[Path], str | None]) -> str:
    """The page with its links as they are in the site; ``place`` says where a file is there."""

    def link(found: "re.Match[str]") -> str:
        there = place(Path(normpath(source.parent / found[1])))
        anchor = "" if there == "index.md" else found[2] or ""
        return f"{relpath(there, Path(name).parent.as_posix() or '.')}{anchor}" if there else found[0]

    parts = FENCE.split(source.read_text(encoding="utf-8"))
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


if __name__ == "__main__":
    main()
