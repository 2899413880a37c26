"""What README and docs say: their blocks of code, their commands, and the headings that links lead to."""

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<why>.*?) -->\n)?^(?P<indent> *)```(?P<language>[\w.]*)\n(?P<text>.*?)^ *```$", re.M | re.S
)
SPAN = re.compile(r"`([^`\n]+)`")
HEREDOC = re.compile(r"<<'(\w+)'.*?^\1$", re.M | re.S)
MADE = "<!-- made by"  # the pages that tools/reference.py writes from the code itself
STARTS = ("safetrain", "dvc", "python", "make", "pip", ".venv/bin/safetrain", "mlx_lm.generate", "mlx_lm.server")
BETWEEN = {"&&", "||", "|", ";", "&"}


@dataclass(frozen=True)
class Block:
    """A block of code. ``why_not`` says why nobody runs it here; empty where somebody does."""

    page: str
    line: int
    language: str
    text: str
    why_not: str


@dataclass(frozen=True)
class Command:
    """A program and its arguments, as they are written somewhere."""

    place: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


def pages() -> dict[str, str]:
    """The text of README and of every page, by its path."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in found}


def blocks(page: str, text: str) -> list[Block]:
    """Its blocks of code, without the indentation that a list gives them."""
    return [
        Block(page, text[: each.start("text")].count("\n") + 1, each["language"], textwrap.dedent(each["text"]),
              each["why"] or "")
        for each in BLOCK.finditer(text)
    ]  # fmt: skip


def all_blocks() -> list[Block]:
    """Those of every page."""
    return [block for page, text in pages().items() for block in blocks(page, text)]


def commands_of(block: Block) -> list[Command]:
    """What a shell would start, in order, without what is fed to it."""
    text = HEREDOC.sub("", block.text).replace("\\\n", " ")
    return [each for line in text.splitlines() for each in commands_in(line, f"{block.page}:{block.line}")]


def commands_in(line: str, place: str) -> list[Command]:
    """The commands of a line: without comments, redirections and what is set for them alone."""
    line = re.sub(r"<[a-z ]+>", "PLACEHOLDER", line.removeprefix("!"))
    words = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    words.whitespace_split, words.commenters = True, "#"
    found, kept = [[]], ""  # type: tuple[list[list[str]], str]
    for word in words:
        if word in BETWEEN:
            found.append([])
        elif set(word) <= set("<>&12") and set(word) & set("<>"):
            kept = word
        elif kept:
            kept = ""
        elif found[-1] or not re.match(r"[A-Z]+=", word):
            found[-1].append(word)
    return [Command(place, tuple(each)) for each in found if each]


def spans(page: str, text: str) -> list[str]:
    """What stands between backticks in its sentences and tables."""
    return [each.replace("\\|", "|") for each in SPAN.findall(BLOCK.sub("", text))]


def inline_commands() -> list[Command]:
    """Commands in sentences and tables, of pages that people write."""
    written = {page: text for page, text in pages().items() if not text.startswith(MADE)}
    found = [(page, span) for page, text in written.items() for span in spans(page, text)]
    return [
        command
        for page, span in found
        if span.split(" ")[0] in STARTS and " " in span and "…" not in span
        for command in commands_in(span, page)
    ]


def headings(text: str) -> set[str]:
    """The anchors of a page, by the rule of its web site."""
    plain = BLOCK.sub("", text)
    return {slug(each) for each in re.findall(r"^#{1,6} (.*)$", plain, re.M)}


def slug(heading: str) -> str:
    """A heading as an anchor."""
    words = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def links(text: str) -> list[tuple[str, str]]:
    """Path and anchor of each link to a file of the repository."""
    return re.findall(r"(?<=\]\()(?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?(?=\))", BLOCK.sub("", text))


def target_of(page: str, path: str) -> Path:
    """The file that a link of a page leads to."""
    return (ROOT / page).parent / path if path else ROOT / page
