"""`safetrain track`: the commands that send a recorded run to a tracker."""

from typing import Annotated

import typer

from safetrain.cli_project import console, require_project
from safetrain.core.errors import ConfigError
from safetrain.core.formatting import printable

HELP = """Send a run to W&B, MLflow or TensorBoard.

Steps, settings and scores; no rows and no answers. Called again, it sends what is new."""

track = typer.Typer(no_args_is_help=True, help=HELP)

Name = Annotated[str, typer.Option(help="name of the run; default: the tracker's choice")]
Follow = Annotated[float | None, typer.Option(min=1.0, metavar="SECONDS", help="send again until the training ends")]


@track.command("wandb")
def track_wandb(
    project: Annotated[str, typer.Option(help="default: $WANDB_PROJECT, else safetrain")] = "",
    name: Name = "",
    follow: Follow = None,
) -> None:
    """Send to Weights & Biases; WANDB_MODE=offline needs no account."""
    _track("wandb", project, name, follow)


@track.command("mlflow")
def track_mlflow(
    uri: Annotated[str, typer.Option(help="default: $MLFLOW_TRACKING_URI, else a database file here")] = "",
    name: Name = "",
    follow: Follow = None,
) -> None:
    """Send to MLflow: a server, or a database file here."""
    _track("mlflow", uri, name, follow)


@track.command("tensorboard")
def track_tensorboard(
    into: Annotated[str, typer.Option(help="default: checkpoints_qlora/trackers/tensorboard")] = "",
    name: Name = "",
    follow: Follow = None,
) -> None:
    """Write event files for TensorBoard."""
    _track("tensorboard", into, name, follow)


def _track(tracker: str, place: str, name: str, every_seconds: float | None) -> None:
    from safetrain.watch import trackers

    require_project()
    if "/" in name or name in (".", ".."):
        raise ConfigError("The name of a run is a folder's name.", got=name, do="choose one without a slash")
    target = trackers.Target(tracker, place, name)
    if every_seconds is not None:
        trackers.follow(target, every_seconds, lambda text: print(printable(text), flush=True))
        return
    with console().status(f"sending to {tracker}"):
        line = trackers.export(target)
    print(printable(line))
