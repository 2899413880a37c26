"""The command `safetrain create`: a new, untrained model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from safetrain.cli_project import console
from safetrain.core.errors import ConfigError
from safetrain.core.formatting import printable, size_text


def create(
    preset: Annotated[
        str, typer.Argument(help="10m, 85m, 400m, 800m, another size such as 30m, or own with --hidden-size …")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder to write; must not exist")],
    text: Annotated[
        list[Path] | None, typer.Option(help="text or rows for the tokenizer: a file or folder; repeatable")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="copy the tokenizer of this model instead")] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="number of tokens; default: from model and text")
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(min=1, help="width; a multiple of 64")] = None,
    num_layers: Annotated[int | None, typer.Option(min=1, help="blocks")] = None,
    num_heads: Annotated[int | None, typer.Option(min=1, help="attention heads")] = None,
    context: Annotated[int | None, typer.Option(min=8, help="tokens; default: 1024, or 2048 from 50m on")] = None,
    columns: Annotated[list[str] | None, typer.Option(help="your key of the texts, as text=content")] = None,
    split_digits: Annotated[bool, typer.Option("--split-digits", help="make each digit a token")] = False,
    sample_mib: Annotated[int, typer.Option(min=1, help="most MiB of text to train the tokenizer on")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="seed of the initial weights")] = 42,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
) -> None:
    """Make a new, untrained model for pretraining.

    PRESET is the number of parameters, embeddings included. The command prints the other sizes with their reasons.
    """
    from safetrain.data.forms import named_columns
    from safetrain.data.texts import training_texts
    from safetrain.plan.creation.create import TokenizerOfText, create_model, reasons_of
    from safetrain.plan.creation.shapes import AskedShape, parameters_named
    from safetrain.watch.progress import say_on_terminal, still_working

    if bool(text) == (tokenizer is not None):
        raise ConfigError(
            "A model needs one tokenizer.", expected="--text FILE, to train one; or --tokenizer MODEL, to take its own"
        )
    if tokenizer is not None and vocabulary is not None:
        raise ConfigError("A copied tokenizer has its own vocabulary.", do="leave out --vocabulary")
    parameters = parameters_named(preset)
    if parameters is None and preset != "own":
        raise ConfigError("No such preset.", expected="10m, 85m, 400m, 800m, a size as 30m, or own", got=preset)
    asked = AskedShape(parameters, hidden_size, num_layers, num_heads, vocabulary, context)
    source: Path | TokenizerOfText
    if tokenizer is not None:
        source = tokenizer
    else:
        texts = training_texts(text or (), named_columns(columns or ()), say_on_terminal)
        source = TokenizerOfText(texts, ", ".join(map(str, text or ())), split_digits, sample_mib)
    with still_working(f"{folder} is made"):
        made = create_model(folder, asked, source, seed, dtype, say_on_terminal)
    _tell(made.folder, reasons_of(made, asked), made.size_bytes)


def _tell(folder: Path, reasons: Iterable[tuple[str, str, str]], size_bytes: int) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for row in reasons:
        table.add_row(*row)
    screen = console(plain=True)
    screen.soft_wrap = False
    screen.print(table)
    print(printable(f"{folder} is written, {size_text(size_bytes)} of weights; it knows nothing yet."))
    print(f"Look at it: safetrain info {folder}. Train it: model.path: {folder} in params.yaml")
