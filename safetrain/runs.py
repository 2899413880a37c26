"""Runs of the pipeline by DVC: what changed is rerun, and in Git a run with its own values is recorded."""

import itertools
import json
import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetrain.core.errors import AlreadyRunningError, ConfigError, SafetrainError
from safetrain.core.formatting import override
from safetrain.core.params_file import PARAMS, read_params, values_in, with_value, write_params
from safetrain.core.results import settle
from safetrain.core.signals import Terminated, handling
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_text
from safetrain.project import git, identity, is_in_git, start_dvc

if TYPE_CHECKING:
    from dvc.repo import Repo

LOCK_FILE = Path("dvc.lock")
EXITED = re.compile(r"failed to run: .*, exited with (-?\d+)", re.DOTALL)
EXPERIMENT = re.compile(r"refs/exps/([0-9a-f]{2})/([0-9a-f]{38})/([^/]+)")
LONGEST_NAME = 60  # letters, of an experiment


# DVC


@contextmanager
def _dvc() -> Iterator["Repo"]:
    """This project as DVC sees it, without Git where there is none; DVC's errors become ours."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    start_dvc()
    try:
        with Repo(config={"core": {"no_scm": not is_in_git()}}) as repo:
            yield repo
    except DvcException as error:
        raise _in_our_words(error) from None


def _in_our_words(error: BaseException) -> SafetrainError:
    """Name the stage that failed, with its own exit code: it has said why. Else quote DVC."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    if ended := EXITED.fullmatch(str(causes[-1])):
        code = int(ended[1])
        code = code if code >= 0 else 128 - code
        stage = str(error).rpartition("'")[0].rpartition("'")[2]
        return SafetrainError(f"The {stage} stage ended with exit code {code}.", exit_code=code)
    return SafetrainError("DVC stopped: " + ": ".join(map(str, causes)))


def reproduce(*stages: str) -> None:
    """Rerun what has changed, as `dvc repro` does, up to ``stages`` if any are named.

    Raises SafetrainError with the exit code of a stage that failed.
    """
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    with handling(dict.fromkeys(numbers, _end_stage)), _dvc() as repo:
        _drop_broken_lock(repo)
        repo.reproduce(list(stages) or None)
    settle()  # what DVC has checked out from its run cache is the last result now


def _drop_broken_lock(repo: "Repo") -> None:
    """Remove a dvc.lock that a kill has left half-written: DVC refuses it, and finds the results in its run cache."""
    from dvc.dvcfile import Lockfile
    from dvc.exceptions import PrettyDvcException

    try:
        Lockfile(repo, str(LOCK_FILE)).load()
    except PrettyDvcException:
        LOCK_FILE.unlink()
        print("dvc.lock was half-written when a run was killed; DVC makes it again", flush=True)


def _end_stage(number: int) -> None:
    """Pass a signal on to the running stage, which saves its state and ends; DVC itself would leave it running."""
    import psutil

    from safetrain.guard.supervisor import SHELLS

    stages = list[psutil.Process]()
    with suppress(psutil.Error):  # it has just ended
        for child in psutil.Process().children():
            stages += child.children() if child.name() in SHELLS else [child]
        for stage in stages:
            stage.send_signal(number)
    if not stages:
        raise Terminated


def wait_for_stages() -> None:
    """Wait for a stage that a killed run has left in this project; raises AlreadyRunningError if it does not end."""
    import psutil

    left, here = list[psutil.Process](), str(Path.cwd())
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # another user's
            if process.cwd() == here and "DVC_STAGE" in process.environ():
                left.append(process)
    if left:
        print(f"waiting for a stage of another run to end (process {left[0].pid})", flush=True)
    for process in psutil.wait_procs(left, 60.0)[1]:
        what = f"A stage of another run in this project is still running (process {process.pid})."
        raise AlreadyRunningError(what, do=f"wait until it ends, or end it: kill {process.pid}")


# Experiments


def why_unrecorded() -> str:
    """Why runs with their own values are not recorded here; empty if they are."""
    if not is_in_git():
        return "this folder is not under Git" if shutil.which("git") else "Git is not installed"
    return "" if git("rev-parse", "--verify", "--quiet", "HEAD") else "Git has no commit yet"


def record(words: Sequence[str], name: str = "") -> str:
    """Record what the workspace holds as an experiment of DVC, as ``name`` or after ``words``; returns the name.

    `dvc exp save` moves uncommitted files into a stash and back: a kill in between would lose them. This only adds a
    commit. Raises SafetrainError.
    """
    name, head = _free_name([name] if name else words), _made("rev-parse", "HEAD")
    with tempfile.TemporaryDirectory() as scratch:
        index = f"{scratch}/index"  # the user's own index stays as it is
        _made("read-tree", head, index=index)
        _made("add", "--update", ".", index=index)
        _made("add", "--force", *map(str, (LOCK_FILE, PARAMS, "dvc.yaml", paths.EVALUATION)), index=index)
        tree = _made("write-tree", index=index)
    commit = _made(*identity(), "commit-tree", tree, "-p", head, "-m", f"safetrain run {shlex.join(words)}")
    _made("update-ref", f"refs/exps/{head[:2]}/{head[2:]}/{name}", commit)
    return name


def _made(*words: str, index: str = "") -> str:
    made = git(*words, index=index)
    if made is None:
        raise SafetrainError(f"git {' '.join(words)} failed.", where=Path.cwd())
    return made.strip()


def _free_name(words: Sequence[str]) -> str:
    """A name from ``words`` that no experiment with another result has, such as ``seed-7`` or ``seed-7-2``."""
    base = name_after(words)
    here = _learnt(_text_in("", LOCK_FILE))
    for number in itertools.count(1):
        name = base if number == 1 else f"{base}-{number}"
        taken = [ref for ref in _experiments() if ref.endswith(f"/{name}")]
        if not taken or any(_learnt(_text_in(ref, LOCK_FILE)) == here for ref in taken):
            break
    return name


