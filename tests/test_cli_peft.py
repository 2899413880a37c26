"""`safetrain export peft` and `safetrain import peft`, as a person types them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.core.errors import ConfigError
from safetrain.core.records.fusing import EXPORT_REPORT, ExportReport
from safetrain.core.records.metrics import RunShape
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_record, write_record
from tests.engine.test_fuse import adapter_of
from tests.engine.test_training import rows
from tests.stores import write_stores
from tests.test_cli import invoke

Build = Callable[..., Path]


def test_an_adapter_goes_out_and_comes_back(tiny_model: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_model("base", bits=4)
    (base / ".hub_id").write_text(f"owner/base-4bit\n{'f' * 40}\n")
    monkeypatch.chdir(tmp_path)
    write_stores(paths.VALIDATED, base, rows(3, 1), rows(9, 2))
    adapter_of(base, paths.ADAPTERS)
    write_record(paths.SUMMARY, RunShape(2, 64, False, None, 2**28, 2**28, 1.0))
    said = invoke("export", "peft", "out")
    assert "on 9 validation rows" in said
    assert "for the 4-bit base, dequantized" in said
    assert "Name the float one: --base-name" in said
    assert "the base is owner/base-4bit" in said
    assert "the same answer on 9 of 9 rows" in said
    assert read_record(Path("out") / EXPORT_REPORT, ExportReport).rows == 9
    with pytest.raises(ConfigError, match="already exists"):
        invoke("export", "peft", "out", "--base-name", "owner/base")
    assert 'from_pretrained("owner/base"), "named")' in invoke("export", "peft", "named", "--base-name", "owner/base")
    with pytest.raises(ConfigError, match="not a safetrain project"):
        invoke("import", "peft", "out", "back")
    said = invoke("import", "peft", "out", "back", "--model", str(base))
    assert "trained this adapter on owner/base-4bit; here its base is" in said
    assert "LoRA of rank 4, scale 2, on mlp.down_proj" in said
    assert "of the top 2 blocks" in said
    assert (Path("back") / "adapters.safetensors").read_bytes() == (
        paths.ADAPTERS / "adapters.safetensors"
    ).read_bytes()
