"""What is left of the example's adapter once it is folded into its base: by bits, and beside mlx_lm.fuse.

    python -m benchmarks.bench_fuse [a finished project]

Three adapters of the embedded model: that of the default run, and two of few small updates, which rounding to 4 bits
loses; and one of each of five families with random weights. Each is measured on the test rows, which fuse has not
seen; `safetrain fuse` refits on training rows and decides on the validation rows. `mlx_lm.fuse` rounds only.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from tests.engine.test_architectures import FAMILIES as SETTINGS
from tests.support.random_models import build_model

ROOT = Path(__file__).resolve().parent.parent
MODEL, ADAPTER = "models/encyclopedia-3m", "checkpoints_qlora/adapters"
FEW = "40"
SMALL_RATES = ("4e-4", "5e-5")  # of 312 at 1.3e-3 in the default run
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "phi3")
SHAPE = {
    "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip
Sizes = tuple[tuple[str, tuple[str, ...]], ...]
SIZES: Sizes = (
    ("4 bits", ("--bits", "4", "--may-lose", "100")),
    ("5 bits", ("--bits", "5", "--may-lose", "100")),
    ("6 bits", ("--bits", "6", "--may-lose", "100")),
    ("8 bits", ("--bits", "8", "--may-lose", "100")),
    ("float", ("--float", "--may-lose", "100")),
    ("**what `safetrain fuse` takes**", ()),
)
NOTES = [
    "Kept: the smaller share of the improvement in loss from base to tuned, and of the way from the base's "
    "distribution to the tuned one's (1 - KL(tuned || fused) / KL(tuned || base)), at every label. Exact answers: "
    "all labels of a row are what the model chooses.",
    "A Llama of 91 million parameters, measured on 2026-11-22 without refitting: 4 bits keep 98.0 % in 54 MiB and 48 % "
    "of the answers, 5 bits 100.0 % in 65 MiB and 92 %, 8 bits 100.0 % in 95 MiB and all answers.",
]
HEADER = ["adapter", "fused by", "MiB", "kept on the test rows", "exact answers of 220", "same answers as tuned"]


def main(arguments: list[str]) -> None:
    """One table."""
    with tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(project)], check=True)
        if arguments:
            for part in ("checkpoints_qlora", "data/validated"):
                shutil.copytree(Path(arguments[0]) / part, project / part, dirs_exist_ok=True)
        else:
            call(project, "dvc", "repro", "-q")
        rows = rows_of(project, "the default run")
        for rate in SMALL_RATES:
            few = (f"train.max_steps={FEW}", f"train.learning_rate={rate}")
            call(project, sys.executable, "-m", "stages.train", *few)
            rows += rows_of(project, f"{FEW} updates at {rate}")
        for family in FAMILIES:
            base = build_model(
                Path(scratch) / family, bits=4, bfloat16=True, model_type=family, **{**SHAPE, **SETTINGS[family]}
            )
            call(project, "safetrain", "run", "--model", str(base), "train.max_steps=100", "evaluate.max_examples=20")
            rows += rows_of(project, f"{family}, 100 updates", str(base), SIZES[:1])
    write_result("bench_fuse", "An adapter folded into its base: what is left of it", HEADER, rows, NOTES)


def rows_of(project: Path, adapter: str, model: str = MODEL, sizes: Sizes = SIZES) -> list[list[object]]:
    """A row for each way of fusing, after base and tuned."""
    folders, named = project / "fused", dict[str, str]()
    folders.mkdir()
    call(project, "mlx_lm.fuse", "--model", model, "--adapter-path", ADAPTER, "--save-path", "fused/mlx_lm")
    named["`mlx_lm.fuse`"] = "mlx_lm"
    for number, (name, how) in enumerate(sizes):
        done = call(project, sys.executable, "-m", "safetrain.cli", "fuse", f"fused/{number}", *how, must=bool(not how))
        if done == 0:
            named[name] = str(number)
    if (folders / str(len(sizes) - 1)).is_dir():
        report = json.loads((folders / str(len(sizes) - 1) / "fuse_report.json").read_text())
        named = {f"{name}: {report['type']}" if "takes" in name else name: place for name, place in named.items()}
    found = call_measure(project, named, model)
    shutil.rmtree(folders)
    return [[adapter, *row] for row in found]


def call(project: Path, *command: str, must: bool = True) -> int:
    """Run a command in the project; its exit code."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=project, env=environment, check=must).returncode


def call_measure(project: Path, named: dict[str, str], model: str) -> list[list[object]]:
    """``measure`` in a process of its own, whose folder is the project's."""
    command = [sys.executable, "-m", "benchmarks.bench_fuse", "--measure", json.dumps(named), model]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=project, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(named: dict[str, str], model: str) -> list[list[object]]:
    """Base, tuned and every fused folder on the test rows."""

    from safetrain.core.data.store import open_split
    from safetrain.core.data.training_rows import held_out_in
    from safetrain.core.model.files import read_model_files
    from safetrain.core.records.metrics import TrainingSummary
    from safetrain.core.storage import paths
    from safetrain.core.storage.files import read_result
    from safetrain.engine.model import open_base
    from safetrain.engine.tuned import TunedModel
    from safetrain.engine.weight_files import apply_adapter
    from safetrain.export.comparison import kept_share

    run, base_folder = read_result(paths.SUMMARY, TrainingSummary), Path(model)
    rows = held_out_in(open_split("test", base_folder), None, run.max_seq_length).rows
    tokens = run.batch_size * run.max_seq_length
    tuned_model = open_base(base_folder, dequantize=True)
    apply_adapter(tuned_model, paths.ADAPTERS)
    reference = TunedModel.of(tuned_model, rows, tokens)

    def of(folder: Path) -> Any:
        return reference.likeness_of(open_base(folder, dequantize=True))

    base, tuned = of(base_folder), reference.own
    folders = {"base": base_folder, **{name: Path("fused") / place for name, place in named.items()}}
    made: list[list[object]] = []
    for name, folder in folders.items():
        found = of(folder)
        size = f"{read_model_files(folder).static_bytes / 2**20:.2f}"
        kept = f"{100 * kept_share(base, tuned, found):.1f} %"
        made.append([name, size, kept, found.right_answers, f"{100 * found.same_answers:.1f} %"])
    weights = (paths.ADAPTERS / "adapters.safetensors").stat().st_size
    size = f"{(read_model_files(base_folder).static_bytes + weights) / 2**20:.2f}"
    made.insert(1, ["not fused: base and adapter", size, "100.0 %", tuned.right_answers, "100.0 %"])
    return made


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        from safetrain.engine.cpu.blas import load_fast_blas

        load_fast_blas()
        print(json.dumps(measure(json.loads(sys.argv[2]), sys.argv[3])))
    else:
        main(sys.argv[1:])
