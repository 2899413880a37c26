"""The commands of `safetrain` that make a model's folder or file: fetch, convert, fuse, card, export, import."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from safetrain.core.errors import ConfigError, ModelError, SafetrainError
from safetrain.core.formatting import counted, print_text, size_text
from safetrain.core.storage import paths
from safetrain.core.storage.files import require_new

export = typer.Typer(no_args_is_help=True, help="Write the tuned model for llama.cpp, Ollama, LM Studio, PEFT.")
import_ = typer.Typer(no_args_is_help=True, help="Bring in an adapter that PEFT trained.")

OFTEN_THE_SAME = 0.9  # share of answers: if fewer are equal, a message says so
BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
SUFFIX = ".gguf"
OutFolder = Annotated[Path, typer.Argument(help="folder to write; must not exist yet")]
AdapterFolder = Annotated[Path, typer.Option(help="adapter folder")]
BaseFolder = Annotated[Path | None, typer.Option(help="base model folder; default: the adapter's own")]
MayLose = Annotated[float, typer.Option(min=0.0, max=100.0, help="percent of the improvement that may be lost")]


GgufType = StrEnum("GgufType", "F16 BF16 Q8_0 Q4_0 Q6_K Q5_K_M Q4_K_M Q3_K_M")  # the values are in lower case


def fetch(
    hub_id: Annotated[str, typer.Argument(help="e.g. mlx-community/Qwen2.5-0.5B-Instruct-4bit")],
    into: Annotated[Path, typer.Option(help="folder that holds the models")] = Path("models"),
) -> None:
    """Download a model from the Hugging Face Hub into models/."""
    from safetrain.plan.hub import fetch_model

    folder = fetch_model(hub_id, into)
    print_text(f"{folder} is complete. Use it: model.path: {folder} in params.yaml")


def convert(
    source: Annotated[Path, typer.Argument(help="folder of a float model")],
    target: OutFolder,
    bits: Annotated[int, typer.Option(help="2, 3, 4, 5, 6 or 8 bits per weight")] = 4,
    group_size: Annotated[int, typer.Option(help="weights that share a scale: 32, 64 or 128")] = 64,
) -> None:
    """Quantize a model: training then needs a quarter of the memory."""
    from safetrain.core.model.files import read_model_files

    model = read_model_files(source)
    if model.quantization_bits is not None:
        raise ModelError(f"This model already has {model.quantization_bits} bits per weight.", where=str(source))
    if bits not in BITS or group_size not in GROUP_SIZES:
        raise ConfigError("Unsupported quantization.", expected="bits 2, 3, 4, 5, 6 or 8; group size 32, 64 or 128")
    require_new(target)
    from safetrain.engine.upstream.loading import quantize
    from safetrain.watch.progress import still_working

    with still_working(f"quantizing {source}"):
        quantize(source, target, bits, group_size)
    print_text(f"{target} is written. Use it: model.path: {target} in params.yaml")


def fuse(
    out: OutFolder,
    bits: Annotated[
        int | None, typer.Option(help="bits of the trained matrices; default: the base's, else 8, else float")
    ] = None,
    as_float: Annotated[bool, typer.Option("--float", help="quantize nothing")] = False,
    may_lose: MayLose = 2.0,
    adapter: AdapterFolder = paths.ADAPTERS,
    model: BaseFolder = None,
) -> None:
    """Merge the adapter into the base model, for any MLX program.

    Tries the base's own bits, then 8 bits, then float. Each is written, loaded and compared with the base and
    tuned models on validation rows. The first that keeps the improvement wins.
    """
    from safetrain.core.records.fusing import REPORT
    from safetrain.watch.progress import still_working

    if (bits is not None and as_float) or bits not in (None, *BITS):
        raise ConfigError("Unsupported quantization.", expected="--bits 2, 3, 4, 5, 6 or 8, or --float, or neither")
    material = _material(out, adapter, model)
    from safetrain.engine.fuse import FuseJob, fuse_adapter

    job = FuseJob(**material, bits=bits, as_float=as_float, may_lose=may_lose / 100)
    with still_working(f"writing and measuring {out}"):
        report = fuse_adapter(job, print_text)
    chosen, like = report.tried[-1], report.tried[-1].likeness
    share = f"keeps {100 * chosen.kept:.1f} % of the improvement"
    print_text(f"{out} is written: {chosen.name}, {size_text(chosen.size_bytes)}, {share}; figures: {out / REPORT}")
    if like.same_answers < OFTEN_THE_SAME:
        others = report.rows - round(like.same_answers * report.rows)
        print_text(
            f"{others} of {report.rows} answers differ in wording from the tuned model's; the number of correct ones "
            "is within chance. To keep more: --may-lose 0.5, or --bits 6"
        )
    print_text(f'Ask it: safetrain chat --base --model {out}, or mlx_lm.generate --model {out} --prompt "..."')
    try:
        card(out, adapter, job.base, replace=True)
    except SafetrainError as error:  # the model is complete without a card
        print_text(f"no model card: {error}")


def card(
    folder: Annotated[Path, typer.Argument(help="a fused or exported model, or an adapter")],
    adapter: Annotated[
        Path | None, typer.Option(help="adapter that FOLDER was made from; default: the pipeline's, or FOLDER")
    ] = None,
    model: BaseFolder = None,
    replace: Annotated[bool, typer.Option("--replace", help="overwrite README.md")] = False,
) -> None:
    """Write a model card with the measured results.

    The card is the folder's README.md. `fuse` writes one itself.
    """
    from safetrain.core.run_folder import read_run
    from safetrain.watch.card import CARD, write_card

    remarks = write_card(folder, adapter, model, read_run(), replace=replace)
    print_text(f"Wrote the model card {folder / CARD}; read it before you share it.")
    for remark in remarks:
        print_text(f"  {remark}")


@export.command("peft")
def export_peft(
    out: OutFolder,
    base_name: Annotated[str | None, typer.Option(help="Hub ID or folder of the float model for PEFT")] = None,
    adapter: AdapterFolder = paths.ADAPTERS,
    model: BaseFolder = None,
) -> None:
    """Write the adapter (LoRA or DoRA) in PEFT format, for PyTorch.

    The written adapter is compared with the tuned model on validation rows.
    """
    from safetrain.core.model.files import hub_id_of
    from safetrain.core.records.fusing import EXPORT_REPORT
    from safetrain.watch.progress import still_working

    material = _material(out, adapter, model)
    from safetrain.engine.exchange.peft import PeftExportJob, export_peft

    name = base_name or hub_id_of(material["base"]) or str(material["base"])
    with still_working(f"writing and measuring {out}"):
        report = export_peft(PeftExportJob(**material, base_name=name), print_text)
    like, bits = report.exported, report.base_bits
    print_text(
        f"{out} is written and read again: {like.divergence:.1e} nats per label from the tuned model, "
        f"the same answer on {round(like.same_answers * report.rows)} of {report.rows} rows, loss {like.loss:.4f}; "
        f"{out / EXPORT_REPORT} has the figures"
    )
    if bits is not None:
        print_text(f"The adapter was trained on a {bits}-bit base, and the figures are for that base, dequantized.")
        print_text("On the float model that it was quantized from, results differ slightly.")
    if bits is not None and base_name is None:
        print_text(f"PEFT cannot open a quantized MLX model, and the base is {name}. Name the float one: --base-name")
    else:
        print_text(f'Use it: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{name}"), "{out}")')


@export.command("gguf")
def export_gguf(
    out: Annotated[Path, typer.Argument(help="file to write, NAME.gguf; must not exist yet")],
    kind: Annotated[
        GgufType, typer.Option("--type", help="type of most weights; K types need llama-quantize")
    ] = GgufType.Q8_0,
    may_lose: MayLose = 2.0,
    adapter: AdapterFolder = paths.ADAPTERS,
    model: BaseFolder = None,
    fused: Annotated[Path | None, typer.Option(help="a fused model's folder, instead of base and adapter")] = None,
) -> None:
    """Write the base and adapter as one GGUF file, with a Modelfile, for llama.cpp, Ollama and LM Studio.

    The file is compared with the tuned model on validation rows; NAME.gguf.json has the figures. A file that loses too
    much is refused.
    """
    import importlib.util

    from safetrain.watch.progress import still_working

    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("The package gguf is not installed.", do="pip install -e '.[gguf]' -c constraints.txt")
    if out.suffix != SUFFIX:
        raise ConfigError("The file's name does not end with .gguf.", where=str(out), do=f"name it {out}{SUFFIX}")
    if fused is not None and model is not None:
        raise ConfigError("A fused model has no base.", do="leave out --model, or --fused")
    material = _material(out, adapter, model, fused)
    from safetrain.engine.exchange.gguf_export import GgufJob, export_gguf, modelfile_of, report_of

    job = GgufJob(**material, kind=kind.value, may_lose=may_lose / 100)
    with still_working(f"writing and measuring {out}"):
        report = export_gguf(job, print_text)
    print_text(f"{out} is written: {kind.value}, {size_text(report.size_bytes)}; {report_of(out)} has the figures")
    print_text(f"Ask it: ollama create NAME -f {modelfile_of(out)} && ollama run NAME, or llama-cli -m {out}")


@import_.command("peft")
def import_peft(
    source: Annotated[Path, typer.Argument(help="folder that PEFT wrote")],
    out: Annotated[Path, typer.Argument(help="adapter folder to write; must not exist yet")],
    model: Annotated[Path | None, typer.Option(help="base model folder; default: model.path of params.yaml")] = None,
) -> None:
    """Convert a LoRA or DoRA adapter from PEFT, for ask, fuse and programs that use mlx-lm.

    The command refuses an adapter with parts that mlx-lm does not support, and one that changes nothing.
    """
    from safetrain.engine.cpu.blas import load_fast_blas

    base = model or _model_of_params()
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.exchange.peft import import_peft
    from safetrain.watch.progress import still_working

    with still_working(f"reading {source} and trying it on {base}"):
        imported, moved, largest = import_peft(source, base, out)
    lora, shape = imported.lora, imported.shape
    if shape.base_name:
        print_text(f"PEFT trained this adapter on {shape.base_name}; here its base is {base}.")
    kind = "DoRA" if shape.dora else "rsLoRA" if shape.by_root else "LoRA"
    print_text(
        f"{out} is written: {kind} of rank {lora.rank}, scale {lora.scale:g}, on {', '.join(lora.targets)} of the top "
        f"{counted(lora.num_layers, 'block')}; it changes logits by up to {moved:.2g}; the largest is {largest:.2g}"
    )
    print_text(f'Use it: safetrain ask "..." --adapter {out}')


def _material(out: Path, adapter: Path, model: Path | None, fused: Path | None = None) -> dict[str, Any]:
    """Gather what every export needs, by the names in ExportJob, and load the BLAS for mlx."""
    from safetrain.core.data.training_rows import load_valid_rows
    from safetrain.core.records.adapter_files import base_of
    from safetrain.core.records.metrics import read_run_shape
    from safetrain.engine.cpu.blas import load_fast_blas

    base = fused or model or base_of(adapter)
    run = read_run_shape(paths.SUMMARY)
    rows = load_valid_rows(_tokens_of(base), run.max_seq_length)
    load_fast_blas()  # before anything imports mlx
    return {
        "base": base, "adapter": None if fused else adapter, "out": out, "rows": rows, "most_tokens": run.most_tokens,
        "mlx_limit_bytes": run.mlx_limit_bytes, "compute_dtype": run.compute_dtype,
    }  # fmt: skip


def _tokens_of(folder: Path) -> Path:
    """The folder whose tokenizer made the rows: a fused model's base, because fuse adds stop tokens."""
    from safetrain.core.model.files import make_same_tokens
    from safetrain.core.records.fusing import REPORT, FuseReport
    from safetrain.core.storage.files import read_record

    if not (folder / REPORT).is_file():
        return folder
    base = Path(read_record(folder / REPORT, FuseReport).base_model)
    return base if base.is_dir() and make_same_tokens(base, folder) else folder


def _model_of_params() -> Path:
    """Read model.path from params.yaml; raises ConfigError outside a project."""
    from omegaconf import OmegaConf

    if not Path("params.yaml").is_file():
        raise ConfigError("The adapter's base model is not known.", do="name its folder with --model")
    return Path(OmegaConf.load("params.yaml").model.path)