def name_after(words: Sequence[str]) -> str:
    """A name for Git, or a folder, that says the values ``words`` without their sections."""
    short = [word.removeprefix("experiment=") for word in words]
    text = "_".join(re.sub(r"^[\w+]*\.(?=[\w.]*=)", "", word) for word in short)
    text = re.sub(r"[^\w.-]+|\.(?!\w)", "-", text, flags=re.ASCII).replace(".lock", "-lock")
    return text[:LONGEST_NAME].strip("-.") or "run"


def _learnt(lock: str) -> tuple[Any, ...]:
    """What a dvc.lock says about training and evaluation."""
    stages = _stages_of(lock)
    return stages.get("train"), stages.get("evaluate")


def _experiments() -> list[str]:
    """The references of all experiments, newest first."""
    listed = git("for-each-ref", "--format=%(refname)", "--sort=-committerdate", "refs/exps") or ""
    return [ref for ref in listed.split() if EXPERIMENT.fullmatch(ref)]


def listed() -> list[dict[str, str]]:
    """What the workspace and each experiment reached, and ran with, where that differs from params.yaml."""
    now, rows = values_in(read_params()), list[dict[str, str]]()
    for name, ref in [("workspace", ""), *((ref.rpartition("/")[2], ref) for ref in _experiments())]:
        lock, scores = (_text_in(ref, file) for file in (LOCK_FILE, paths.EVALUATION))
        better, score, loss = _reached(scores)
        ran = _values_of(lock).items()
        values = " ".join(f"{key}={value}" for key, value in ran if now.get(key, value) != value)
        rows.append({"run": name, "better_by": better, "score": score, "test_loss": loss, "values": values})
    return rows


def described() -> str:
    """The same in lines."""
    rows = listed()
    width = max(len(row["run"]) for row in rows)
    lines = [f"{'run':<{width}}  {'better by':<14}  {'score':>11}  test loss  values that differ from params.yaml"]
    for run, better, score, loss, values in (row.values() for row in rows):
        lines.append(f"{run:<{width}}  {better:<14}  {score:>11}  {loss:>9}  {values}".rstrip())
    return "\n".join(lines)


def run_of_result() -> str:
    """The command whose values the workspace's result has."""
    now = values_in(read_params())
    ran = _values_of(_text_in("", LOCK_FILE)).items()
    return " ".join(["safetrain run", *(override(key, value) for key, value in ran if now.get(key, value) != value)])


def _text_in(ref: str, file: Path) -> str:
    """The text of a file in an experiment, or without ``ref`` in the workspace; empty if it is not there."""
    if ref:
        return git("show", f"{ref}:./{file}") or ""
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _reached(text: str) -> tuple[str, str, str]:
    """The main scores of evaluation.json, as far as they are there."""
    try:
        scores = json.loads(text or "{}")
        tuned, gain = scores.get("tuned") or {}, scores.get("improvement") or {}
        match, loss = tuned.get("score"), tuned.get("loss")
        better = f"{gain['nats_per_label']:.3f} ± {gain['plus_minus']:.3f}" if "plus_minus" in gain else ""
        return better, "" if match is None else f"{match:.1%}", "" if loss is None else f"{loss:.4f}"
    except (ValueError, KeyError, TypeError, AttributeError):  # a damaged file, or another program's
        return "", "", ""


def _values_of(lock: str) -> dict[str, Any]:
    """The values that the stages in a dvc.lock have read, by ``section.key``."""
    read = [stage.get("params", {}).get(str(PARAMS), {}).items() for stage in _stages_of(lock).values()]
    found = dict[str, Any]()
    for key, value in itertools.chain.from_iterable(read):
        found |= {key: value} if "." in key else {f"{key}.{name}": each for name, each in value.items()}
    return found


def _stages_of(lock: str) -> dict[str, Any]:
    import yaml

    with suppress(yaml.YAMLError):  # a kill may have left a part of it
        return (yaml.safe_load(lock) or {}).get("stages", {})
    return {}


def go_back(name: str) -> None:
    """Bring back the values and the result of an experiment; other files stay as they are.

    Raises ConfigError if there is none of this name, SafetrainError if the cache lacks its files: then the next run
    makes the result of params.yaml again.
    """
    ref = next((ref for ref in _experiments() if ref.endswith(f"/{name}")), None)
    if ref is None:
        names = ", ".join(dict.fromkeys(each.rpartition("/")[2] for each in _experiments()))
        raise ConfigError(f"There is no run {name}.", expected=names or why_unrecorded() or "a recorded run")
    text = read_params()
    now = values_in(text)
    for key, value in values_in(_text_in(ref, PARAMS)).items():
        text = with_value(text, key, value) if now.get(key, value) != value else text
    write_text(LOCK_FILE, _text_in(ref, LOCK_FILE))
    try:
        with _dvc() as repo:
            repo.checkout(force=True)
        write_params(text)
    finally:
        settle()


# Values


def jobs_of(words: Sequence[str]) -> list[list[str]]:
    """The words of each run: all combinations where a key has several values, as in ``train.seed=1,2``."""
    return [list(job) for job in itertools.product(*map(_choices, words))]


def _choices(word: str) -> Iterable[str]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = word.partition("=")
    if Path(value).exists():  # a file's name may have a comma
        return [word]
    try:
        parsed = OverridesParser.create().parse_override(word)
        return [f"{key}={each}" for each in parsed.sweep_string_iterator()] if parsed.is_sweep_override() else [word]
    except HydraException:
        return [word]  # composed() says what is wrong
