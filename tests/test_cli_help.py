"""What a person asks first: `safetrain -h`, a command's own help, and what the shell completes."""

import subprocess
import sys
from collections.abc import Iterator

import typer
from typer.testing import CliRunner

from safetrain.cli import COMMANDS, app
from tests.conftest import ROOT

# Each costs from a hundredth of a second to several.
HEAVY = (
    "dvc", "huggingface_hub", "hydra", "jinja2", "matplotlib", "mlx", "mlx_lm", "mlflow", "numpy", "omegaconf",
    "pandas", "psutil", "pyarrow", "requests", "scipy", "tensorboard", "tokenizers", "torch", "transformers", "wandb",
    "yaml",
)  # fmt: skip
ALL_HELP = """
import sys
from safetrain.cli import app
from typer.testing import CliRunner
for words in {commands}:
    done = CliRunner().invoke(app, [*words, "-h"])
    assert done.exit_code == 0, (words, done.output)
    assert done.output == CliRunner().invoke(app, [*words, "--help"]).output
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & set({heavy})))
"""


def commands(group: typer.core.TyperGroup | None = None) -> Iterator[list[str]]:
    """The words of every command, and of every group."""
    found = group or typer.main.get_command(app)
    assert isinstance(found, typer.core.TyperGroup)
    for name, command in found.commands.items():
        yield [name]
        if isinstance(command, typer.core.TyperGroup):
            yield from ([name, *words] for words in commands(command))


def test_no_help_waits_for_what_it_does_not_need() -> None:
    """Every command under half a second to its help: what takes longer is imported where it is used."""
    script = ALL_HELP.format(commands=[[], *commands()], heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_first_page_tells_commands_in_the_order_of_use_each_in_one_line() -> None:
    said = CliRunner().invoke(app, ["-h"], env={"COLUMNS": "80"}).output
    places = [said.index(f"─ {panel} ─") for panel in COMMANDS]
    assert places == sorted(places)
    assert "─ Commands ─" not in said  # one that is in no group
    told = said[places[0] :].splitlines()
    assert not [line for line in told if line.startswith("│    ")], "a command's first line is too long"
