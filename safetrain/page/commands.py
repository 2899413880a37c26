"""The commands of the page: each button is one that a person could type, run as a process of its own.

The page keeps nothing. A command writes into a log in FOLDER, which it holds locked while it runs, so a page that was
closed, or another one, shows the same.
"""

import fcntl
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import RUN as RUN_VARIABLE
from safetrain.core.formatting import override
from safetrain.core.lock import FOLDER_LOCK, is_held
from safetrain.core.params_file import PARAMS, RUN_LOCK
from safetrain.core.postmortem import PostMortem
from safetrain.core.storage import paths
from safetrain.data.findings import KINDS
from safetrain.watch.monitor import look_at
from safetrain.watch.run_folder import RunReader

FOLDER = Path(".dvc/tmp/page")
ESTIMATES = FOLDER / "estimates"
PART = ".part"  # what a command has printed until it ends
HISTORY = FOLDER / "commands.txt"  # every command that a button has run, the newest last
# Slots: each runs one command at a time. A command of OTHER is short, and the page says how it ended.
RUN, CHECK, FETCH, EXPORT, ASK, ESTIMATE, STATUS, OTHER = (
    "run", "check", "fetch", "export", "ask", "estimate", "status", "command"
)  # fmt: skip
SHORT_SECONDS = 30.0
ENDED = re.compile(r"\n\[exit (-?\d+)\]\n?\Z")
SHOWN_BYTES, SHOWN_LINES, MOST_LETTERS = 16_384, 200, 4_000
# What people change most, and what it is without a choice; all else is set in params.yaml.
SETTABLE: dict[str, object] = {
    "train.learning_rate": None, "train.num_epochs": None, "train.minutes": None, "train.max_seq_length": None,
    "train.batch_size": None, "train.gradient_accumulation": None, "train.gradient_checkpointing": None,
    "lora.rank": None, "lora.num_layers": None, "train.method": "lora",
}  # fmt: skip
EXPORTS = {  # words of the command, and what it writes
    "fuse": (["fuse"], Path("fused")),
    "gguf": (["export", "gguf", "--fused"], Path("out/tuned.gguf")),
    "peft": (["export", "peft"], Path("peft-out")),
}
Form = Mapping[str, list[str]]


_ENDINGS = dict[str, threading.Thread]()  # that wait for the last command of each slot


@dataclass(frozen=True)
class Child:
    """A command of the page, and the end of what it printed. ``exit_code`` is None if its end was not seen."""

    words: tuple[str, ...]
    is_running: bool
    exit_code: int | None
    lines: tuple[str, ...]

    @property
    def command(self) -> str:
        return shlex.join(self.words)


def start(slot: str, words: list[str], into: Path | None = None) -> None:
    """Start a command that outlives the page. Its output goes to the slot's log, or to the file ``into``.

    Raises ConfigError if the slot's last command is still running.
    """
    (into or FOLDER / slot).parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(FOLDER / f"{slot}.log", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_APPEND), "ab") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("The last command of this part of the page is still running.") from None
        if slot in _ENDINGS:
            _ENDINGS[slot].join()  # the end of the last command is in its log
        (FOLDER / f"{slot}.pid").unlink(missing_ok=True)
        log.truncate(0)
        log.write(f"{json.dumps(words)}\n".encode())
        log.flush()
        with into.with_suffix(PART).open("wb") if into else nullcontext(log) as out:
            child = _process(words, out, log)
        (FOLDER / f"{slot}.pid").write_text(str(child.pid))
    _ENDINGS[slot] = threading.Thread(target=_note_end, args=(child, slot, into), daemon=True)
    _ENDINGS[slot].start()
    if slot not in (STATUS, ESTIMATE):
        with HISTORY.open("a", encoding="utf-8") as history:
            history.write(f"{shlex.join(words)}\n")


