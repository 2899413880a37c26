"""The templates: fetched with pip, dequantized, never committed."""

import ast
import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

TRL, LLAMA = "trl==1.16.0", "llama-cpp-python==0.3.36"
TRAINING = "_training"  # ends the names of TRL's own versions of published templates
TESTS = "test-chat-template.cpp"
NOT_PUBLISHED = ("(tool call)", "Seed-OSS-36B")  # made for a test of llama.cpp
IN_CPP = re.compile(
    r'/\* \.name= \*/ "(?P<name>[^"]*)",\s*/\* \.template_str=? ?\*/ ?(?:U8C\()?"(?P<text>.*?)"\)?,\n', re.DOTALL
)


@dataclass(frozen=True)
class Published:
    """A chat template as it was published, under every name it has there."""

    names: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


def published(folder: Path) -> list[Published]:
    """Every template of the two packages, one of a text; the packages are fetched into ``folder`` if need be."""
    fetch(folder)
    found = _in_files(folder / "trl", "trl") | _in_files(folder / "llama", "llama.cpp") | _in_tests(folder / "llama")
    names: dict[str, list[str]] = {}
    for name, text in found.items():
        if not name.endswith(TRAINING):
            names.setdefault(text, []).append(name)
    return [Published(tuple(known), text) for text, known in sorted(names.items(), key=lambda pair: pair[1][0].lower())]


def digest(templates: list[Published]) -> str:
    """What identifies the material of a result."""
    texts = sorted(template.text for template in templates)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def fetch(folder: Path) -> None:
    """Bring both packages here, unless they are."""
    if not any((folder / "trl").glob("*.jinja")):
        wheel = _download(folder, TRL, "trl-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith("trl/chat_templates/") and name.endswith(".jinja"):
                    _keep(folder / "trl", name, archive.read(name))
        wheel.unlink()
    if not (folder / "llama" / TESTS).exists():
        source = _download(folder, LLAMA, "llama_cpp_python-*.tar.gz", "--no-binary", "llama-cpp-python")
        with tarfile.open(source) as tar:
            for member in tar:
                if re.search(r"/models/templates/[^/]+\.jinja$|/tests/test-chat-template\.cpp$", member.name):
                    file = tar.extractfile(member)
                    _keep(folder / "llama", member.name, file.read() if file else b"")
        source.unlink()


def _download(folder: Path, package: str, pattern: str, *options: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", *options]
        subprocess.run([*command, "--dest", str(folder), package], check=True)
    return next(folder.glob(pattern))


def _keep(folder: Path, name: str, content: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / Path(name).name).write_bytes(content)


def _in_files(folder: Path, package: str) -> dict[str, str]:
    return {f"{package}/{file.stem}": file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}


def _in_tests(folder: Path) -> dict[str, str]:
    """The templates that llama.cpp tests its own renderer with; they stand there as C++ literals."""
    source = (folder / TESTS).read_text(encoding="utf-8")
    found = {match["name"]: ast.literal_eval(f'"{match["text"]}"') for match in IN_CPP.finditer(source)}
    return {
        f"llama.cpp-tests/{name.split(' (')[0]}{' v' + version[1] if (version := _VERSION.search(name)) else ''}": text
        for name, text in found.items()
        if not any(word in name for word in NOT_PUBLISHED)
    }


_VERSION = re.compile(r"'(?:v)([^']+)'")
