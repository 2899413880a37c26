"""The project that commands work in: its folder, its params.yaml, and what they print with."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetrain.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


def require_project() -> None:
    """Raises ConfigError outside one."""
    if not Path("params.yaml").is_file():
        raise ConfigError(
            "This folder is not a safetrain project.", where=str(Path.cwd()), do="go to the project's root"
        )


def params() -> Any:
    """params.yaml as it stands, without overlays."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    require_project()
    try:
        return OmegaConf.load("params.yaml")
    except YAMLError as error:
        raise ConfigError(f"The configuration cannot be read: {error}", where="params.yaml") from None


def model_of_params() -> Path:
    """model.path of params.yaml."""
    return Path(params().model.path)


def console(*, plain: bool = False) -> "Console":
    """A console that exits quietly when stdout is closed (rich exits 1). ``plain``: print texts as they are."""
    from rich.console import Console

    class Told(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Told(soft_wrap=True, highlight=not plain, markup=not plain)
