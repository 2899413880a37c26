"""How long `safetrain create` takes, and how much memory: all presets, from text and with a tokenizer that is taken.

    python -m benchmarks.bench_create [--folder FOLDER] [--text-mib 100]

Each model is made by the command in a process of its own, read again by `safetrain info`, and removed. The text is the
Python code of the environment: it is on every machine, and it has more different words than most texts.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from benchmarks.machine import write_result
from safetrain.core.model.files import read_model_files
from safetrain.plan.create import PRESETS

SHIPPED = Path(__file__).parent.parent / "models" / "encyclopedia-3m"
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def main() -> None:
    """Make every preset twice, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the models go; default: a temporary folder")
    parser.add_argument("--text-mib", type=int, default=100, help="MiB of text")
    asked = parser.parse_args()
    rows = list[list[object]]()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        text = code_text(folder / "code.txt", asked.text_mib * 2**20)
        for preset, (size, _) in PRESETS.items():
            for source, words in (
                (f"{text.stat().st_size / 2**20:.0f} MiB of text", ["--text", str(text)]),
                ("taken from a model", ["--tokenizer", str(SHIPPED)]),
            ):
                rows.append(_measured(preset, size, source, words, folder / "model"))
    write_result(
        "bench_create",
        "New models: time and memory",
        ["preset", "tokenizer", "parameters", "off", "shape", "vocabulary", "weights", "seconds", "peak memory"],
        rows,
        [
            "Peak memory is the resident memory of the whole process, with Python and its libraries; a tokenizer is "
            "trained on a sample of at most 64 MiB. Weights are float32. `off`: how far the parameters are from the "
            "name."
        ],
    )


def _measured(preset: str, size: int, source: str, words: list[str], folder: Path) -> list[object]:
    began = time.perf_counter()
    command = [sys.executable, "-m", "safetrain.cli", "create", preset, str(folder), *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds, process.returncode = time.perf_counter() - began, os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    model = read_model_files(folder)
    shutil.rmtree(folder)
    return [
        preset, source, f"{model.parameters:,}", f"{100 * (model.parameters / size - 1):+.1f} %",
        f"{model.num_layers} x {model.hidden_size}, {model.num_heads}/{model.num_kv_heads} heads",
        f"{model.vocab_size:,}", f"{model.static_bytes / 2**20:,.0f} MiB", f"{seconds:.1f}",
        f"{usage.ru_maxrss * RSS_UNIT / 2**20:,.0f} MiB",
    ]  # fmt: skip


def code_text(path: Path, size_bytes: int) -> Path:
    """So much code of the environment, in the order of its names."""
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
            file.write(source.read_text(encoding="utf-8", errors="ignore"))
            if file.tell() >= size_bytes:
                break
    return path


if __name__ == "__main__":
    main()
