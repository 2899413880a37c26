"""Which model of the Hugging Face hub a folder is a download of."""

from pathlib import Path

SOURCE = ".hub_id"  # the hub's name of the model, and on the second line the commit


def source_of(folder: Path) -> list[str]:
    """Name and commit; the second is missing in older downloads, both where the folder does not say."""
    path = folder / SOURCE
    return path.read_text(encoding="utf-8").split() if path.is_file() else []


def hub_id_of(folder: Path) -> str:
    """The hub's name of the model; empty where the folder does not say."""
    return next(iter(source_of(folder)), "")
