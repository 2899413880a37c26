"""The default run with several seeds: exact match of base and tuned on the test file, and how long it takes."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import write_result

SEEDS = (42, 1, 2)
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Six stages in a fresh clone for each seed."""
    rows: list[list[object]] = []
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as scratch:
            clone = Path(scratch) / "clone"
            subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
            params = clone / "params.yaml"
            params.write_text(params.read_text().replace("seed: 42", f"seed: {seed}"))
            began = time.perf_counter()
            subprocess.run(["dvc", "repro", "-q"], cwd=clone, env={**os.environ, "PATH": path}, check=True)
            seconds = time.perf_counter() - began
            evaluation = json.loads((clone / "checkpoints_qlora/evaluation.json").read_text())
            summary = json.loads((clone / "checkpoints_qlora/training_summary.json").read_text())
        base, tuned = (100 * evaluation[name]["exact_match"] for name in ("base", "tuned"))
        rows.append([seed, f"{base:.1f} %", f"{tuned:.1f} %", summary["steps"], f"{seconds:.0f} s"])
    header = ["seed", "base, exact match", "tuned, exact match", "updates", "dvc repro"]
    write_result("bench_first_run", "The default run", header, rows)


if __name__ == "__main__":
    main()
