"""The commands that take a tuned model to other programs and back: `safetrain export`, `safetrain import`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted, printable, size_text
from safetrain.core.storage import paths

export = typer.Typer(no_args_is_help=True, help="Write the tuned model for llama.cpp, Ollama, LM Studio, PEFT.")
import_ = typer.Typer(no_args_is_help=True, help="Bring in an adapter that PEFT trained.")

SUFFIX = ".gguf"


class GgufType(StrEnum):
    """How most weights of a GGUF file are stored."""

    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q6_K = "q6_k"
    Q5_K_M = "q5_k_m"
    Q4_K_M = "q4_k_m"
    Q3_K_M = "q3_k_m"


@export.command("peft")
def export_peft(
    out: Annotated[Path, typer.Argument(help="folder to write; must not exist")],
    base_name: Annotated[str | None, typer.Option(help="hub id or folder of the float model for PEFT")] = None,
    adapter: Annotated[Path, typer.Option(help="adapter folder")] = paths.ADAPTERS,
    model: Annotated[Path | None, typer.Option(help="base model folder; default: the adapter's own")] = None,
) -> None:
    """Write the adapter as PEFT reads it, for PyTorch: LoRA or DoRA.

    The written adapter is compared with the tuned model on validation rows.
    """
    from safetrain.core.data.training_rows import load_valid_rows
    from safetrain.core.model.files import hub_id_of, read_model_files
    from safetrain.core.records.adapter_files import base_of
    from safetrain.core.records.exporting import REPORT
    from safetrain.core.records.metrics import read_run_shape
    from safetrain.engine.cpu.blas import load_fast_blas

    base = model or base_of(adapter)
    bits = read_model_files(base).quantization_bits
    run = read_run_shape(paths.SUMMARY)
    rows = load_valid_rows(base, run.max_seq_length)
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.exchange.peft_export import PeftExportJob, export_peft
    from safetrain.watch.progress import still_working

    name = base_name or hub_id_of(base) or str(base)
    limits = run.most_tokens, run.mlx_limit_bytes
    job = PeftExportJob(base, adapter, out, rows, *limits, name, compute_dtype=run.compute_dtype)
    with still_working(f"{out} is made and measured"):
        report = export_peft(job, lambda text: print(printable(text), flush=True))
    like = report.exported
    print(
        f"{out} is written and read again: {like.divergence:.1e} nats per label from the tuned model, "
        f"the same answer on {round(like.same_answers * report.rows)} of {report.rows} rows, loss {like.loss:.4f}; "
        f"{out / REPORT} has the figures"
    )
    if bits is not None:
        print(f"It was trained on a base of {bits} bits, and the figures are for that base, dequantized.")
        print("On the float model that this was quantized from, it computes a little else.")
    if bits is not None and base_name is None:
        print(f"PEFT opens no quantized MLX model, and {name} is written as its base. Name the float one: --base-name")
    else:
        print(f'Use it: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{name}"), "{out}")')


@export.command("gguf")
def export_gguf(
    out: Annotated[Path, typer.Argument(help="file to write, NAME.gguf; must not exist")],
    kind: Annotated[
        GgufType, typer.Option("--type", help="type of most weights; K types need llama-quantize")
    ] = GgufType.Q8_0,
    may_lose: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="percent of the improvement that may get lost")
    ] = 2.0,
    adapter: Annotated[Path, typer.Option(help="adapter folder")] = paths.ADAPTERS,
    model: Annotated[Path | None, typer.Option(help="base model folder; default: the adapter's own")] = None,
    fused: Annotated[Path | None, typer.Option(help="a fused model's folder, instead of base and adapter")] = None,
) -> None:
    """Write base and adapter as one GGUF file, with a Modelfile, for llama.cpp, Ollama and LM Studio.

    The file is compared with the tuned model on validation rows; NAME.gguf.json has the figures. A file that loses too
    much is refused.
    """
    import importlib.util

    from safetrain.core.data.training_rows import load_valid_rows
    from safetrain.core.records.adapter_files import base_of
    from safetrain.core.records.metrics import read_run_shape
    from safetrain.engine.cpu.blas import load_fast_blas

    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("The package gguf is not installed.", do="pip install -e '.[gguf]' -c constraints.txt")
    if out.suffix != SUFFIX:
        raise ConfigError("The file's name does not end with .gguf.", where=str(out), do=f"name it {out}{SUFFIX}")
    if fused is not None and model is not None:
        raise ConfigError("A fused model has no base.", do="leave out --model, or --fused")
    base = fused or model or base_of(adapter)
    run = read_run_shape(paths.SUMMARY)
    rows = load_valid_rows(_tokens_of(base), run.max_seq_length)
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.exchange.gguf_export import GgufJob, export_gguf, modelfile_of, report_of
    from safetrain.watch.progress import still_working

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
    with still_working(f"{out} is made and measured"):
        report = export_gguf(job, lambda text: print(printable(text), flush=True))
    print(f"{out} is written: {kind.value}, {size_text(report.size_bytes)}; {report_of(out)} has the figures")
    print(f"Ask it: ollama create NAME -f {modelfile_of(out)} && ollama run NAME, or llama-cli -m {out}")


def _tokens_of(folder: Path) -> Path:
    """Of a fused model the base, whose tokens the rows have: fuse names further tokens that end an answer."""
    from safetrain.core.model.files import make_same_tokens
    from safetrain.core.records.fusing import REPORT, FuseReport
    from safetrain.core.storage.files import read_record

    if not (folder / REPORT).is_file():
        return folder
    base = Path(read_record(folder / REPORT, FuseReport).base_model)
    return base if base.is_dir() and make_same_tokens(base, folder) else folder


@import_.command("peft")
def import_peft(
    source: Annotated[Path, typer.Argument(help="folder that PEFT wrote")],
    out: Annotated[Path, typer.Argument(help="adapter folder to write; must not exist")],
    model: Annotated[Path | None, typer.Option(help="base model folder; default: model.path of params.yaml")] = None,
) -> None:
    """Convert a LoRA or DoRA adapter from PEFT, for ask, fuse and other programs with mlx-lm.

    An adapter with parts that mlx-lm lacks is refused, and so is one that changes nothing.
    """
    from safetrain.engine.cpu.blas import load_fast_blas

    base = model or _model_of_params()
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.exchange.peft_import import PeftImportJob, import_peft
    from safetrain.watch.progress import still_working

    with still_working(f"{source} is read and tried on {base}"):
        done = import_peft(PeftImportJob(source, base, out))
    lora, name = done.imported.lora, done.shape.base_name
    for note in done.imported.notes:
        print(note)
    if name:
        print(printable(f"The adapter says that it was trained on {name}; it is put on {base}."))
    kind = "DoRA" if done.shape.dora else "rsLoRA" if done.shape.by_root else "LoRA"
    print(
        f"{out} is written: {kind} of rank {lora.rank}, scale {lora.scale:g}, on {', '.join(lora.targets)} of the top "
        f"{counted(lora.num_layers, 'block')}; it moves logits by up to {done.moved:.2g}, of up to {done.largest:.2g}"
    )
    print(f'Use it: safetrain ask "..." --adapter {out}')


def _model_of_params() -> Path:
    """model.path of params.yaml, in a project."""
    from omegaconf import OmegaConf

    if not Path("params.yaml").is_file():
        raise ConfigError("The adapter's base model is not known.", do="name its folder with --model")
    return Path(OmegaConf.load("params.yaml").model.path)
