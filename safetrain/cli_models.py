"""The commands of `safetrain` that make a model's folder, or describe it: fetch, convert, fuse, card."""

from pathlib import Path
from typing import Annotated

import typer

from safetrain.core.errors import ConfigError, ModelError, SafetrainError
from safetrain.core.formatting import printable, size_text
from safetrain.core.storage import paths
from safetrain.core.storage.files import require_new

OFTEN_THE_SAME = 0.9  # of the answers: fewer equal ones are reported
BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)


def fetch(
    hub_id: Annotated[str, typer.Argument(help="for example mlx-community/Qwen2.5-0.5B-Instruct-4bit")],
    into: Annotated[Path, typer.Option(help="folder that holds the models")] = Path("models"),
) -> None:
    """Download a model from the Hugging Face hub into models/."""
    from safetrain.plan.hub import fetch_model

    folder = fetch_model(hub_id, into)
    print(f"{folder} is complete. Use it: model.path: {folder} in params.yaml")


def convert(
    source: Annotated[Path, typer.Argument(help="folder of a float model")],
    target: Annotated[Path, typer.Argument(help="folder to write; must not exist")],
    bits: Annotated[int, typer.Option(help="2, 3, 4, 5, 6 or 8 bits per weight")] = 4,
    group_size: Annotated[int, typer.Option(help="weights that share a scale: 32, 64 or 128")] = 64,
) -> None:
    """Quantize a model: training takes a quarter of the memory."""
    from safetrain.core.model.files import read_model_files

    model = read_model_files(source)
    if model.quantization_bits is not None:
        raise ModelError(f"This model already has {model.quantization_bits} bits per weight.", where=str(source))
    if bits not in BITS or group_size not in GROUP_SIZES:
        raise ConfigError("No such quantization.", expected="bits 2, 3, 4, 5, 6 or 8; group size 32, 64 or 128")
    require_new(target)
    from safetrain.engine.upstream.loading import quantize
    from safetrain.watch.progress import still_working

    with still_working(f"{source} is quantized"):
        quantize(source, target, bits, group_size)
    print(f"{target} is written. Use it: model.path: {target} in params.yaml")


def fuse(
    out: Annotated[Path, typer.Argument(help="folder to write; must not exist")],
    bits: Annotated[
        int | None, typer.Option(help="bits of the trained matrices; default: the base's own, 8, or float")
    ] = None,
    as_float: Annotated[bool, typer.Option("--float", help="quantize nothing")] = False,
    may_lose: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="percent of the improvement that may get lost")
    ] = 2.0,
    adapter: Annotated[Path, typer.Option(help="adapter folder")] = paths.ADAPTERS,
    model: Annotated[Path | None, typer.Option(help="base model folder; default: the adapter's own")] = None,
) -> None:
    """Merge the adapter into the base model, for any MLX program.

    Tries the base's own bits, then 8 bits, then float. Each is written, loaded and compared with base and tuned model
    on validation rows. The first that keeps the improvement wins.
    """
    from safetrain.core.data.training_rows import load_valid_rows
    from safetrain.core.records.adapter_files import base_of
    from safetrain.core.records.fusing import REPORT
    from safetrain.core.records.metrics import read_run_shape
    from safetrain.engine.cpu.blas import load_fast_blas

    if (bits is not None and as_float) or bits not in (None, *BITS):
        raise ConfigError("No such quantization.", expected="--bits 2, 3, 4, 5, 6 or 8, or --float, or neither")
    base = model or base_of(adapter)
    run = read_run_shape(paths.SUMMARY)
    rows = load_valid_rows(base, run.max_seq_length)
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.fuse import FuseJob, fuse_adapter
    from safetrain.watch.progress import still_working

    job = FuseJob(
        base=base,
        adapter=adapter,
        out=out,
        rows=rows,
        most_tokens=run.most_tokens,
        mlx_limit_bytes=run.mlx_limit_bytes,
        bits=bits,
        as_float=as_float,
        may_lose=may_lose / 100,
        compute_dtype=run.compute_dtype,
    )
    with still_working(f"{out} is made and measured"):
        report = fuse_adapter(job, lambda text: print(printable(text), flush=True))
    chosen = next(each for each in report.tried if each.name == report.chosen)
    share = f"keeps {100 * chosen.kept:.1f} % of what was learnt"
    print(f"{out} is written: {chosen.name}, {size_text(chosen.size_bytes)}, {share}; {out / REPORT} has the figures")
    if chosen.likeness.same_answers < OFTEN_THE_SAME:
        others = report.rows - round(chosen.likeness.same_answers * report.rows)
        print(
            f"{others} of {report.rows} answers are not word for word the tuned model's, though no more right ones are "
            "lost than chance explains; for more of them: --may-lose 0.5, or --bits 6"
        )
    print(f'Ask it: safetrain chat --base --model {out}, or mlx_lm.generate --model {out} --prompt "..."')
    try:
        _write_card(out, adapter, base, replace=True)
    except SafetrainError as error:  # the model is whole without it
        print(printable(f"no model card: {error}"))


def card(
    folder: Annotated[Path, typer.Argument(help="a fused or exported model, or an adapter")],
    adapter: Annotated[
        Path | None, typer.Option(help="adapter that FOLDER was made from; default: the pipeline's, or FOLDER")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="base model folder; default: the adapter's own")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="overwrite README.md")] = False,
) -> None:
    """Write a model card with the measured results.

    The card is README.md of the folder. `fuse` writes one itself.
    """
    _write_card(folder, adapter, model, replace=replace)


def _write_card(folder: Path, adapter: Path | None, base: Path | None, *, replace: bool) -> None:
    from safetrain.core.run_folder import read_run
    from safetrain.watch.card import CARD, write_card

    remarks = write_card(folder, adapter, base, read_run(), replace=replace)
    print(f"Wrote the model card {folder / CARD}; read it before you share it.")
    for remark in remarks:
        print(printable(f"  {remark}"))
