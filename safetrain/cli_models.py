"""Commands of `safetrain` that write a model or an adapter."""

import shlex
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, Typer

from safetrain.core.errors import ConfigError, ModelError, SafetrainError
from safetrain.core.formatting import counted, print_text, size_text
from safetrain.core.records.evaluation import GGUF_ADAPTER
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_result, require_new

if TYPE_CHECKING:
    from safetrain.export.comparison import ExportJob

export = Typer(no_args_is_help=True, help="Write the tuned model for llama.cpp, Ollama, LM Studio and PEFT.")

BITS, GROUP_SIZE = (2, 3, 4, 5, 6, 8), 64  # weights that share a scale
OutFolder = Annotated[Path, Argument(help="folder to write; must not exist yet")]
AdapterFolder = Annotated[Path, Option(help="adapter folder")]
BaseFolder = Annotated[Path | None, Option(help="base model folder; default: the adapter's base")]
MayLose = Annotated[float, Option(min=0.0, max=100.0, help="percent of the improvement that may be lost")]
FIT_TOKENS = 4096  # of training rows that a quantized model is refitted on
GgufType = StrEnum("GgufType", "F16 BF16 Q8_0 Q4_0 Q6_K Q5_K_M Q4_K_M Q3_K_M")  # the values are in lower case


def fetch(
    hub_id: Annotated[str, Argument(help="e.g. mlx-community/Qwen2.5-0.5B-Instruct-4bit, or datasets/OWNER/NAME")],
    into: Annotated[Path | None, Option(help="folder to download into; default: models, for a data set data")] = None,
) -> None:
    """Download a model into models/, or a data set into data/, from the Hugging Face Hub."""
    from safetrain.plan import hub

    is_data = hub_id.startswith(hub.DATA_SET)
    folder = hub.fetch(hub_id, into or Path("data" if is_data else "models"))
    todo = f"check it: safetrain validate {shlex.quote(str(folder))}; then" if is_data else "to use it,"
    print_text(f"{folder} is complete; {todo} set {'data' if is_data else 'model'}.path: {folder} in params.yaml")


def convert(
    source: Annotated[Path, Argument(help="folder of a float model")],
    target: OutFolder,
    bits: Annotated[int, Option(help="2, 3, 4, 5, 6 or 8 bits per weight")] = 4,
) -> None:
    """Quantize a model: training then needs a quarter of the memory."""
    from safetrain.core.model.files import read_model_files

    model = read_model_files(source)
    if model.quantization_bits is not None:
        raise ModelError(f"This model already has {model.quantization_bits} bits per weight.", where=source)
    if bits not in BITS:
        raise ConfigError("Unsupported quantization.", expected="--bits 2, 3, 4, 5, 6 or 8")
    require_new(target)
    from safetrain.engine.upstream.loading import quantize
    from safetrain.watch.progress import still_working

    with still_working(f"quantizing {source}"):
        quantize(source, target, bits, GROUP_SIZE)
    print_text(f"{target} is written. To use it, set model.path: {target} in params.yaml")


def fuse(
    out: OutFolder,
    bits: Annotated[int | None, Option(help="bits of trained matrices; default: the base's, else 8 or float")] = None,
    as_float: Annotated[bool, Option("--float", help="quantize nothing")] = False,
    may_lose: MayLose = 2.0,
    adapter: AdapterFolder = paths.ADAPTERS,
    model: BaseFolder = None,
) -> None:
    """Merge the adapter into the base model, for any MLX program.

    Tries the base's own bits, then 8 bits, then float. Rounded weights are refitted on training rows. Each merged
    model is written, loaded and compared with the base and tuned models on validation rows. The first that keeps the
    improvement is kept.
    """
    from safetrain.watch.progress import still_working

    if (bits is not None and as_float) or bits not in (None, *BITS):
        raise ConfigError("Unsupported quantization.", expected="--bits 2, 3, 4, 5, 6 or 8, or --float, or neither")
    job = _export_job(out, adapter, model, may_lose, refits=True)
    from safetrain.export.fuse import FLOAT, fuse_adapter

    with still_working(f"writing and measuring {out}"):
        report = fuse_adapter(job, print_text, FLOAT if as_float else bits)
    what = f"{report.type}, {size_text(report.size_bytes)}, keeps {100 * report.kept:.1f} % of the improvement"
    print_text(f"{out} is written: {what}")
    print_text(f"Ask it: safetrain chat --base --model {shlex.quote(str(out))}; any MLX program opens it too")
    _write_card(out, job, "mlx", out)


def _write_card(folder: Path, job: "ExportJob", kind: str, model: Path) -> None:
    """Print how to use a written model, and write a card, unless the folder has one or is the project's."""
    from safetrain.watch.result import CARD, ways_to_use, write_card
    from safetrain.watch.run_folder import read_run

    print_text(ways_to_use(folder, kind, model).rstrip())
    if folder.resolve() == Path.cwd():
        return
    if (folder / CARD).exists():
        print_text(f"{folder / CARD} is kept as it is")
        return
    try:
        remarks = write_card(folder, job.adapter, job.base, read_run())
        print_text("\n  ".join([f"Wrote the model card {folder / CARD}; read it before you share it.", *remarks]))
    except SafetrainError as error:  # the model is complete without a card
        print_text(f"no model card: {error}")


