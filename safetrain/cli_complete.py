"""What a shell offers after TAB: names that are in the project. A wrong one is for the command itself to refuse."""

import os
from pathlib import Path


def model_folders(incomplete: str) -> list[str]:
    """Under models/; nothing where a path elsewhere is typed: the shell then offers its own."""
    return sorted(
        str(folder.parent)
        for pattern in ("models/*/config.json", "models/*/*/config.json")
        for folder in Path().glob(pattern)
        if str(folder.parent).startswith(incomplete)
    )


def machines(incomplete: str) -> list[str]:
    """Of conf/machine."""
    return sorted(path.stem for path in Path("conf/machine").glob(f"{incomplete}*.yaml"))


def levels(incomplete: str) -> list[str]:
    """Of preflight."""
    return [level for level in ("quick", "probe", "certify") if level.startswith(incomplete)]


def overrides(incomplete: str) -> list[str]:
    """Overlays and keys of params.yaml, as Hydra reads them; nothing where that is broken: the command says why."""
    keys = _keys_of_params()
    if not keys:
        return []
    overlays = sorted(f"experiment={path.stem}" for path in Path("conf/experiment").glob("*.yaml"))
    typed = incomplete
    if (before := _bash_key()) is not None:  # bash takes = for the end of a word
        typed = f"{before}={incomplete.removeprefix('=')}"
        return [each.partition("=")[2] for each in overlays if each.startswith(typed)]
    return [each for each in (*overlays, *keys) if each.startswith(typed)]


def _keys_of_params() -> list[str]:
    if not Path("params.yaml").is_file():
        return []
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        params = OmegaConf.load("params.yaml")
        parts = list(params.items()) if isinstance(params, DictConfig) else []
    except (YAMLError, OmegaConfBaseException, OSError, ValueError):  # ValueError: no UTF-8
        return []
    return [f"{part!s}.{key!s}=" for part, keys in parts if isinstance(keys, DictConfig) for key in keys]


def _bash_key() -> str | None:
    """The key before the = that bash has cut a word at."""
    words, place = os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD") or 0)
    if 0 < place <= len(words):
        if words[place - 1] == "=" and place >= 2:
            return words[place - 2]
        if place < len(words) and words[place] == "=":
            return words[place - 1]
    return None
