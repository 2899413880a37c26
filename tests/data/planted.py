"""The same rows in every container, compression and encoding that is read."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet as parquet_files

ROWS: list[dict[str, Any]] = [
    {"prompt": "Symbol of iron?", "completion": "Fé."},
    {"prompt": "Of gold?", "completion": 'Au, "aurum";\nit is.\t🦊'},
    {"prompt": "中文?", "completion": "Zinn | Sn"},
]
Rows = Sequence[Mapping[str, Any]]
Make = Callable[[Rows], str]


def lines(rows: Rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def table(rows: Rows, separator: str, end: str = "\r\n") -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=separator, lineterminator=end)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


CONTAINERS: dict[str, tuple[str, Make]] = {
    "lines": (".jsonl", lines),
    "lines with CRLF and blank ones": (".jsonl", lambda rows: lines(rows).replace("\n", "\r\n\r\n")),
    "an array": (".json", lambda rows: json.dumps(rows)),
    "an array over lines": (".json", lambda rows: json.dumps(rows, indent=2, ensure_ascii=False)),
    "an array of lines": (".json", lambda rows: "[\n" + ",\n".join(lines(rows).splitlines()) + "\n]\n"),
    "CSV": (".csv", lambda rows: table(rows, ",")),
    "CSV with semicolons": (".csv", lambda rows: table(rows, ";", "\n")),
    "TSV": (".tsv", lambda rows: table(rows, "\t")),
}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16")


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


COMPRESSIONS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "plain": ("", lambda content: content),
    "gzip": (".gz", gzip.compress),
    "Zstandard": (".zst", zstd),
}


def parquet(path: Path, rows: Rows) -> Path:
    parquet_files.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=2)
    return path


def arrow_stream(path: Path, rows: Rows, *, file: bool = False) -> Path:
    found = pyarrow.Table.from_pylist(list(rows))
    open_new = pyarrow.ipc.new_file if file else pyarrow.ipc.new_stream
    with open_new(str(path), found.schema) as writer:
        writer.write_table(found, max_chunksize=2)
    return path
