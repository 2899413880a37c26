"""Commands of `safetrain` that talk with a model: ask and chat."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from safetrain.cli_models import AdapterFolder, BaseFolder
from safetrain.core.errors import ConfigError, DataError
from safetrain.core.formatting import EMPTY_ANSWER, print_text, printable, size_text
from safetrain.core.params_file import PARAMS
from safetrain.core.records.schema import CHECKER, TEXT, TOOLS, Evaluate
from safetrain.core.storage import paths

if TYPE_CHECKING:
    from safetrain.core.records.evaluation import Evaluation
    from safetrain.core.text.tokenizer import ChatTokenizer
    from safetrain.engine.model import BaseModel
    from safetrain.watch.chat import Prompts


@dataclass(frozen=True)
class TalkOptions:
    """The model that a command talks to. ``adapter`` is None for the base, ``context`` (tokens) if unknown."""

    folder: Path
    adapter: Path | None
    tokenizer: "ChatTokenizer"
    prompts: "Prompts"
    system: str
    context: int | None
    stream: bool  # the weights stay on disk


def _asked(model: Path | None, adapter: Path, system: str | None, *, base: bool) -> TalkOptions:
    """Read everything except the weights, so that mistakes are found at once, and load the BLAS for mlx.

    Raises SafetrainError.
    """
    from safetrain.core.memory.system import host_room_bytes, read_memory
    from safetrain.core.model.files import read_model_files
    from safetrain.core.records.adapter_files import base_of, read_prompt_format, require_base
    from safetrain.core.results import adapter_to_use
    from safetrain.core.text.tokenizer import ChatTokenizer
    from safetrain.engine.cpu.blas import load_fast_blas
    from safetrain.watch.chat import Prompts
    from safetrain.watch.result import unmeasured
    from safetrain.watch.run_folder import read_run

    remark = unmeasured(read_run()) if adapter == paths.ADAPTERS and not base else ""
    adapter = adapter_to_use(adapter)
    folder = model or base_of(adapter)
    files = read_model_files(folder)
    if not base:
        require_base(adapter, folder, files.fingerprint)
    if remark:
        print_text(remark, sys.stderr)
    tokenizer = ChatTokenizer(folder)
    prompts = Prompts(tokenizer, read_prompt_format(folder if base else adapter))
    if system and not prompts.writes_system(system):
        raise ConfigError("The chat template has no system prompt.", where=folder, do="leave out --system")
    chosen = prompts.system if system is None else system
    room = host_room_bytes(read_memory())
    stream = files.static_bytes > room
    if stream:
        print_text(
            f"The model ({size_text(files.static_bytes)}) does not fit into the available memory ({size_text(room)}), "
            "so its weights stay on disk and are read once for each token of an answer.", sys.stderr,
        )  # fmt: skip
    load_fast_blas()  # before anything imports mlx
    return TalkOptions(folder, None if base else adapter, tokenizer, prompts, chosen, files.max_positions, stream)


def ask(
    question: str,
    base: Annotated[bool, Option("--base", help="also show what the base model answers")] = False,
    adapter: AdapterFolder = paths.ADAPTERS,
    model: BaseFolder = None,
    max_new_tokens: Annotated[int, Option(min=1, help="longest answer, in tokens")] = 256,
    samples: Annotated[int | None, Option(min=1, help="give N answers, drawn at temperature 1, seed 0")] = None,
    option: Annotated[list[str] | None, Option(help="an answer to choose from; give it twice or more")] = None,
    jsonl: Annotated[bool, Option("--jsonl", help="the question is a file of rows: print them with answers")] = False,
) -> None:
    """Ask the tuned model a question.

    Prompts are built as in training, with the system prompt if all training rows share one. A model trained only on
    documents continues the text. A model that was judged by its choices gives each option with its probability.

    With --jsonl, QUESTION is a file of rows, each with a prompt; answers that reach --max-new-tokens are left out. Rows
    that have an expected answer, or all with evaluate.checker, get scores.
    """
    if not question.strip():
        raise ConfigError("The question is empty.", do='safetrain ask "What is the capital of Portugal?"')
    if base and jsonl:
        raise ConfigError("--base cannot be combined with --jsonl.", do="leave --base out")
    rows = list(_prompts_in(Path(question))) if jsonl else [{"prompt": question, "options": option}]
    asked = _asked(model, adapter, None, base=False)
    evaluation = _evaluation_of(asked)
    rows = [_with_options(row, evaluation) for row in rows]
    prompts = [_prompt_of(row, asked) for row in rows]
    from safetrain.engine.weight_files import apply_adapter, open_tuned

    opened = open_tuned(asked.folder, None, stream=asked.stream)
    for label in ("base:  ", "tuned: ") if base else ("",):
        if label != "base:  " and asked.adapter is not None:
            apply_adapter(opened, asked.adapter)
        answer = _answerer(opened, asked, evaluation, max_new_tokens, samples)
        if jsonl:
            _print_rows(rows, prompts, answer, asked, evaluation)
        elif samples or rows[0].get("options"):
            print_text("\n".join(label + line for line in answer(rows[0], prompts[0]).lines(question)))
        else:
            _print_as_it_comes(label, question, prompts[0], opened, asked, max_new_tokens)


def _print_as_it_comes(
    label: str, question: str, prompt: list[int], opened: "BaseModel", asked: TalkOptions, most: int
) -> None:
    """Print an answer token by token, after the question if the model continues it."""
    from safetrain.engine.upstream.generation import Conversation
    from safetrain.watch.chat import AnswerText

    text = AnswerText(asked.tokenizer)
    text.text = question if asked.prompts.continues else ""
    print(label + printable(text.text), end="", flush=True)
    for token in Conversation(opened, asked.prompts.stop_ids, asked.context, most, 0.0).answer(prompt):
        print(printable(text.add(token)), end="", flush=True)
    print("" if text.text else EMPTY_ANSWER, flush=True)


@dataclass(frozen=True)
class Reply:
    """The answers to a prompt, or one with the probability of each option; ``ended``: which ones were not cut off."""

    answers: list[str]
    after_thinking: list[str]
    ended: list[bool]
    shares: dict[str, float]
    continues: bool = False  # the prompt's text

    def lines(self, prompt: str) -> list[str]:
        """What is printed: options, the likeliest first, or answers."""
        if self.shares:
            width, ordered = max(map(len, self.shares)), sorted(self.shares.items(), key=lambda pair: -pair[1])
            return [f"{name:<{width}}  {100 * share:5.1f} %" for name, share in ordered]
        return [prompt + text if self.continues else text.strip() or EMPTY_ANSWER for text in self.answers]


def _answerer(
    opened: "BaseModel", asked: TalkOptions, evaluation: "Evaluation | None", most: int, samples: int | None
) -> Callable[[dict[str, Any], list[int]], Reply]:
    """A function that answers a row's prompt, or weighs its options at the temperature fitted on validation rows."""
    from safetrain.engine.evaluation import option_logprobs
    from safetrain.engine.upstream.generation import Conversation
    from safetrain.evaluate.statistics import probabilities

    speaker = Conversation(opened, asked.prompts.stop_ids, asked.context, most, 1.0 if samples else 0.0, seed=0)
    choices, tokenizer = evaluation.choices if evaluation else None, asked.tokenizer
    before, after = choices.around if choices else ("", tokenizer.end_token)
    temperature = choices.calibration.temperature if choices else 1.0

    def answer(row: dict[str, Any], prompt: list[int]) -> Reply:
        if options := row.get("options"):
            ids = [tokenizer.continuation(prompt, before + option + after) for option in options]
            shares = probabilities(option_logprobs(opened, [prompt], [ids])[0], temperature).tolist()
            best = [options[shares.index(max(shares))]]
            return Reply(best, best, [True], dict(zip(options, shares, strict=True)))
        found = Reply([], [], [], {}, asked.prompts.continues)
        for _ in range(samples or 1):
            tokens = list(speaker.answer(prompt))
            found.answers.append(tokenizer.decode(tokens))
            found.after_thinking.append(tokenizer.decode(tokenizer.after_thinking(tokens) or ()))
            found.ended.append(speaker.ended == "stop")
        return found

    return answer


