"""Download a model from the Hugging Face Hub: check disk space first, and leave a complete folder or none."""

import re
from pathlib import Path

from safetrain.core.errors import ModelError
from safetrain.core.model.files import SOURCE, hub_id_of, read_model_files
from safetrain.core.storage.files import require_room, write_text

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
SPARE_BYTES = 2**30  # for the other files, and as a reserve
FREE = "free some disk space, or choose another folder with --into"


def fetch_model(hub_id: str, into: Path) -> Path:
    """Download ``hub_id`` into a new folder in ``into``; continues an interrupted download.

    All files come from one commit, which is recorded, because the main branch may change during the download.

    Raises ModelError if the Hub does not have the model or cannot be reached, DiskFullError if the disk is too small.
    """
    import httpx2
    from huggingface_hub import constants

    if HUB_ID.fullmatch(hub_id) is None:
        raise ModelError(f"{hub_id!r} is not a Hub ID.", expected="owner/name")
    target = into / hub_id.rpartition("/")[2]
    if target.exists():
        read_model_files(target)
        if (found := hub_id_of(target)) != hub_id:
            do, got = "move the folder away, or choose another one with --into", found or "unknown"
            what = "The folder holds a different model with this name."
            raise ModelError(what, where=str(target), expected=hub_id, got=got, do=do)
        return target
    partial = into / f".{target.name}.partial"
    try:
        commit = _download(hub_id, partial)
    except (OSError, httpx2.HTTPError) as error:
        raise ModelError(
            f"The download of {hub_id} did not finish: {str(error).splitlines()[0]}",
            where=constants.ENDPOINT,
            do="check the internet connection and the name (for a gated model: hf auth login), then run the same "
            f"command again; the download continues. Offline, copy the model's folder from another machine into {into}",
        ) from error
    read_model_files(partial)
    write_text(partial / SOURCE, f"{hub_id}\n{commit}\n")
    partial.replace(target)
    return target


def _download(hub_id: str, partial: Path) -> str | None:
    """Download what is missing in ``partial``; returns the commit."""
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(hub_id, files_metadata=True)
    partial.mkdir(parents=True, exist_ok=True)
    missing_bytes = -sum(file.stat().st_size for file in partial.rglob("*.safetensors"))
    missing_bytes += sum(file.size or 0 for file in info.siblings or [] if file.rfilename.endswith(".safetensors"))
    require_room(partial, missing_bytes + SPARE_BYTES, "The disk has no room for this model.", FREE)
    snapshot_download(hub_id, revision=info.sha, local_dir=partial, allow_patterns=PATTERNS)
    return info.sha
