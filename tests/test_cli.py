"""`safetrain convert`, `fuse` and `export`: complete folders or clear errors; what -h says."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError, ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.evaluation import EXPORT_REPORT, ExportReport
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_record, write_record
from tests.conftest import EMBEDDED, ROOT
from tests.engine.test_training import rows
from tests.export.test_fuse import adapter_of
from tests.stores import write_stores
from tests.watch.made_run import SUMMARY

Build = Callable[..., Path]


def invoke(*arguments: str) -> str:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False).output


def test_a_converted_model_is_smaller_and_whole(tiny_model: Build, tmp_path: Path) -> None:
    bits = 4
    source, target = tiny_model(), tmp_path / "converted"
    assert f"{target} is written" in invoke("convert", str(source), str(target), "--bits", str(bits))
    before, after = read_model_files(source), read_model_files(target)
    assert (after.quantization_bits, after.parameters) == (bits, before.parameters)
    assert after.static_bytes < before.static_bytes / 2


def test_convert_refuses_what_it_cannot_do(tiny_model: Build, tmp_path: Path) -> None:
    (tmp_path / "adapters.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"No trained adapter found[^$]*name the adapter's folder"):
        invoke("fuse", str(tmp_path / "out"), "--adapter", str(tmp_path / "adapters.safetensors"))
    assert invoke("--version") == f"safetrain {version('safetrain')}\n"
    quantized = str(tiny_model("quantized", bits=4))
    with pytest.raises(ModelError, match="already has 4 bits"):
        invoke("convert", quantized, str(tmp_path / "t"))
    plain = str(tiny_model("plain"))
    with pytest.raises(ConfigError, match="already exists"):
        invoke("convert", plain, quantized)
    with pytest.raises(ConfigError, match="Unsupported quantization"):
        invoke("convert", plain, str(tmp_path / "t"), "--bits", "7")


@pytest.fixture
def tuned(tiny_model: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Makes a project with rows and an adapter for a base of so many bits; returns the base."""

    def make(bits: int) -> Path:
        base = tiny_model("base", bits=bits)
        monkeypatch.chdir(tmp_path)
        write_stores(paths.VALIDATED, base, rows(3, 1), rows(9, 2))
        adapter_of(base, paths.ADAPTERS)
        write_record(paths.SUMMARY, SUMMARY)
        return base

    return make


def test_fuse_measures_on_the_rows_that_the_training_validated_on(tuned: Callable[[int], Path], tmp_path: Path) -> None:
    tuned(8)
    with pytest.raises(ConfigError, match="Unsupported quantization"):
        invoke("fuse", "out", "--bits", "7")
    told = invoke("fuse", "out", "--may-lose", "30")
    assert [
        said for said in ("on 9 validation rows", "8 bits", "safetrain chat --base --model out;") if said not in told
    ] == []
    assert read_model_files(tmp_path / "out").quantization_bits == 8
    assert "keeps" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "chat.json").read_bytes() == (paths.ADAPTERS / "chat.json").read_bytes()
    with pytest.raises(ConfigError, match="already exists"):
        invoke("fuse", "out")


def test_gguf_files_say_how_they_are_used(tuned: Callable[[int], Path]) -> None:
    tuned(8)
    with pytest.raises(ConfigError, match=r"name does not end with \.gguf"):
        invoke("export", "gguf", "out")
    told = invoke("export", "gguf", "out.gguf")
    pair = "llama-cli -m out.gguf --lora out-adapter.gguf"
    for said in ("out.gguf and its adapter: ", pair, "ollama create out -f out.Modelfile", "loads no adapter"):
        assert said in told
    assert not Path("README.md").exists(), "a project's own"
    with pytest.raises(ConfigError, match=r"those of adapters"):
        invoke("export", "gguf", "two-adapter.gguf")
    told = invoke("export", "gguf", "one/mine.gguf", "--fused")
    for said in ("on 9 validation rows", "mine.gguf: ", "lms import one/mine.gguf --copy", "model card"):
        assert said in told
    assert "| mine.gguf (q8_0) |" in Path("one/README.md").read_text()


def test_a_reader_that_has_seen_enough_is_told_by_the_exit_code() -> None:
    """As of every stage; 1 would say that it does not fit, or that the rows have errors."""
    command = ["estimate", str(EMBEDDED), "--machine", "m1-8gb"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    program = [sys.executable, "-m", "safetrain.cli", *command]
    try:
        done = subprocess.run(program, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write_end)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""


def test_a_new_project_estimates_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before preflight has written machine.json."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["estimate", str(EMBEDDED)], catch_exceptions=False)
    found = done.exit_code, "on this machine (" in done.output, "it fits" in done.output, "do: " in done.output
    assert found == (0, True, True, False)


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that is closed to root too")
def test_what_cannot_be_written_is_told_without_a_traceback(tiny_model: Build) -> None:
    command = [sys.executable, "-m", "safetrain.cli", "convert", str(tiny_model()), "/sys/converted"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: No permission: ")
    assert "where:    /sys/" in done.stderr


def test_an_adapter_goes_out(tuned: Callable[[int], Path]) -> None:
    base = tuned(4)
    (base / ".hub_id").write_text(f"owner/base-4bit\n{'f' * 40}\n")
    said = invoke("export", "peft", "out")
    assert "on 9 validation rows" in said
    assert "with the 4-bit base dequantized" in said
    assert "Name the float model: --base-name" in said
    assert "PEFT cannot open the base owner/base-4bit" in said
    assert "the same answer on 9 of 9 rows" in said
    assert read_record(Path("out") / EXPORT_REPORT, ExportReport).rows == 9
    with pytest.raises(ConfigError, match="already exists"):
        invoke("export", "peft", "out", "--base-name", "owner/base")
    assert 'from_pretrained("owner/base"), "named")' in invoke("export", "peft", "named", "--base-name", "owner/base")


# Each costs from a hundredth of a second to several.
HEAVY = (
    "dvc", "huggingface_hub", "hydra", "jinja2", "matplotlib", "mlx", "mlx_lm", "numpy", "omegaconf",
    "pandas", "psutil", "pyarrow", "requests", "scipy", "tokenizers", "torch", "transformers", "wandb",
    "yaml",
)  # fmt: skip
ALL_HELP = """
import sys
from safetrain.cli import app
from typer.testing import CliRunner
for words in {commands}:
    done = CliRunner().invoke(app, [*words, "-h"])
    assert done.exit_code == 0, (words, done.output)
    assert done.output == CliRunner().invoke(app, [*words, "--help"]).output
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & set({heavy})))
"""


def commands(group: typer.core.TyperGroup | None = None) -> Iterator[list[str]]:
    """The words of every command, and of every group."""
    found = group or typer.main.get_command(app)
    assert isinstance(found, typer.core.TyperGroup)
    for name, command in found.commands.items():
        yield [name]
        if isinstance(command, typer.core.TyperGroup):
            yield from ([name, *words] for words in commands(command))


def test_no_help_waits_for_what_it_does_not_need() -> None:
    """Every command under half a second to its help: what takes longer is imported where it is used."""
    script = ALL_HELP.format(commands=[[], *commands()], heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
