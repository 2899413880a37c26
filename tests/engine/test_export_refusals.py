"""What no export takes is named by each of them, and leaves nothing: fuse, GGUF, PEFT, and the import of PEFT's."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from safetrain.core.errors import ConfigError, DiskFullError, ModelError, SafetrainError
from safetrain.engine import fuse
from safetrain.engine.exchange import gguf_export, peft
from safetrain.engine.tuned import ExportJob
from safetrain.engine.weight_files import ADAPTER_FILE
from tests.engine.test_fuse import adapter_of
from tests.engine.test_gguf import chats
from tests.support.gguf_models import build

pytestmark = pytest.mark.usefixtures("memory_limit")
Export = Callable[[Path, Path, Path], Any]
LIMITS = (256, 2**30)  # tokens together, mlx's memory


def to_peft(base: Path, adapter: Path, out: Path) -> None:
    peft.export_peft(ExportJob(base, adapter, out, chats(base), *LIMITS), "owner/base", print)


def to_gguf(base: Path, adapter: Path, out: Path) -> None:
    gguf_export.export_gguf(ExportJob(base, adapter, out, chats(base), *LIMITS), "q8_0", print)


def fused(base: Path, adapter: Path, out: Path) -> None:
    fuse.fuse_adapter(ExportJob(base, adapter, out, chats(base), *LIMITS), print)


@pytest.mark.parametrize(
    ("export", "writer"),
    [(fused, (fuse, "save_shards")), (to_gguf, (gguf_export, "taken")), (to_peft, (peft, "save_arrays"))],
)
def test_what_cannot_be_exported_is_named_and_leaves_nothing(
    export: Export, writer: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, other = build(tmp_path / "base", "llama, tied"), build(tmp_path / "other", "llama, tied", seed=4)
    adapter, out = adapter_of(base, tmp_path / "adapter"), tmp_path / "out.gguf"
    zeros = [adapter_of(base, tmp_path / f"no {method}", method, size=0.0) for method in ("lora", "dora")]
    taken = tmp_path / "mine.gguf"
    taken.write_text("mine")
    names = sorted(path.name for path in tmp_path.iterdir())

    def refused(match: str, error: type[SafetrainError] = ModelError, *, of: Path = adapter, to: Path = out) -> None:
        with pytest.raises(error, match=match):
            export(base, of, to)
        assert sorted(path.name for path in tmp_path.iterdir()) == names

    for nothing in zeros:
        refused("The adapter changes nothing", of=nothing)
    with pytest.raises(ModelError, match="trained on another base"):  # of the same shapes
        export(other, adapter, out)
    refused("already exists", ConfigError, to=taken)
    assert taken.read_text() == "mine"
    with monkeypatch.context() as patched:
        patched.setattr("safetrain.core.storage.files.SPARE_BYTES", 2**62)
        if export is not to_peft:  # which is small
            refused("too little disk space", DiskFullError)
    with monkeypatch.context() as patched:  # filled by another program, after the room was looked at
        patched.setattr(*writer, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        refused("nothing was written", DiskFullError)
    weights = adapter / ADAPTER_FILE
    weights.write_bytes(weights.read_bytes()[:-50])
    refused("cannot be read")
    weights.unlink()
    refused("missing|cannot be read")