def _process(words: list[str], out: IO[bytes] | int, log: IO[bytes] | int) -> "subprocess.Popen[bytes]":
    program = [sys.executable, "-m", *(["safetrain.cli", *words[1:]] if words[0] == "safetrain" else words)]
    environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    return subprocess.Popen(
        program, stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=environment, start_new_session=True
    )


def _note_end(child: "subprocess.Popen[bytes]", slot: str, into: Path | None) -> None:
    code = child.wait()
    if into is not None:
        into.with_suffix(PART).replace(into)
    with suppress(OSError), (FOLDER / f"{slot}.log").open("a", encoding="utf-8") as log:
        log.write(f"\n[exit {code}]\n")


def read(slot: str) -> Child | None:
    """The last command of a slot; None if there was none."""
    path = FOLDER / f"{slot}.log"
    try:
        with path.open("rb") as file:
            words = json.loads(file.readline())
            file.seek(max(file.tell(), path.stat().st_size - SHOWN_BYTES))
            text = file.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return None
    ended = ENDED.search(f"\n{text}")
    code = int(ended[1]) if ended else None
    text = re.sub(r"[^\n]*\r(?!\n)", "", ENDED.sub("", f"\n{text}"))  # the last state of progress bars
    lines = [line[:MOST_LETTERS].rstrip() for line in text.split("\n") if line.strip()]
    return Child(tuple(words), code is None and is_held(path), code, tuple(lines[-SHOWN_LINES:]))


def printed(file: Path) -> Any:
    """The JSON that a command has printed, also one whose end the page has not seen; None if there is none."""
    for path in (file.with_suffix(PART), file):
        with suppress(OSError, ValueError):
            return json.loads(path.read_bytes())
    return None


def estimate_file(model: str, machine: str = "") -> Path:
    """Where the estimate for a model is kept, on this machine or another."""
    return ESTIMATES / f"{quote(model, safe='')}@{quote(machine, safe='')}.json"


def stop(slot: str, seconds: float = 0.0) -> None:
    """Ask a slot's command to end, and wait up to ``seconds`` for it."""
    log, end = FOLDER / f"{slot}.log", time.monotonic() + seconds
    if is_held(log):
        with suppress(OSError, ValueError):
            os.kill(int((FOLDER / f"{slot}.pid").read_text()), signal.SIGTERM)
    while is_held(log) and time.monotonic() < end:
        time.sleep(0.05)


def running_process() -> int | None:
    """The process that `kill` ends a run with, wherever it was started; None if none runs."""
    for lock in (RUN_LOCK, paths.OUTPUT / FOLDER_LOCK):
        if is_held(lock):
            with suppress(OSError, ValueError):
                return int(lock.read_text())
    return None


def is_planning() -> bool:
    """Whether the page's run only plans."""
    child = read(RUN)
    return child is not None and child.is_running and "--plan" in child.words


def refresh() -> None:
    """Let DVC say which stages would run, and estimate each model, unless that is known or something runs."""
    if not PARAMS.is_file() or is_held(RUN_LOCK) or is_held(FOLDER / f"{STATUS}.log"):
        return
    read_by_dvc = itertools.chain(
        *(Path().glob(f"{depth}*") for depth in ("", "data/", "data/*/", "models/*/", "conf/*/"))
    )
    last = read(STATUS)
    with suppress(OSError, ConfigError):
        newest = max(path.stat().st_mtime for path in read_by_dvc if path != Path(".dvc"))
        if last is None or last.exit_code is None or (FOLDER / f"{STATUS}.pid").stat().st_mtime < newest:
            start(STATUS, ["dvc", "status", "--json"], FOLDER / "status.json")
    unknown = [model for model in models() if not estimate_file(model).exists()]
    with suppress(OSError, ConfigError):
        if unknown:
            start(ESTIMATE, ["safetrain", "estimate", unknown[0], "--json"], estimate_file(unknown[0]))


def models() -> list[str]:
    """The model folders in models/."""
    return sorted(str(path.parent) for path in Path("models").glob("*/config.json"))


