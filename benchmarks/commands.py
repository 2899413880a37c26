"""What every command prints, on success and on its usual mistake, in a project that is made for it.

python -m benchmarks.commands    writes benchmarks/results/commands.md, in some minutes
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "commands.md"
PROGRAM = Path(__file__).resolve().parent.parent
STEPS = 40
# One command after the other in one project: what works, then its mistake. ``< TEXT`` is its input.
LINES = (
    "--help", "trian", "init . --example", "init .", "update",
    "info models/encyclopedia-3m", "info models/encyclopedia-3", "validate data/example/test.jsonl",
    "validate data/example/tset.jsonl", "preflight", "estimate models/encyclopedia-3m",
    "estimate models/encyclopedia-3m --machine m9", "selftest", "fetch Qwen2.5",
    "convert models/encyclopedia-3m models/small", "convert models/encyclopedia-3m models/small --bits 7",
    "run data.path=data/exmaple", "run", "run train.learning_rat=1", "run train.seed=x", "run train.seed=7",
    "set train.seed=x", "runs", "runs --back seed-7", "monitor", "monitor --output checkpoints_qlorra",
    "result", "result --gate", "report",
    "track",
    'ask "What is the capital of Portugal?"', 'ask ""',
    "chat --compare < /help\n/exit", "chat --adapter nowhere", "fuse fused", "fuse fused",
    "export peft peft", "export gguf tuned", "push mine", "diagnose", "discard",
    "run train.max_steps=9000 ^C after 60 s", "diagnose", "discard",
)  # fmt: skip


def main() -> None:
    """Run all of them and write the page."""
    parts = ["# What every command prints", "Written by `python -m benchmarks.commands`, with 80 columns."]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve() / "project"
        folder.mkdir()
        for line in LINES:
            print(line, flush=True)
            parts.append(printed_by(line, folder))
            if line.startswith("init . --example"):
                params = folder / "params.yaml"
                params.write_text(params.read_text().replace("max_steps: null", f"max_steps: {STEPS}"))
            if line == "run":
                for words in (("add", "-A"), ("commit", "-qm", "trained")):  # a result in Git
                    subprocess.run(["git", *words], cwd=folder, env=environment(folder), check=False)
    RESULT.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def printed_by(line: str, folder: Path) -> str:
    """The command with its output and exit code, without the places of this machine."""
    words, _, typed = line.partition(" < ")
    words, _, interrupted = words.partition(" ^C ")
    limit = ["timeout", "-s", "INT", "60"] if interrupted else []
    done = subprocess.run(
        [*limit, sys.executable, "-m", "safetrain.cli", *shlex.split(words)], cwd=folder, env=environment(folder),
        input=typed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    text = done.stdout.replace(str(folder), "PROJECT").replace(str(folder.parent), "ELSEWHERE")
    text = text.replace(sys.prefix, "PYTHON").replace(str(PROGRAM), "PROGRAM").replace(str(Path.home()), "HOME")
    lines = [each.rstrip() for each in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text).strip("\n").splitlines()]
    code = [f"exit code {done.returncode}"] if done.returncode else []
    return "\n".join([f"## safetrain {line}".replace("\n", " ⏎ "), "", "```text", *lines, *code, "```"])


def environment(folder: Path) -> dict[str, str]:
    """Of this process, with a cache, a lock and a home beside the project."""
    own = {"SAFETRAIN_CACHE_DIR": "cache", "SAFETRAIN_LOCK_DIR": "lock", "HOME": "home"}
    names = ("AUTHOR_NAME", "AUTHOR_EMAIL", "COMMITTER_NAME", "COMMITTER_EMAIL")
    places = {name: str(folder.parent / place) for name, place in own.items()}
    return os.environ | places | {f"GIT_{name}": "example" for name in names} | {"COLUMNS": "80"}


if __name__ == "__main__":
    main()
