"""What may leave this machine in a bug report: numbers, words of our own, and nothing that names anybody.

Text passes only under keys whose values we write ourselves, and then without paths, names and secrets.
"""

import builtins
import os
import platform
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.again import RUN
from safetrain.core.records.schema import keys_of

MOST_ITEMS, MOST_LETTERS, LEAST_SECRET = 200, 2000, 6
KEY = re.compile(r"[A-Za-z][\w.\-]{0,59}")
PATH = re.compile(r"(?:file://)?(?<![\w/.])~?/[^\s'\":,;()]+|\b[A-Za-z]:\\[^\s'\":,;()]+")
URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"]+", re.IGNORECASE)
MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
TOKEN = re.compile(
    r"\b(?:hf|ghp|gho|ghs|glpat|sk|pk|rk|xox[abp]|github_pat|wandb)[_-][\w-]{8,}|\bA(?:KIA|SIA)[A-Z0-9]{12,}"
    r"|\beyJ[\w-]{10,}(?:\.[\w-]+)*|\b(?=\w*\d)(?=\w*[A-Za-z])\w{40,}"
)
SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|AUTH|CREDENTIAL|COOKIE|PRIVATE|LICENSE|DSN|WEBHOOK", re.IGNORECASE)
CODE = re.compile(r"(?:.*/)?((?:site-packages|python3\.\d+|safetrain|stages)/[\w/.\-+]+)$")
FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+),? in (\S+)')
HEAD = re.compile(
    r"^(?:Traceback \(most recent call last\):|(?:Current thread|Thread) 0x[0-9a-f]+|Fatal Python error: [\w ]+"
    r"|The above exception was the direct cause|During handling of the above exception)"
)
ERROR = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Died|Run)): ?(.*)$")
OF_MLX = re.compile(r"\[[A-Za-z_:]+\] [^\n'\"]{0,200}")  # how all of mlx's own messages begin
KNOWN = re.compile(  # what mlx, the C library, OpenBLAS and the systems say, and nobody else's words
    r"mlx failed at step \d+|terminate called after throwing an instance of '?std::\w+|std::bad_alloc"
    r"|(?:OpenBLAS error: )?Memory allocation (?:still )?failed(?: after \d+ retries)?"
    r"|Unable to allocate [\d.]+ [KMGT]iB|Cannot allocate memory|Resource temporarily unavailable|Insufficient Memory"
    r"|\bout of memory\b|oom-kill|Killed process \d+|(?:total-vm|anon-rss):\d+kB|CUDA error|No space left on device"
    r"|Disk quota exceeded|Impacting ?Interactivity|(?:GPU Timeout|GPU Hang) Error|victim of GPU error"
    r"|kIOGPUCommandBufferCallbackError\w+|Resource limit \(\d+\)|maximum allowed buffer size"
    r"|JetsamEvent-[\d.-]+ips: process \d+ was killed \([\w-]+\)|panic-\w+-[\d.-]+panic was written since",
    re.IGNORECASE,
)
LIBRARIES = (
    "safetrain", "stages", "mlx", "mlx_lm", "numpy", "transformers", "tokenizers", "huggingface_hub", "json", "http",
    "subprocess", "concurrent", "urllib", "socket", "zipfile", "hydra", "omegaconf", "yaml", "jinja2", "psutil", "rich",
    "dvc", "torch", "peft", "gguf", "pyarrow", "wandb", "mlflow", "requests", "urllib3", "httpx",
)  # fmt: skip
OVERLAYS = (  # of conf/experiment, that come with safetrain
    "minimal", "pretrain_10m", "pretrain_400m", "pretrain_800m", "pretrain_85m", "smoke",
)  # fmt: skip
WORDS_OF_COMMANDS = ("dvc", "repro", "exp", "run", "safetrain", "python", "-m", "stages.train", "-f", "-s", "train")


@dataclass(frozen=True)
class Names:
    """What names this machine, its user, or opens something of theirs."""

    folders: tuple[str, ...]
    words: tuple[str, ...]  # of users and hosts
    secrets: tuple[str, ...]


