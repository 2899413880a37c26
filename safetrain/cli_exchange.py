"""The commands of `safetrain export`: a tuned model for other programs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import printable, size_text
from safetrain.core.storage import paths

export = typer.Typer(no_args_is_help=True, help="Write the tuned model for other programs.")
SUFFIX = ".gguf"


class GgufType(StrEnum):
    """How most weights of a GGUF file are stored."""

    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"


@export.callback()
def _named() -> None:
    """Keep the name of a single command."""


@export.command()
def gguf(
    out: Annotated[Path, typer.Argument(help="file to write, NAME.gguf; must not exist")],
    kind: Annotated[GgufType, typer.Option("--type", help="of most weights")] = GgufType.Q8_0,
    may_lose: Annotated[float, typer.Option(min=0.0, max=100.0, help="percent of what was learnt")] = 2.0,
    adapter: Annotated[Path, typer.Option(help="adapter folder")] = paths.ADAPTERS,
    model: Annotated[Path | None, typer.Option(help="base model folder; default: the adapter's own")] = None,
    fused: Annotated[Path | None, typer.Option(help="a fused model's folder, instead of base and adapter")] = None,
) -> None:
    """Write base and adapter as one GGUF file, for llama.cpp, Ollama and LM Studio, with a Modelfile beside it.

    The file is read again and measured on the validation rows beside the tuned model, by llama.cpp itself too where
    llama-cpp-python is installed; NAME.gguf.json has the figures. What does not hold is not kept.
    """
    import importlib.util

    from safetrain.core.data.training_rows import load_valid_rows
    from safetrain.core.records.adapter_files import base_of
    from safetrain.core.records.reports import read_run_shape
    from safetrain.engine.blas import load_fast_blas

    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("The package gguf is not installed.", do="pip install -e '.[gguf]' -c constraints.txt")
    if out.suffix != SUFFIX:
        raise ConfigError("The file's name does not end with .gguf.", where=str(out), do=f"name it {out}{SUFFIX}")
    if fused is not None and model is not None:
        raise ConfigError("A fused model has no base.", do="leave out --model, or --fused")
    base = fused or model or base_of(adapter)
    run = read_run_shape(paths.SUMMARY)
    rows = load_valid_rows(base, run.max_seq_length)
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.exchange.gguf_export import GgufJob, export_gguf, modelfile_of, report_of

    job = GgufJob(
        base=base,
        adapter=None if fused is not None else adapter,
        out=out,
        rows=rows,
        most_tokens=run.most_tokens,
        mlx_limit_bytes=run.mlx_limit_bytes,
        kind=kind.value,
        may_lose=may_lose / 100,
        compute_dtype=run.compute_dtype,
    )
    report = export_gguf(job, lambda text: print(printable(text), flush=True))
    print(f"{out} is written: {kind.value}, {size_text(report.size_bytes)}; {report_of(out)} has the figures")
    print(f"Ask it: ollama create NAME -f {modelfile_of(out)} && ollama run NAME, or llama-cli -m {out}")
