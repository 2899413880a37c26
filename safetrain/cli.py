"""Fine-tune a language model on the machine you have, without losing a run.

In a project, safetrain run runs the pipeline, and DVC keeps its results; the settings are in params.yaml.
"""

import signal
import sys
from importlib.metadata import version
from typing import Annotated, Any

from typer import Context, Exit, Option, Typer
from typer.core import TyperGroup

from safetrain.cli_models import convert, export, fetch, fuse, push
from safetrain.cli_plan import estimate, preflight, selftest, validate
from safetrain.cli_run import discard, result, run, runs, search, set_, stage
from safetrain.cli_talk import ask, chat
from safetrain.cli_watch import diagnose, monitor, page, report
from safetrain.core.errors import ConfigError, SafetrainError
from safetrain.core.formatting import print_text
from safetrain.core.params_file import PARAMS, left_behind
from safetrain.core.results import settle
from safetrain.core.signals import exit_code_of, handling, terminate
from safetrain.project import init, update

HELP = {"help_option_names": ["-h", "--help"]}  # every command inherits it

# Commands in the order in which people meet them; a group is listed by its name.
COMMANDS = {
    "A project": (init, update, page),
    "Before training": (fetch, convert, validate, preflight, estimate, selftest),
    "Train": (run, search, set_, runs),
    "Inspect a run": (monitor, result, report),
    "Use the model": (ask, chat, fuse, push, ("export", export)),
    "After a crash": (diagnose, discard),
}


class Commands(TyperGroup):
    """Exit like the stages on SIGTERM, and quietly when stdout is closed, as in `… | head`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; the word that comes to mind first is none."""
        if args[:1] == ["train"]:
            raise ConfigError("There is no command train.", do="safetrain run")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and flush its output."""
        try:
            try:
                if PARAMS.is_file():
                    settle()  # a command that was killed may have left results to put back
                return super().invoke(ctx)
            finally:
                if sys.stdout is not None:  # not closed
                    sys.stdout.flush()
        except (BrokenPipeError, KeyboardInterrupt) as error:  # typer would report a failure
            sys.exit(exit_code_of(error))


app = Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__, context_settings=HELP)


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"safetrain {version('safetrain')}")
        raise Exit


@app.callback()
def options(
    context: Context,
    version: Annotated[
        bool, Option("--version", callback=_tell_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Declare the options before a command; say whose values params.yaml has, unless the command puts them back."""
    if PARAMS.is_file() and context.invoked_subcommand not in ("run", "search", "set") and (said := left_behind()):
        print_text(said, sys.stderr)


for panel, commands in COMMANDS.items():
    for command in commands:
        if isinstance(command, tuple):
            app.add_typer(command[1], name=command[0], rich_help_panel=panel)
        else:
            text = "\n\n".join(" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n"))
            settings = {**HELP, "ignore_unknown_options": command in (run, search, set_)}  # they explain values
            name = command.__name__.rstrip("_")
            app.command(name, rich_help_panel=panel, help=text, context_settings=settings)(command)  # rejoined lines
app.command(hidden=True)(stage)  # dvc.yaml of a project calls it


def main() -> None:
    """The console command."""
    try:
        with handling({signal.SIGTERM: terminate}):
            app(prog_name="safetrain")
    except (SafetrainError, OSError) as error:
        sys.exit(exit_code_of(error))


if __name__ == "__main__":
    main()
