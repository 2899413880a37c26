"""The commands that send what a run has recorded to a tracker: `safetrain track`."""

from typing import Annotated

import typer

from safetrain.cli_project import require_project
from safetrain.core.errors import ConfigError
from safetrain.core.formatting import printable

track = typer.Typer(no_args_is_help=True, help="Send the losses to W&B, MLflow or TensorBoard.")

NameOption = Annotated[str, typer.Option(help="of the run; default: the tracker makes one up")]
FollowOption = Annotated[
    float | None, typer.Option(min=1.0, metavar="SECONDS", help="again every so often, until the training has ended")
]


@track.command("wandb")
def track_wandb(
    project: Annotated[str, typer.Option(help="default: $WANDB_PROJECT, else safetrain")] = "",
    name: NameOption = "",
    follow: FollowOption = None,
) -> None:
    """Send to Weights & Biases. WANDB_MODE=offline needs no account.

    Steps, settings and scores; no rows and no answers. Called again, it goes on where it was.
    """
    _track("wandb", project, name, follow)


@track.command("mlflow")
def track_mlflow(
    uri: Annotated[str, typer.Option(help="default: $MLFLOW_TRACKING_URI, else a database file here")] = "",
    name: NameOption = "",
    follow: FollowOption = None,
) -> None:
    """Send to MLflow: a server, or a database file here.

    Steps, settings and scores; no rows and no answers. Called again, it goes on where it was.
    """
    _track("mlflow", uri, name, follow)


@track.command("tensorboard")
def track_tensorboard(
    into: Annotated[str, typer.Option(help="default: checkpoints_qlora/trackers/tensorboard")] = "",
    name: NameOption = "",
    follow: FollowOption = None,
) -> None:
    """Write event files for TensorBoard.

    Steps, settings and scores; no rows and no answers. Called again, it goes on where it was.
    """
    _track("tensorboard", into, name, follow)


def _track(tracker: str, place: str, name: str, every_seconds: float | None) -> None:
    from safetrain.watch.progress import still_working
    from safetrain.watch.trackers import export
    from safetrain.watch.trackers.sent import Target

    require_project()
    if "/" in name or name in (".", ".."):
        raise ConfigError("The name of a run has no / in it.", where=f"--name {name}", do="give it a plain name")
    target = Target(tracker, place, name)
    if every_seconds is None:
        with still_working(f"{tracker} is sent to"):
            exported = export.export(target)
        print(printable(export.describe(target, exported)))
    else:
        export.follow(target, every_seconds, lambda text: print(printable(text), flush=True))
