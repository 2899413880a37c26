"""The project's folder, params.yaml and console; the commands init, update and cache."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safetrain.core.errors import ConfigError, broken_yaml
from safetrain.core.formatting import print_text

if TYPE_CHECKING:
    from rich.console import Console


def require_project() -> None:
    """Raise ConfigError outside a project."""
    if not Path("params.yaml").is_file():
        raise ConfigError(
            "This folder is not a safetrain project.",
            where=str(Path.cwd()),
            do="go to the project's root, or make one: safetrain init",
        )


def stage_module(name: str) -> str:
    """The module of a stage: this folder's own in the program's repository, else the installed one."""
    return f"stages.{name}" if Path(f"stages/{name}.py").is_file() else f"safetrain.stages.{name}"


def params() -> Any:
    """Read params.yaml, without overlays."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    require_project()
    try:
        return OmegaConf.load("params.yaml")
    except YAMLError as error:
        raise broken_yaml(error) from None


def model_of_params() -> Path:
    """model.path of params.yaml."""
    return Path(params().model.path)


def console() -> "Console":
    """A console for tables, which exits quietly when stdout is closed (rich exits 1)."""
    from rich.console import Console

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return QuietConsole(soft_wrap=True, highlight=False)


def init(
    folder: Annotated[Path, typer.Argument(help="created if missing")] = Path(),
    example: Annotated[bool, typer.Option("--example", help="with the example data and the small model")] = False,
) -> None:
    """Make a project folder for your settings, data and models.

    The folder is under Git and DVC: safetrain init demo --example && cd demo && safetrain run
    """
    from safetrain.project import make_project

    left_out = make_project(folder, example=example)
    steps = ["safetrain run"] if example else ["safetrain run --data FILE --model FOLDER"]
    steps = [f"cd {folder}", *steps] if folder != Path() else steps
    print_text(f"Made a project in {folder.resolve()}." + (f" {left_out}." if left_out else ""))
    print_text(f"Next:  {' && '.join(steps)}")


def update() -> None:
    """Update the project's files after an upgrade.

    Files that you have changed stay; their new version is written to NAME.new.
    """
    from safetrain.project import update_project

    params()  # an unreadable file is an error with its line
    print("\n".join(update_project()) or "The project is up to date.")


def cache(clear: Annotated[bool, typer.Option("--clear", help="delete it")] = False) -> None:
    """Show what safetrain keeps outside projects.

    These are measurements and a prepared BLAS; deleted files are made again when needed.
    """
    import shutil

    from safetrain.core.formatting import counted, size_text
    from safetrain.core.storage.files import cache_directory

    folder = cache_directory()
    files = [file for file in folder.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    if clear:
        shutil.rmtree(folder, ignore_errors=True)
    print_text(f"{folder}: {counted(len(files), 'file')}, {size_text(size)}{', deleted' if clear else ''}")