def names_here(environment: Mapping[str, str] = os.environ) -> Names:
    """Those of this process."""
    homes = {str(Path.home()), environment.get("HOME", "")}
    folders = {*homes, str(Path.cwd()), sys.prefix, tempfile.gettempdir(), environment.get("PWD", "")}
    hosts = {platform.node(), socket.gethostname(), environment.get("HOSTNAME", ""), environment.get("HOST", "")}
    users = {environment.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    users |= {Path(home).name for home in homes}
    words = users | hosts | {host.partition(".")[0] for host in hosts}
    secrets = {
        value
        for name, value in environment.items()
        if name != RUN and len(value) >= LEAST_SECRET and (SECRET_NAME.search(name) or TOKEN.fullmatch(value))
    }
    return Names(
        tuple(sorted({folder for folder in folders if len(folder) > 1}, key=len, reverse=True)),
        tuple(sorted({word for word in words if len(word) > 1}, key=len, reverse=True)),
        tuple(sorted(secrets, key=len, reverse=True)),
    )


class Redaction:
    """Takes names out of text, and text out of records."""

    def __init__(self, names: Names) -> None:
        self._names = names
        words = "|".join(re.escape(word) for word in names.words)
        self._words = re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE) if words else None

    def text(self, text: str) -> str:
        """Text of our own, without what names anybody."""
        for secret in self._names.secrets:
            text = text.replace(secret, "(secret)")
        text = TOKEN.sub("(secret)", MAIL.sub("(address)", URL.sub("(address)", text)))
        for folder in self._names.folders:
            text = re.sub(re.escape(folder) + r"(?![\w-])[^'\":,;()]*", "(path)", text)
        text = PATH.sub("(path)", text)
        return (self._words.sub("(name)", text) if self._words else text)[:MOST_LETTERS]

    def record(self, value: Any, texts: frozenset[str], key: str = "") -> Any:
        """A record with all its numbers, and only those texts that are under a key of ``texts``."""
        if isinstance(value, dict):
            return {
                name: self.record(item, texts, key if key in texts else name)
                for name, item in list(value.items())[:MOST_ITEMS]
                if KEY.fullmatch(name) and self.text(name) == name
            }
        if isinstance(value, list):
            kept = [self.record(item, texts, key) for item in value[:MOST_ITEMS]]
            return [*kept, f"and {len(value) - MOST_ITEMS} more"] if len(value) > MOST_ITEMS else kept
        if not isinstance(value, str):
            return value
        return self.text(value) if key in texts else f"(left out: {len(value)} characters)"

    def said(self, text: str) -> str:
        """Of what a library has said: its kind, the words of mlx, and what is known; the rest may quote a row."""
        error, words = ERROR.match(text), OF_MLX.search(text)
        kept = [_kind(error[1])] if error else []
        kept += [self.text(words[0])] if words else dict.fromkeys(found[0] for found in KNOWN.finditer(text))
        return ": ".join(kept) or f"(left out: {len(text)} characters)"

    def stack(self, text: str) -> str:
        """A traceback or the stacks of a process: places in the code, and kinds of errors."""
        lines = list[str]()
        for line in text.splitlines():
            if frame := FRAME.match(line):
                code = CODE.match(frame[1])
                place = f"{code[1]} line {frame[2]} in {frame[3]}" if code else f"(file) line {frame[2]}"
                lines.append(self.text(f"  {place}"))
            elif head := HEAD.match(line):
                lines.append(self.text(head[0]))
            elif ERROR.match(line):
                lines.append(self.said(line))
        return "\n".join(lines)

    def evidence(self, line: str, *, quoted: bool) -> str:
        """A line of a verdict: as it is where the words are ours, else what ``said`` leaves of it."""
        place = line.removeprefix("Python was at ")
        if place != line:
            return f"Python was at {self.stack(f'File {place}').strip() or '(file)'}"
        return self.said(line) if quoted else self.text(line)

    def command(self, text: str) -> str:
        """A command line: our own words, the keys that were set, and numbers."""
        try:
            words = shlex.split(text)
        except ValueError:
            return "(left out)"
        return self.text(" ".join(map(_word, words)))


def _kind(name: str) -> str:
    """Of an error of Python or of a library that we use; somebody's own may be named after anything."""
    known = hasattr(builtins, name) or name.partition(".")[0] in LIBRARIES
    return name if known else "(an error)"


def _word(word: str) -> str:
    key, equals, value = word.partition("=")
    if word in WORDS_OF_COMMANDS:
        return word
    section, _, name = key.partition(".")
    if equals and (key == "experiment" or (section in keys_of("") and name in keys_of(section))):
        plain = re.fullmatch(r"-?[\d.eE+-]+|true|false|null", value) or (key == "experiment" and value in OVERLAYS)
        return word if plain else f"{key}=…"
    return "…"