def push(
    hub_id: Annotated[str, Argument(help="OWNER/NAME on the Hub; made if it does not exist")],
    folder: Annotated[Path, Option(help="folder to send, e.g. from fuse")] = paths.ADAPTERS,
    adapter: Annotated[Path | None, Option(help="adapter that the folder was made from; default: the run's")] = None,
    public: Annotated[bool, Option("--public", help="everybody may read a new repository")] = False,
    yes: Annotated[bool, Option("--yes", help="do not ask")] = False,
) -> None:
    """Send the adapter, or another folder, to the Hugging Face Hub, with its model card.

    The command first shows what it would send, and asks. A new repository is private.
    """
    from typer import confirm

    from safetrain.plan import hub
    from safetrain.watch.result import with_card
    from safetrain.watch.run_folder import read_run

    with tempfile.TemporaryDirectory() as scratch:
        folder = with_card(folder, Path(scratch) / hub_id.rpartition("/")[2], read_run(), adapter)
        sizes = {file: file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}
        for file, size in sizes.items():
            print_text(f"  {size_text(size):>10}  {file.relative_to(folder)}")
        what = f"{counted(len(sizes), 'file')} ({size_text(sum(sizes.values()))})"

        def ask(where: str) -> None:
            if not yes:
                confirm(f"Send {what} to {where}?", abort=True)

        print_text(f"Sent {what}: {hub.push(hub_id, folder, private=not public, ask=ask)}")


@export.command("peft")
def export_peft(
    out: OutFolder,
    base_name: Annotated[str | None, Option(help="Hub ID or folder of the float model for PEFT")] = None,
    adapter: AdapterFolder = paths.ADAPTERS,
    model: BaseFolder = None,
) -> None:
    """Write the adapter (LoRA or DoRA) in PEFT format, for PyTorch.

    The written adapter is compared with the tuned model on validation rows.
    """
    from safetrain.core.model.files import hub_id_of, read_model_files
    from safetrain.watch.progress import still_working

    job = _export_job(out, adapter, model)
    from safetrain.export.peft import export_peft

    name = base_name or hub_id_of(job.base) or str(job.base)
    with still_working(f"writing and measuring {out}"):
        report = export_peft(job, name, print_text)
    bits = read_model_files(job.base).quantization_bits
    share = report.written.same_answers if report.written is not None else 0.0
    same = f"the same answer on {round(share * report.rows)} of {report.rows} rows"
    measured_on = f", with the {bits}-bit base dequantized" if bits is not None else ""
    print_text(f"{out} is written. Loaded again, it gives {same}{measured_on}.")
    if bits is not None and base_name is None:
        print_text(f"PEFT cannot open the base {name}, a quantized MLX model. Name the float model: --base-name NAME")
    else:
        print_text(f'Use it: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{name}"), "{out}")')


@export.command("gguf")
def export_gguf(
    out: Annotated[Path, Argument(help="file to write, NAME.gguf; must not exist yet")],
    fused: Annotated[bool, Option("--fused", help="one file with the adapter merged in, e.g. for LM Studio")] = False,
    kind: Annotated[
        GgufType | None, Option("--type", help="type of the one file; default: q8_0; K types need llama-quantize")
    ] = None,
    may_lose: MayLose = 2.0,
    adapter: AdapterFolder = paths.ADAPTERS,
    model: BaseFolder = None,
) -> None:
    """Write the base and the adapter as GGUF files for llama.cpp and Ollama, without rounding.

    --fused or --type writes one file instead, and compares it with the tuned model on validation rows. A file that
    loses too much is refused.
    """
    from safetrain.watch.progress import still_working

    if out.suffix != ".gguf":
        raise ConfigError(
            "The file's name does not end with .gguf.", where=out, do=f"name it {out.with_suffix('.gguf')}"
        )
    if out.name.endswith(GGUF_ADAPTER):
        raise ConfigError(f"Names with {GGUF_ADAPTER} are those of adapters.", where=out, do="choose another name")
    job = _export_job(out, adapter, model, may_lose)
    from safetrain.export.gguf_export import export_gguf

    with still_working(f"writing {out}"):
        report = export_gguf(job, (kind or GgufType.Q8_0).value if fused or kind else None, print_text)
    what = f"{report.type}, keeps {100 * report.kept:.1f} % of the improvement" if report.rows else report.type
    print_text(f"{out}{'' if report.rows else ' and its adapter'}: {size_text(report.size_bytes)}, {what}")
    _write_card(out.parent, job, "gguf", out)


def _export_job(
    out: Path, adapter: Path, model: Path | None, may_lose: float = 2.0, *, refits: bool = False
) -> "ExportJob":
    """Gather what an export needs, and load the BLAS for mlx. ``may_lose`` is in percent."""
    from safetrain.core.data.training_rows import load_sample
    from safetrain.core.records.adapter_files import base_of
    from safetrain.core.records.metrics import TrainingSummary
    from safetrain.engine.cpu.blas import load_fast_blas

    base, run = model or base_of(adapter), read_result(paths.SUMMARY, TrainingSummary)
    rows = load_sample("valid", base, run.max_seq_length)
    fit = load_sample("train", base, run.max_seq_length, FIT_TOKENS) if refits else None
    load_fast_blas()  # before anything imports mlx
    from safetrain.export.comparison import ExportJob

    return ExportJob(
        base, adapter, out, rows, run.most_tokens, run.mlx_limit_bytes, may_lose / 100, run.compute_dtype, fit
    )