# What a button runs


def inside(text: str, *, must_exist: bool = True) -> str:
    """A path of this project, as its commands take it; raises ConfigError for any other."""
    path = Path(text)
    is_plain = "\0" not in text and not path.is_absolute() and path.parts and path.parts[0][0] not in "-."
    if not is_plain or ".." in path.parts or not path.resolve().is_relative_to(Path.cwd().resolve()):
        raise ConfigError("This path is not inside the project.", got=text[:200], do="drop the file on the page")
    if must_exist and not path.exists():
        raise ConfigError("This path does not exist.", where=str(path), do="correct it, or drop the file on the page")
    return str(path)


def free_name(path: Path) -> Path:
    """The path, or if it exists the first of NAME-2, NAME-3 … that does not."""
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(2, 10**6))
    return path if not os.path.lexists(path) else next(each for each in names if not os.path.lexists(each))


def _one(form: Form, name: str) -> str:
    value = (form.get(name) or [""])[0].strip()
    is_option = value.startswith("-") and name not in ("question", "value")
    if not value or len(value) > MOST_LETTERS or "\0" in value or is_option:
        raise ConfigError(f"{name} is missing, or cannot be used.", expected=f"up to {MOST_LETTERS:,} letters")
    return value


def _set(form: Form) -> list[str]:
    key, value = _one(form, "key"), "".join(form.get("value", []))
    if key not in SETTABLE:
        raise ConfigError(f"{key[:80]} is not set here.", do="edit params.yaml")
    is_reset = "reset" in form or not value.strip()
    return ["safetrain", "set", override(key, SETTABLE[key]) if is_reset else f"{key}={_one(form, 'value')}"]


def _columns(form: Form) -> list[str]:
    names = {key.partition(".")[2]: value[0] for key, value in form.items() if key.startswith("column.") and value[0]}
    return ["safetrain", "set", *shlex.split(override("data.columns", names or None))]


def repaired_name(source: str) -> str:
    """Where the repaired copy of a file goes."""
    return str(free_name(Path("data", f"{Path(source).name.partition('.')[0]}-repaired.jsonl")))


def _repair(form: Form) -> list[str]:
    source, dropped = inside(_one(form, "path")), [each for each in form.get("drop", []) if each in KINDS]
    into = repaired_name(source)
    drops = ["--drop-bad" if each == "ROW-UNREADABLE" else f"--drop={each}" for each in dropped]
    return ["safetrain", "validate", source, "--fix", into, *dict.fromkeys(drops)]


def _estimate(form: Form) -> list[str]:
    machine = "".join(form.get("machine", []))
    return ["safetrain", "estimate", inside(_one(form, "model")), "--json", *[f"--machine={machine}"] * bool(machine)]


def _run(form: Form) -> list[str]:
    name = "".join(form.get("name", [])).strip()[:60]
    return ["safetrain", "run", *[f"--name={name}"] * bool(name)]


def export_words(kind: str) -> list[str]:
    """The command of an export, into a new place; raises ConfigError for an unknown one."""
    if kind not in EXPORTS:
        raise ConfigError("The page has no such export.", expected=", ".join(EXPORTS))
    words, target = EXPORTS[kind]
    return ["safetrain", *words, str(free_name(target))]


def words_to_continue(death: PostMortem | None) -> list[str]:
    """The command that continues a run: as its verdict says, if that is a run, or else the usual one."""
    words = list[str]()
    with suppress(ValueError):
        words = shlex.split(death.next_command) if death is not None else []
    is_run = words[:2] in (["safetrain", "run"], ["safetrain", "search"]) and not {"&&", ";", "|", ">"} & set(words)
    return words if is_run else ["safetrain", "run"]


