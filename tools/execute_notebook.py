"""Run a notebook's source and write the executed copy beside it: python -m tools.execute_notebook notebooks/NAME.py"""

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

SECONDS = 1800


def main(source: Path, target: Path) -> None:
    """Execute ``source`` in a kernel of this Python, from its folder; a cell that fails ends it with that error."""
    notebook = jupytext.read(source)
    place = {"metadata": {"path": source.parent}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=place).execute()
    for number, cell in enumerate(notebook.cells):
        cell.metadata, cell.id = nbformat.NotebookNode(), f"cell-{number}"  # no times: two copies differ little
    notebook.metadata = nbformat.NotebookNode(kernelspec=notebook.metadata["kernelspec"])
    nbformat.write(notebook, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(sys.argv[1]).with_suffix(".ipynb"))
