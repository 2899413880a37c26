"""Files made to harm: each is read within bounds, or is one clear error, and nothing of it steers a terminal."""

import gzip
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.core.errors import DataError
from safetrain.core.formatting import printable
from safetrain.data.files import rows_of
from tests.conftest import EMBEDDED, ROOT
from tests.data.planted import COMPRESSIONS, parquet
from tests.data.reading import refusal_of

MIB = 2**20
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
GOOD = '{"text": "good"}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f'{GOOD}\n{{"text": "BIG"}}\n{GOOD}\n', "a row is longer than 16 MiB"),
        (f'{GOOD}\n{{"text": "BIG', "a row is longer than 16 MiB"),
        (f'[{GOOD}, {{"text": "BIG"}}]', "a row is longer than 16 MiB"),
        ("text\nBIG\n", "a row is longer than 16 MiB"),
        ('text\n"LINES"\n', "a row is longer than 16 MiB"),
        ("[" * 100_000, "brackets are nested"),
        (f"{GOOD}\n{'[' * 100_000}", ":2: brackets are nested"),
        ('{"a":' * 100_000, "brackets are nested"),
        (f"[{GOOD}, {'[' * 100_000}{']' * 100_000}]", "brackets are nested"),
        (f'messages,id\n"{"[" * 100_000}",1\n', "brackets are nested"),
        (f'{{"text": "a", "n": {"9" * MIB}}}', "a number has more digits"),
        (f'{{"text": "a", "n": 1e{"9" * 400}}}', ""),
        (f'{{"prompt": "a", "response": {"9" * 5000}}}', "a number has more digits"),
        ('{"prompt": "a", "response": 1e999}', "a number that is too large"),
        (f'{{"messages": [{{"role": "user", "content": "a", "x": {"[" * 990}{"]" * 990}}}]}}', "brackets are nested"),
        ('{"text": "\\ud83d"}', "half a surrogate pair"),
        ('{"messages": [{"role": "\\ud83d", "content": "a"}]}', r"role is ''\ud83d''"),
        ('[{"prompt": "a", "completion": "\\udc00"}]', "half a surrogate pair"),
        ('{"text": "a\\u0000b"}', ""),
        ('{"text": "a\x00b"}', "Invalid control character"),
        ("text\na\x00b\n", ""),
        ("\x00" * 4096, "a binary file, or text without"),
        (f'{{"{ESCAPE}": 1}}', "Invalid control character"),
        (json.dumps({ESCAPE: 1}), r"'\x1b]0;owned\x07\x1b[2J'"),
        (json.dumps({"messages": [{"role": ESCAPE, "content": "a"}]}), r"\x1b]0;owned"),
        (json.dumps({"text": "a", "label": ESCAPE}), "label: classes and KTO marks are not supported"),
        (f"{ESCAPE},b\n1,2\n", r"\x1b]0;owned\x07"),
        (f"prompt,{ESCAPE},{ESCAPE}\n1,2,3\n", "two columns named"),
        ("{}" * MIB, "Extra data"),
        ("{" * 10, "not valid JSON"),
        (",".join(f"c{n}" for n in range(100_000)) + "\nx" + "," * 99_999, "unknown keys"),
        ("\ufeff" * 1000 + GOOD, "no line begins with a JSON object"),
    ],
)
def test_it_is_read_or_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.jsonl"
    text = text.replace("BIG", "x" * 50 * MIB).replace("LINES", "x\n" * 10 * MIB)
    path.write_bytes(text.encode())
    said = refusal_of(path)
    assert bool(said) == bool(says)
    assert says in printable(said)
    assert "\x1b" not in said
    assert len(printable(said)) < 6000


@pytest.mark.parametrize("compression", ["gzip", "Zstandard"])
def test_a_bomb_is_refused_before_it_is_decompressed(tmp_path: Path, compression: str) -> None:
    """Hundreds of pieces that each unpack to a MiB: one line, and many."""
    pack, path = COMPRESSIONS[compression][1], tmp_path / "a.jsonl"
    line = b'{"text": "' + b"x" * (MIB - 13) + b'"}\n'
    one_line, lines = pack(b'{"text": "') + pack(b"x" * MIB) * 300, pack(line) * 300
    for content, said in ((one_line, "longer than 16 MiB"), (lines, "unpacks to more than 200 times its size")):
        path.write_bytes(content)
        tracemalloc.start()
        with pytest.raises(DataError, match=said):
            sum(1 for _ in rows_of(path))
        assert tracemalloc.get_traced_memory()[1] < 100 * MIB
        tracemalloc.stop()


def test_what_is_well_packed_is_no_bomb(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    rows = "".join(f'{{"text": "the same words again and again, number {number}"}}\n' for number in range(50_000))
    path.write_bytes(gzip.compress(rows.encode()))
    assert sum(1 for _ in rows_of(path)) == 50_000


def test_a_table_that_unpacks_without_bound_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [{"text": f"{number}" + "x" * MIB} for number in range(80)])
    said = refusal_of(path)
    assert not said or "unpacks to more than 200 times its size" in said


def test_pieces_of_one_byte_take_no_quadratic_time(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(f"[{','.join([GOOD] * 300_000)}]")
    start = time.monotonic()
    assert sum(1 for _ in rows_of(path)) == 300_000
    assert time.monotonic() - start < 20


@pytest.fixture(name="validate")
def validate_fixture() -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "safetrain.cli", "validate", *arguments, "--model", str(EMBEDDED)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)

    return run


def test_nothing_of_the_data_or_of_a_file_s_name_steers_the_terminal(
    tmp_path: Path, validate: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    path = tmp_path / f"rows{ESCAPE.replace('/', '')}\u202e.jsonl"
    rows = [{"prompt": ESCAPE, "completion": "[red]a\u202eb[/red]"}, {ESCAPE: 1}, {"text": ESCAPE, "\u202e": "k"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for arguments in ((str(path), "--show-mask", "-1"), (str(path), "--fix", str(tmp_path / f"out{ESCAPE}.jsonl"))):
        done = validate(*arguments)
        assert done.returncode == 1
        for said in (done.stdout, done.stderr):
            assert not {"\x1b", "\x07", "\u202e"} & set(said)
            assert "Traceback" not in said
        assert r"\x1b]0;owned" in done.stdout + done.stderr