BUTTONS: dict[str, tuple[str, Callable[[Form], list[str]]]] = {  # slot and words of each
    "init": (OTHER, lambda form: ["safetrain", "init", *["--example"] * ("example" in form)]),
    "check": (CHECK, lambda form: ["safetrain", "validate", inside(_one(form, "path")), "--json"]),
    "repair": (OTHER, _repair),
    "columns": (OTHER, _columns),
    "use_data": (OTHER, lambda form: ["safetrain", "set", f"data.path={inside(_one(form, 'path'))}"]),
    "use_model": (OTHER, lambda form: ["safetrain", "set", f"model.path={inside(_one(form, 'path'))}"]),
    "fetch": (FETCH, lambda form: ["safetrain", "fetch", _one(form, "hub_id")]),
    "estimate": (ESTIMATE, _estimate),
    "set": (OTHER, _set),
    "plan": (RUN, lambda _form: ["safetrain", "run", "--plan"]),
    "run": (RUN, _run),
    "continue": (RUN, lambda _form: words_to_continue(look_at(RunReader(paths.OUTPUT)).verdict)),
    "discard": (OTHER, lambda _form: ["safetrain", "discard"]),
    "diagnose": (OTHER, lambda _form: ["safetrain", "diagnose"]),
    "back": (OTHER, lambda form: ["safetrain", "runs", f"--back={_one(form, 'run')}"]),
    "report": (OTHER, lambda _form: ["safetrain", "report"]),
    "export": (EXPORT, lambda form: export_words(_one(form, "kind"))),
    "ask": (ASK, lambda form: ["safetrain", "ask", "--base", "--", _one(form, "question")]),
}
CHANGE_THE_PLAN = ("use_data", "use_model", "set")
CANCELLED = (CHECK, FETCH, EXPORT, ASK)


def press(button: str, form: Form) -> tuple[str, bool]:
    """Run a button's command; returns what it said, and whether it failed. A long one is only started.

    Raises ConfigError if the button has no command with this form, or if another command is in its way.
    """
    if button == "stop":
        return _stop_run(), False
    if button == "cancel":
        slot = _one(form, "slot")
        stop(slot if slot in CANCELLED else "", 5.0)
        return "", False
    if button not in BUTTONS:
        raise ConfigError("There is no such button.")
    slot, words_of = BUTTONS[button]
    words = words_of(form)
    if button == "init":  # there is no place for a log yet: a project's folders make it one
        made = _process(words, subprocess.PIPE, subprocess.STDOUT)
        return f"$ {shlex.join(words)}\n{made.communicate()[0].decode()}", bool(made.returncode)
    if slot == RUN or words[1:2] == ["set"]:
        stop(STATUS, 5.0)  # it has DVC's lock
        stop(RUN if is_planning() else "", SHORT_SECONDS)
    model, machine = ("".join(form.get(name, [])) for name in ("model", "machine"))
    start(slot, words, {CHECK: FOLDER / "check.json", ESTIMATE: estimate_file(model, machine)}.get(slot))
    return _said(button, words, form) if slot == OTHER else (f"$ {shlex.join(words)}", False)


def _stop_run() -> str:
    """End the run as `kill` does: it saves. Returns the command; raises ConfigError if none runs."""
    process = running_process()
    if process is None or process <= 1:
        raise ConfigError("Nothing is running here.")
    os.kill(process, signal.SIGTERM)
    return f"$ kill {process}"


def _said(button: str, words: list[str], form: Form) -> tuple[str, bool]:
    """What a short command said, and whether it failed; then start what follows from it."""
    end = time.monotonic() + SHORT_SECONDS
    while (child := read(OTHER)) is not None and child.exit_code is None and time.monotonic() < end:
        time.sleep(0.05)
    has_worked = child is not None and child.exit_code == 0
    if has_worked and button in CHANGE_THE_PLAN:
        start(RUN, ["safetrain", "run", "--plan"])
    if has_worked and button in ("repair", "columns"):
        press("check", {"path": [words[4]] if button == "repair" else form.get("path", [])})
    return "\n".join([f"$ {shlex.join(words)}", *(child.lines[-12:] if child else ())]), not has_worked
