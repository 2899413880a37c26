"""Training from scratch: planned and measured memory, and time, of the presets of model.create.

    python -m benchmarks.bench_pretrain [--presets 10m 85m] [--folder FOLDER] [KEY=VALUE …]

Each preset is made by the command, planned and trained for a few updates in a scratch project. The documents are those
of the example's encyclopedia, so that windows have many pieces. What is compared is the peak of mlx's allocator.
"""

import argparse
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bench_memory_accuracy import stage
from benchmarks.machine import show_result, write_result
from models.recipe.text import document, subjects
from safetrain.core.model.shapes import PRESETS
from safetrain.core.records.settings import Recommendation
from safetrain.core.storage.files import read_record
from tests.support.chaos.project import Project

# What makes an update of the large ones take seconds and not minutes on a CPU
PINS = {
    "85m": ("train.max_seq_length=512", "train.batch_size=2", "train.gradient_accumulation=1"),
    "400m": ("train.max_seq_length=128", "train.batch_size=1", "train.gradient_accumulation=1"),
    "800m": ("train.max_seq_length=64", "train.batch_size=1", "train.gradient_accumulation=1"),
}
TEXT_BYTES, DOCUMENTS, UPDATES = 25 * 2**20, 4_000, 3
HEADER = ["preset", "how", "closed form", "off", "dry run", "off", "said at the start", "off", "measured",
          "process", "s/update", "tokens/s"]  # fmt: skip


def main() -> None:
    """Make, plan and train; write the table when all presets ran as planned."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--folder", type=Path, help="where the scratch projects go; default: a temporary folder")
    parser.add_argument("pins", nargs="*", help="more keys, as train.batch_size=4")
    asked = parser.parse_args()
    found = list[list[object]]()
    for preset in asked.presets:
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            found.append(pretrained(preset, Path(folder), (*PINS.get(preset, ()), *asked.pins)))
        print(found[-1], flush=True)
    whole = asked.presets == list(PRESETS) and not asked.pins
    notes = (
        f"{UPDATES} updates each. The closed form is what planning chooses by, before its margin. Seconds per update "
        "are the training's own; the machine is shared.",
    )
    write = write_result if whole else show_result
    write("bench_pretrain", "Training from scratch: memory and time", HEADER, found, notes)


def pretrained(preset: str, folder: Path, pins: tuple[str, ...]) -> list[object]:
    """Make, plan and train one preset; a line of the table, whose sizes are of mlx's allocator."""
    project = new_project(preset, folder)
    keys = ("train.method=pretrain", "train.optimizer=adamw", f"train.max_steps={UPDATES}", *pins)
    for name in ("validate_data", "preflight", "recommend_config", "train"):
        stage(project, name, *keys, "preflight.level=quick", "preflight.downgrade=[MEM-FIT]")
    plan = read_record(project.output / "recommended_config.json", Recommendation)
    summary = project.json("training_summary.json")
    how = f"{plan.settings.batch_text} windows of {plan.settings.max_seq_length} tokens"
    how += ", recomputed" if plan.settings.gradient_checkpointing else ", kept"
    dry_run = plan.measured.peak_bytes if plan.measured is not None else 0
    measured, sizes = summary["peak_memory_bytes"], list[object]()
    for size in (plan.predicted_peak_bytes, dry_run, summary["predicted_peak_bytes"]):
        sizes += [f"{size / 2**20:,.0f} MiB", f"{100 * (size / measured - 1):+.1f} %"]
    sizes += [f"{each / 2**20:,.0f} MiB" for each in (measured, summary["peak_footprint_bytes"])]
    return [preset, how, *sizes, f"{summary['elapsed_seconds'] / UPDATES:.1f}", f"{summary['tokens_per_second']:,.0f}"]


def new_project(preset: str, folder: Path) -> Project:
    """A scratch project with the preset's model and documents."""
    project = Project(folder / "p")
    write_documents(project.folder / "data" / "documents.jsonl", DOCUMENTS)
    make_model(preset, project.folder / "models" / "new", project.folder / "data" / "documents.jsonl", folder)
    open_keys = ("batch_size", "gradient_accumulation", "num_epochs", "save_steps", "eval_steps", "learning_rate")
    project.pin(
        model={"path": "models/new"},
        data={"path": "data/documents.jsonl", "near_duplicate_similarity": 1, "held_out_fraction": 0.01},
        train=dict.fromkeys(open_keys),
        lora={"rank": None, "dropout": None},
    )  # fmt: skip
    return project


def make_model(preset: str, model: Path, documents: Path, scratch: Path) -> None:
    """By the command, with as many tokens as it would have from more text."""
    text = code_text(scratch / "code.txt", TEXT_BYTES)
    command = [sys.executable, "-m", "safetrain.cli", "create", preset, str(model), "--text", str(text)]
    command += ["--text", str(documents)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def write_documents(path: Path, count: int) -> None:
    """Rows of one article each, no two of the same words."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in articles(count))


def articles(count: int) -> Iterator[str]:
    """So many different articles."""
    source, known, seen = random.Random(1), subjects(), set[str]()
    while len(seen) < count:
        text = document(source.choice(known), source)
        if text not in seen:
            seen.add(text)
            yield text


def code_text(path: Path, size_bytes: int) -> Path:
    """So much code of the environment, in the order of its names: enough for the largest vocabulary."""
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
            file.write(source.read_text(encoding="utf-8", errors="ignore"))
            if file.tell() >= size_bytes:
                break
    return path


if __name__ == "__main__":
    main()