def _print_rows(
    rows: list[dict[str, Any]], prompts: list[list[int]], answer: Callable[[dict[str, Any], list[int]], Reply],
    asked: TalkOptions, evaluation: "Evaluation | None",
) -> None:  # fmt: skip
    """Print each row with its answers, as JSON lines, and with their scores if it has an expected answer."""
    with _scorer(asked, evaluation) as score:
        for row, prompt in zip(rows, prompts, strict=True):
            reply = answer(row, prompt)
            answers = [text.strip() for text, ended in zip(reply.answers, reply.ended, strict=True) if ended]
            judged = [text.strip() for text, ended in zip(reply.after_thinking, reply.ended, strict=True) if ended]
            scores = [found for text in judged if (found := score(row, text)) is not None]
            more = {"probabilities": reply.shares} if reply.shares else {}
            line = {**row, "answers": answers, **more, **({"scores": scores} if scores else {})}
            print(json.dumps(line, ensure_ascii=False), flush=True)


def _evaluation_of(asked: TalkOptions) -> "Evaluation | None":
    """The evaluation of the adapter; None if it was not evaluated."""
    from safetrain.core.records.adapter_files import fingerprint
    from safetrain.core.records.evaluation import Evaluation
    from safetrain.core.storage.files import read_or_none

    found = read_or_none(paths.EVALUATION, Evaluation)
    return found if found and asked.adapter and fingerprint(asked.adapter) in found.adapter else None


