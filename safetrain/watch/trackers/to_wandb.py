"""To Weights & Biases. Without an account: WANDB_MODE=offline, and `wandb sync` whenever there is one."""

import os
import secrets

from safetrain.core.errors import ConfigError
from safetrain.watch.trackers.sent import FOLDER, Sent, Target
from safetrain.watch.trackers.tracked import TrackedRun

PROJECT = "safetrain"


def place_of(target: Target) -> str:
    """The project; offline runs are elsewhere."""
    project = target.place or os.environ.get("WANDB_PROJECT") or PROJECT
    return f"{project} ({os.environ.get('WANDB_MODE', 'online')})"


def open_run(run: TrackedRun, target: Target) -> str:
    """The id of a new run: W&B takes ours."""
    return secrets.token_hex(4)


def send(run: TrackedRun, sent: Sent, target: Target) -> str:
    """Send the steps, and the results; says where the run is. Raises ConfigError."""
    import wandb

    FOLDER.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(  # numbers alone: no names of hosts, users or packages, no code
        silent=True, console="off", x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True,
        x_save_requirements=False, disable_git=True, save_code=False, disable_job_creation=True,
    )  # fmt: skip
    try:
        opened = wandb.init(
            project=target.place or os.environ.get("WANDB_PROJECT") or PROJECT, id=sent.run_id, resume="allow",
            name=target.name or None, dir=str(FOLDER.resolve()), settings=settings,
            config={setting.name: setting.value for setting in run.settings},
        )  # fmt: skip
        for step in run.steps:
            if step.step >= opened.step:  # W&B has no place for what comes after a later step
                values = {scalar.name: scalar.value for scalar in step.scalars}
                opened.log(values | {"_timestamp": sent.began_seconds + step.elapsed_seconds}, step=step.step)
        opened.summary.update({scalar.name: scalar.value for scalar in run.results})
        folder = opened.settings.sync_dir
        where = f"{folder}; to the server: wandb sync {folder}" if opened.offline else opened.url
        opened.finish()
        wandb.teardown()  # finish does not wait until all is written
    except wandb.errors.Error as error:
        raise ConfigError(
            f"W&B did not take it: {error}", do="wandb login, or without an account WANDB_MODE=offline"
        ) from error
    return str(where)
