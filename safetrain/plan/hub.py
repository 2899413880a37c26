"""Download a model or a data set from the Hugging Face Hub, or upload a model.

A download checks the disk space first, and leaves a complete folder or none.
"""

import re
from collections.abc import Callable
from pathlib import Path

from safetrain.core.errors import ConfigError, ModelError
from safetrain.core.model.files import SOURCE, hub_id_of, read_model_files
from safetrain.core.storage.files import require_room, write_text

DATA_SET = "datasets/"  # as in the Hub's addresses
HUB_ID = re.compile(rf"({DATA_SET})?[\w.-]+/[\w.-]+")
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
DATA_PATTERNS = ["*.json*", "*.csv*", "*.tsv*", "*.parquet", "*.arrow", "*.txt*"]
SPARE_BYTES = 2**30  # as a reserve
FREE = "free some disk space, or choose another folder with --into"


def fetch(hub_id: str, into: Path) -> Path:
    """Download a model, or with ``datasets/`` before its name a data set, into a new folder in ``into``.

    Continues an interrupted download. All files come from one commit, which is recorded, because the main branch may
    change during the download.

    Raises ModelError if the Hub does not have it or cannot be reached, DiskFullError if the disk is too small.
    """
    import httpx2
    from huggingface_hub import constants

    if HUB_ID.fullmatch(hub_id) is None:
        raise ModelError(f"{hub_id!r} is not a Hub ID.", expected="owner/name, or datasets/owner/name")
    target = into / hub_id.rpartition("/")[2]
    if target.exists():
        if (found := hub_id_of(target)) != hub_id:
            do, got = "move the folder away, or choose another one with --into", found or "unknown"
            what = "The folder holds something else with this name."
            raise ModelError(what, where=str(target), expected=hub_id, got=got, do=do)
        require_whole(target, hub_id)
        return target
    partial = into / f".{target.name}.partial"
    try:
        commit = _download(hub_id, partial)
    except (OSError, httpx2.HTTPError) as error:
        raise ModelError(
            f"The download of {hub_id} did not finish: {str(error).splitlines()[0]}",
            where=constants.ENDPOINT,
            do="check the internet connection and the name (for a gated model: hf auth login), then run the same "
            f"command again; the download continues. Offline, copy the folder from another machine into {into}",
        ) from error
    require_whole(partial, hub_id)
    write_text(partial / SOURCE, f"{hub_id}\n{commit}\n")
    partial.replace(target)
    return target


def require_whole(folder: Path, hub_id: str) -> None:
    """Raise ModelError if a model's files are not all there, or if a data set has no file that training can read."""
    if not hub_id.startswith(DATA_SET):
        read_model_files(folder)
    elif all(path.name.startswith(".") for path in folder.iterdir()):
        expected = "JSON lines, JSON, CSV, TSV, Parquet, Arrow or text"
        raise ModelError(f"{hub_id} has no data files.", where=str(folder), expected=expected)


def _download(hub_id: str, partial: Path) -> str | None:
    """Download what is missing in ``partial``; returns the commit."""
    from huggingface_hub import HfApi, snapshot_download

    is_data, name = hub_id.startswith(DATA_SET), hub_id.removeprefix(DATA_SET)
    patterns, kind = (DATA_PATTERNS, "dataset") if is_data else (PATTERNS, "model")
    info = (HfApi().dataset_info if is_data else HfApi().model_info)(name, files_metadata=True)
    partial.mkdir(parents=True, exist_ok=True)
    there = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
    wanted = sum(file.size or 0 for file in info.siblings or [] if any(map(Path(file.rfilename).match, patterns)))
    require_room(partial, wanted - there + SPARE_BYTES, "The disk has no room for these files.", FREE)
    snapshot_download(name, repo_type=kind, revision=info.sha, local_dir=partial, allow_patterns=patterns)
    return info.sha


def push(hub_id: str, folder: Path, *, private: bool, ask: Callable[[str], None]) -> str:
    """Upload a folder as one commit; ``private`` if its repository is new. Returns the repository's address.

    First calls ``ask`` with a description of the repository. Raises ConfigError without a login, ModelError.
    """
    import httpx2
    from huggingface_hub import HfApi, constants, get_token

    if HUB_ID.fullmatch(hub_id) is None or hub_id.startswith(DATA_SET):
        raise ConfigError(f"{hub_id!r} is not the Hub ID of a model.", expected="owner/name")
    if get_token() is None:
        raise ConfigError("You are not logged in to the Hugging Face Hub.", do="hf auth login")
    try:
        is_new = not HfApi().repo_exists(hub_id)
        is_private = private if is_new else HfApi().model_info(hub_id).private
        ask(f"the {'new' if is_new else 'existing'} {'private' if is_private else 'public'} repository {hub_id}")
        address = HfApi().create_repo(hub_id, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=hub_id, folder_path=folder, commit_message="Upload with safetrain")
    except (OSError, httpx2.HTTPError) as error:
        do = "check the internet connection, and that your login may write there: hf auth whoami; then run this again"
        what = f"The upload failed: {str(error).splitlines()[0]}"
        raise ModelError(what, where=constants.ENDPOINT, do=do) from error
    return str(address)