def _with_options(row: dict[str, Any], evaluation: "Evaluation | None") -> dict[str, Any]:
    """The row with its own options, written into its prompt as in training, or those of all training rows."""
    from safetrain.core.data.store import with_options
    from safetrain.data.rows import decoded, plain

    own = decoded(row.get("options") or row.get("choices"), "options")
    texts = [*dict.fromkeys(map(plain, own))] if isinstance(own, list) else []
    if own and (len(texts) < 2 or not all(texts)):
        do = 'name at least two, as in --option yes --option no, or "options": ["yes", "no"]'
        raise ConfigError("Options are different texts.", got=str(own)[:60], do=do)
    choices = evaluation.choices if evaluation else None
    are_shown, options = (True, texts) if texts or not choices else (choices.are_shown, list(choices.options))
    prompt = with_options(row["prompt"], options) if are_shown else row["prompt"]
    return {**row, "prompt": prompt, **({"options": options} if options else {})}


@contextmanager
def _scorer(
    asked: TalkOptions, evaluation: "Evaluation | None"
) -> Iterator[Callable[[dict[str, Any], str], float | None]]:
    """A function that scores an answer to a row as evaluate does; its result is None without an expected answer."""
    from safetrain.core.data.store import judged_turn
    from safetrain.data.forms import parse_row
    from safetrain.data.rows import RowError
    from safetrain.engine.upstream.tool_calls import ToolCalls
    from safetrain.evaluate.exam import Task, scorer_of
    from safetrain.stage import composed, to_pipeline

    nothing = Evaluate(max_examples=None, max_new_tokens=None, score=None, schema=None, checker=None)
    settings = to_pipeline(composed([])).evaluate if PARAMS.is_file() else nothing
    name = CHECKER if settings.checker else settings.score or (evaluation.scorer[0] if evaluation else TEXT)
    name = TEXT if name == TOOLS or (name == CHECKER and not settings.checker) else name  # a prompt has no tools
    with scorer_of(Task(name, ""), settings, ToolCalls(asked.folder)) as scorer:

        def score(row: dict[str, Any], text: str) -> float | None:
            try:
                own = parse_row(row).as_json()
            except RowError:  # without an answer, which only a checker does not need
                return scorer(row, "", text).score if name == CHECKER else None
            return scorer(own, str(judged_turn(own)["content"]).strip(), text).score

        yield score


def _prompt_of(row: dict[str, Any], asked: TalkOptions) -> list[int]:
    """The tokens of a prompt, after its row's system prompt or the usual one; raises DataError if it is too long."""
    messages = [{"role": "user", "content": row["prompt"]}]
    prompt = asked.prompts.ids(asked.prompts.with_system(messages, row.get("system") or asked.system))
    if asked.context is not None and len(prompt) >= asked.context:
        got, most = f"{len(prompt)} tokens: {row['prompt'][:60]}…", f"fewer than {asked.context} tokens"
        raise DataError("A question does not fit into the model's context.", expected=most, got=got, do="shorten it")
    return prompt


def _prompts_in(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a data file, each with a prompt; raises DataError."""
    from safetrain.data.files import rows_of

    if not file.is_file():
        do = "name a file of rows, such as JSONL or CSV, or leave --jsonl out"
        raise ConfigError("There is no such file.", where=file, do=do)
    for place, row in rows_of(file):
        if not (isinstance(row, dict) and isinstance(row.get("prompt"), str)):
            do = 'write rows such as {"prompt": "What is the capital of Portugal?"}'
            raise DataError("This is no row with a prompt.", where=place.of(str(file)), do=do)
        yield row


def chat(
    base: Annotated[bool, Option("--base", help="without the adapter, e.g. for a fused model (--model)")] = False,
    compare: Annotated[bool, Option("--compare", help="show base and tuned answers")] = False,
    adapter: AdapterFolder = paths.ADAPTERS,
    model: BaseFolder = None,
    system: Annotated[str | None, Option(help="system prompt ('': none); default: as in training")] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="longest answer, in tokens")] = 256,
    temperature: Annotated[float, Option(min=0.0, help="sampling temperature; 0: greedy")] = 0.0,
) -> None:
    """Talk with the tuned model; --compare adds the base model.

    Ctrl-C stops an answer, and Ctrl-D ends the chat. Its commands are /reset and /exit. In a pipe, each line is a
    question, and stdout has only answers.
    """
    if base and compare:
        raise ConfigError("Use either --base or --compare.", do="--compare shows both models, --base only the base")
    asked = _asked(model, adapter, system, base=base)
    from safetrain.engine.upstream.generation import Conversation
    from safetrain.engine.weight_files import open_both, open_tuned
    from safetrain.watch.chat import HELP, Chat, Side, say

    sampling = max_new_tokens, temperature
    folder, tuned, stream = asked.folder, asked.adapter, asked.stream
    if compare and tuned is not None:
        opened: tuple[BaseModel, ...] = open_both(folder, tuned, stream=stream)
    else:
        opened = (open_tuned(folder, tuned, stream=stream),)
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
