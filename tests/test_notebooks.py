"""The notebooks run from the first cell to the last, and their executed copies are of these sources."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.pipeline.workspace import SMALL, Workspace

if any(find_spec(name) is None for name in ("jupytext", "nbclient", "ipykernel")):
    pytest.skip("the extra notebook is not installed", allow_module_level=True)
import jupytext
import nbformat

NAMES = ("quickstart", "kaggle")
TINY_RUN = (*SMALL, "experiment=smoke", "preflight.level=quick", "train.max_steps=30", "train.save_steps=3")
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:home|Users|root|tmp|work|private|opt|usr|dev)/|ghp_|hf_[A-Za-z0-9]{8}")


def outputs_of(notebook: Any) -> str:
    """All text of all outputs."""
    texts = list[str]()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            texts += [output.get("text", ""), *(str(value) for value in output.get("data", {}).values())]
    return "\n".join(texts)


@pytest.mark.parametrize("name", NAMES)
def test_the_executed_copy_is_of_this_source_small_and_of_no_machine(name: str) -> None:
    source = jupytext.read(ROOT / f"notebooks/{name}.py")
    copy = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4)
    assert [(cell.cell_type, cell.source) for cell in copy.cells] == [
        (cell.cell_type, cell.source) for cell in source.cells
    ], f"make it anew: python -m tools.execute_notebook notebooks/{name}.py"
    assert all(cell.execution_count for cell in copy.cells if cell.cell_type == "code")
    assert not [output for cell in copy.cells for output in cell.get("outputs", ()) if output.output_type == "error"]
    assert not MACHINE_PATHS.findall(outputs_of(copy))
    assert (ROOT / f"notebooks/{name}.ipynb").stat().st_size < 150_000


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("notebooks"))
    made.make_small()
    return made


def test_it_runs_from_the_first_cell_to_the_last(workspace: Workspace, tmp_path: Path) -> None:
    """The one for Kaggle, which does all that the other does and continues an interrupted run."""
    out = tmp_path / "kaggle.ipynb"
    folder = str(workspace.folder)
    settings = {"SAFETRAIN_NOTEBOOK": " ".join(TINY_RUN), "IPYTHONDIR": str(tmp_path), "PYTHONPATH": folder}
    done = subprocess.run(
        [sys.executable, "-m", "tools.execute_notebook", "notebooks/kaggle.py", str(out)],
        cwd=workspace.folder, env=workspace.environment | settings, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = outputs_of(nbformat.read(out, as_version=4))
    assert "Trained 30 steps" in told
    assert told.count("Running stage 'plot'") == 1  # not before the training had stopped and continued
    assert "rehearsal on CPU" in told
    assert re.search(r"continuing from step [1-9]", told), told
