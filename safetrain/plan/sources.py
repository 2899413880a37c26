"""The files of a data set, read in pieces of whole lines: memory does not grow with the file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.forms import check_form, not_utf8
from safetrain.core.errors import DataError

SPLITS = ("train", "valid", "test")
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz", ".zst", ".arrow")
BLOCK_BYTES = 2**19
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Lines:
    """Whole lines of a file; the first of them is number ``first``."""

    first: int
    texts: tuple[str, ...]

    def numbered(self) -> Iterator[tuple[int, str]]:
        """Those that hold something, with their numbers."""
        numbered = enumerate(self.texts, start=self.first)
        return ((number, text) for number, text in numbered if text and not text.isspace())


def files_of(source: Path) -> dict[str, Path]:
    """The files of ``source``, a file or a folder, by split; raises DataError."""
    if source.is_file():
        return {"train": source}
    if not source.is_dir():
        raise DataError(
            "The data does not exist.",
            where=str(source),
            expected="a .jsonl file, or a folder with train.jsonl",
            do="correct data.path in params.yaml",
        )
    files = {name: source / f"{name}.jsonl" for name in SPLITS if (source / f"{name}.jsonl").is_file()}
    if "train" not in files:
        there = sorted(path.name for path in source.iterdir() if not path.name.startswith("."))
        raise DataError(
            "The data folder has no train.jsonl.",
            where=str(source),
            got=", ".join(there[:8]) + (", …" if len(there) > 8 else "") or "an empty folder",
            do="put your rows there, or name the file itself: data.path",
        )
    return files


def unread_files(source: Path, files: dict[str, Path]) -> list[str]:
    """Names of what lies in a data folder as if it were data, and is not read."""
    if not source.is_dir():
        return []
    known = {path.name for path in files.values()}
    others = (path.name for path in source.iterdir() if path.name not in known)
    return sorted(name for name in others if name.endswith(DATA_SUFFIXES))


def blocks_of(path: Path) -> Iterator[Lines]:
    """The lines of a file, some hundred kilobytes at a time; raises DataError for what is no JSONL in UTF-8."""
    check_form(path)
    first, left = 1, b""
    with path.open("rb") as file:
        while True:
            block = file.read(BLOCK_BYTES)
            content = left + block
            if first == 1:
                content = content.removeprefix(BYTE_ORDER_MARK)
            border = content.rfind(b"\n") + 1 if block else len(content)
            left = content[border:]
            if border:
                lines = _decoded(content[:border], path, first)
                yield Lines(first, tuple(lines))
                first += content.count(b"\n", 0, border)
            if not block:
                return


def _decoded(content: bytes, path: Path, first: int) -> list[str]:
    try:
        return content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise not_utf8(content, error, path, first) from None
