"""What every test needs: the fast BLAS before mlx, the CPU, a lock of its own, no one's cache, small models from code.

Tests of the engine compute on the CPU, where what they say holds to the last bit; ``SAFETRAIN_TEST_GPU=1`` lets mlx
choose. Processes that a test starts take the machine's own device, as for a person.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from safetrain.core.formatting import RUN
from safetrain.core.storage.files import cache_directory
from safetrain.engine.cpu.blas import load_fast_blas

# Two workers on two cores: a second thread of a product, here or in a process that a test starts, would wait for the
# other worker. Where a test asks for more threads, those that have nothing to do give way at once.
BLAS_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OPENBLAS_THREAD_TIMEOUT": "4"}
os.environ |= BLAS_THREADS
os.environ["MLX_DISABLE_COMPILE"] = "1"  # on a CPU, g++ would build each kernel that mlx-lm's layers fuse
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on a GPU, products in float32 would round to TF32
load_fast_blas()  # before any test imports mlx
BLAS_CACHE = cache_directory() / "blas"
BLAS_CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
import mlx.core as mx  # noqa: E402

if os.environ.get("SAFETRAIN_TEST_GPU") != "1":
    mx.set_default_device(mx.cpu)
MLX_LIMIT = mx.set_memory_limit(2**40)  # returns the one before
mx.set_memory_limit(MLX_LIMIT)

cpu_only = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="about what a CPU alone does")
GIB = 2**30
MEMORY_DISK = Path("/dev/shm")


def has_memory_disk() -> bool:
    """Whether files can be kept in memory: each checkpoint is flushed to the disk, and tests write hundreds of them.

    They take half a GiB. Tests start programs there too, which Docker forbids.
    """
    if sys.platform != "linux" or not os.access(MEMORY_DISK, os.W_OK) or psutil.virtual_memory().available < 8 * GIB:
        return False
    return shutil.disk_usage(MEMORY_DISK).free > 4 * GIB and not os.statvfs(MEMORY_DISK).f_flag & os.ST_NOEXEC


if has_memory_disk():  # of this process, not of those that it starts
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_DISK))
    tempfile.tempdir = os.environ["PYTEST_DEBUG_TEMPROOT"]

for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    # A background job of a script, or one under nohup, ignores these, and so would what it starts. A handler is not
    # inherited: what tests start is interrupted as it is anywhere, and the tests themselves by SIGINT.
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else lambda *_: None)

# The order in which workers take up files: what takes longest first, so that none is left with it at the end. A file is
# run by one worker, in its order: some build on what was made once.
LONG_FIRST = (
    "page/", "pipeline/test_dvc", "pipeline/", "test_chaos", "test_notebooks", "engine/test_preferences", "stages/",
    "engine/test_configs_read", "engine/test_ranks", "export/test_gguf", "test_talk", "guard/", "data/", "plan/",
)  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
EMBEDDED = ROOT / "models" / "encyclopedia-3m"
QUICK = ("core/", "data/", "plan/", "rules/", "watch/", "test_example")  # where nothing is trained


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out what trains or starts a process")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Of processes, quick tests start those alone that say what is in the repository and what the system is."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and Path(os.fsdecode(arguments[0])).name not in ("git", "uname"):
            pytest.skip("starts a process")

    if session.config.getoption("quick"):
        sys.addaudithook(refuse)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    name = collection_path.relative_to(ROOT / "tests").as_posix()
    return True if config.getoption("quick") and name.endswith(".py") and not name.startswith(QUICK) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In workers alone: one process runs the tests in the order of their files."""

    def turn(item: pytest.Item) -> int:
        places = [place for place, start in enumerate(LONG_FIRST) if item.nodeid.startswith(f"tests/{start}")]
        return places[0] if places else len(LONG_FIRST)

    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=turn)


def linked_cache(folder: Path) -> Path:
    """Make an empty cache, but for the fast BLAS, which takes seconds to make."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # by another worker
        (folder / "blas").symlink_to(BLAS_CACHE)
    return folder


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for all tests, or each would measure the machine and the model anew; never the person's own."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each worker has a folder in it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAFETRAIN_CACHE_DIR", str(linked_cache(folder / "cache")))
        yield folder / "cache"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For a test of what is kept there."""
    folder = linked_cache(tmp_path / "cache")
    monkeypatch.setenv("SAFETRAIN_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(autouse=True)
def own_environment(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not queue behind a training of the person who runs them, nor inherit the command of another test."""
    monkeypatch.setenv("SAFETRAIN_LOCK_DIR", str(tmp_path_factory.mktemp("lock")))
    monkeypatch.setenv(RUN, "")
    monkeypatch.delenv(RUN)


@pytest.fixture(autouse=True)
def memory_limit() -> Iterator[None]:
    """What a test lets mlx's limit be, other tests do not inherit: above its limit, mlx may wait for ever."""
    yield
    mx.set_memory_limit(MLX_LIMIT)


@pytest.fixture
def compiling() -> Iterator[None]:
    """For a test of what mlx compiles."""
    mx.enable_compile()
    yield
    mx.disable_compile()


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """Builds a random two-layer Llama with the embedded model's tokenizer: ``tiny_model(bits=4)``."""

    def build(name: str = "tiny", bits: int | None = None, tie: bool = True) -> Path:
        from tests.support.random_models import TINY, build_model

        return build_model(tmp_path / name, bits=bits, **TINY, tie_word_embeddings=tie)

    return build


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes objects, or raw lines, to a file: ``write_jsonl("a.jsonl", [{...}, "raw"])``."""

    def write(name: str, rows: list[object]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


def chat(question: str, answer: str) -> dict[str, object]:
    """A chat row."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
