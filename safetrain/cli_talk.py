"""The commands of `safetrain` that talk with a model: ask, chat, serve."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import EMPTY_ANSWER, print_text
from safetrain.core.storage import paths

if TYPE_CHECKING:
    from safetrain.core.data.tokenizer import ChatTokenizer, Messages, Prompts

AdapterOption = Annotated[Path, Option(help="adapter folder")]
ModelOption = Annotated[Path | None, Option(help="base model folder; default: the adapter's own")]
BaseOption = Annotated[bool, Option("--base", help="without the adapter, e.g. for a fused model (--model)")]
SystemOption = Annotated[str | None, Option(help="system prompt ('': none); default: as in training")]


@dataclass(frozen=True)
class TalkOptions:
    """The model that a command talks to. ``adapter``: None for the base; ``context``: tokens, or None."""

    folder: Path
    adapter: Path | None
    tokenizer: "ChatTokenizer"
    prompts: "Prompts"
    system: str
    context: int | None


def _asked(model: Path | None, adapter: Path, system: str | None, *, base: bool) -> TalkOptions:
    """Read everything but the weights, so that mistakes are found at once; raises SafetrainError."""
    from safetrain.core.data.tokenizer import ChatTokenizer, Prompts
    from safetrain.core.model.files import read_model_files
    from safetrain.core.records.adapter_files import base_of, read_prompt_format, require_base, require_weights

    if not base:
        require_weights(adapter)
    folder = model or base_of(adapter)
    files = read_model_files(folder)
    if not base:
        require_base(adapter, folder, files.fingerprint)
    tokenizer = ChatTokenizer(folder)
    prompts = Prompts(tokenizer, read_prompt_format(folder if base else adapter))
    if system and not prompts.writes_system(system):
        raise ConfigError("This model's chat template has no system prompt.", where=str(folder), do="without it")
    chosen = prompts.system if system is None else system
    return TalkOptions(folder, None if base else adapter, tokenizer, prompts, chosen, files.max_positions)


def ask(
    question: str,
    base: Annotated[bool, Option("--base", help="also show what the base model answers")] = False,
    adapter: AdapterOption = paths.ADAPTERS,
    model: ModelOption = None,
    max_new_tokens: Annotated[int, Option(min=1, help="longest answer")] = 256,
) -> None:
    """Ask the tuned model a question.

    Prompts are as in training, with the system prompt shared by all training rows. A model trained only on documents
    continues the text.
    """
    from safetrain.core.run_folder import read_run
    from safetrain.engine.cpu.blas import load_fast_blas
    from safetrain.watch.result import unmeasured

    if not question.strip():
        raise ConfigError("The question is empty.", do='safetrain ask "What is the capital of Portugal?"')
    asked = _asked(model, adapter, None, base=False)
    prompt = asked.prompts.ids(asked.prompts.with_system([{"role": "user", "content": question}], asked.system))
    remark = unmeasured(read_run()) if adapter == paths.ADAPTERS else ""
    if remark:
        print_text(remark, sys.stderr)
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.evaluation import answer
    from safetrain.engine.upstream.conversation import open_tuned
    from safetrain.engine.weight_files import apply_adapter

    opened = open_tuned(asked.folder, None)
    for label in ("base:  ", "tuned: ") if base else ("",):
        if label != "base:  ":
            apply_adapter(opened, adapter)
        text = asked.tokenizer.decode(answer(opened, [prompt], asked.prompts.stop_ids, max_new_tokens, 1)[0])
        print_text(label + (question + text if asked.prompts.continues else text.strip() or EMPTY_ANSWER))


def chat(
    base: BaseOption = False,
    compare: Annotated[bool, Option("--compare", help="answers from base and tuned")] = False,
    adapter: AdapterOption = paths.ADAPTERS,
    model: ModelOption = None,
    system: SystemOption = None,
    max_new_tokens: Annotated[int, Option(min=1, help="longest answer")] = 256,
    temperature: Annotated[float, Option(min=0.0, help="sampling temperature; 0: greedy")] = 0.0,
    top_p: Annotated[float, Option(min=0.01, max=1.0, help="total probability of the sampled tokens")] = 1.0,
    seed: Annotated[int | None, Option(min=0, help="seed, to repeat a chat at a temperature above 0")] = None,
) -> None:
    """Talk with the tuned model; --compare adds the base model.

    Ctrl-C stops an answer, Ctrl-D ends the chat; /system TEXT, /reset, /help, /exit. In a pipe each line is a question,
    and stdout has only answers.
    """
    from safetrain.engine.cpu.blas import load_fast_blas

    if base and compare:
        raise ConfigError("Use either --base or --compare.", do="--compare shows the base beside the tuned model")
    asked = _asked(model, adapter, system, base=base)
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.upstream.conversation import Conversation, open_both, open_tuned
    from safetrain.watch.chat import HELP, Chat, Side, say

    sampling = max_new_tokens, temperature, top_p, seed
    opened = open_both(asked.folder, adapter) if compare else (open_tuned(asked.folder, asked.adapter),)
    sides = [
        Side(label, Conversation(each, asked.prompts.stop_ids, asked.context, *sampling))
        for label, each in zip(("base", "tuned") if compare else ("",), opened, strict=True)
    ]
    if sys.stdin.isatty():
        say(HELP)
    if system is None and asked.system:
        say(f"system prompt shared by all training rows: {asked.system}")
    if asked.prompts.continues:
        say("this model was not trained on chats, so it continues each line as a separate text")
    Chat(asked.tokenizer, asked.prompts, sides, asked.system, asked.context).run()


def serve(
    base: BaseOption = False,
    adapter: AdapterOption = paths.ADAPTERS,
    model: ModelOption = None,
    system: SystemOption = None,
    host: Annotated[str, Option(help="0.0.0.0: open to the network, without a password")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="port; 0: a free one")] = 8080,
    max_new_tokens: Annotated[int, Option(min=1, help="longest answer, in tokens; a request may set it")] = 512,
) -> None:
    """Serve the tuned model to any OpenAI client.

    Runs mlx-lm's server; Ctrl-C ends it. The tuned model answers, whatever name a request has for it; greedily unless
    the request sets a temperature. A chat without a system prompt gets the one shared by all training rows.
    """
    from safetrain.engine.cpu.blas import load_fast_blas

    asked = _asked(model, adapter, system, base=base)
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.upstream.serving import ServeJob, serve_model

    def ids_of(messages: "Messages", tools: Sequence[Any] | None, settings: Mapping[str, Any]) -> list[int]:
        prompts, most = asked.prompts, asked.context
        ids = prompts.ids(prompts.with_system(messages, asked.system), tools, settings)
        if most is not None and len(ids) >= most:
            raise ConfigError(f"The prompt has {len(ids)} tokens.", expected=f"fewer than {most}, the model's context")
        return ids

    name = f"{asked.folder.resolve().name}{'' if asked.adapter is None else '-tuned'}"
    if asked.system:
        print_text(f"system prompt of chats that have none: {asked.system}")
    job = ServeJob(name, asked.folder, asked.adapter, asked.prompts.stop_ids, ids_of, max_new_tokens, host, port)
    serve_model(job, print_text)
