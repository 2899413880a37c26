"""The errors that users see, and their exit codes. A message has the parts what, where, expected, got and do."""

from pathlib import Path


class SafetrainError(Exception):
    """Base of every error that is reported without a traceback. The process ends with ``exit_code``."""

    exit_code = 1

    def __init__(
        self, what: str, *, where: Path | str = "", expected: str = "", got: str = "", do: str = "", exit_code: int = 0
    ) -> None:
        self.what, self.where, self.expected, self.got, self.do = what, str(where), expected, got, do
        self.exit_code = exit_code or self.exit_code
        parts = [what]
        for label, text in (("where", self.where), ("expected", expected), ("got", got), ("do", do)):
            if text:
                parts.append(f"  {label + ':':<10}{text}")
        super().__init__("\n".join(parts))


class ConfigError(SafetrainError):
    """An invalid key, type or value in params.yaml, an overlay or an override."""

    exit_code = 2


def broken_yaml(error: Exception) -> ConfigError:
    """Make the error for a configuration file that is not YAML; PyYAML's ``error`` knows the line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    name = Path(mark.name).name if mark is not None else "params.yaml"
    where = f"{name}:{mark.line + 1}" if mark is not None else name
    do = "check the brackets, quotes and indentation of this line and the one above"
    return ConfigError(f"{name} is not valid YAML.", where=where, got=problem, do=do)


class DataError(SafetrainError):
    """The training data is missing, malformed, or not trainable."""

    exit_code = 3


class ModelError(SafetrainError):
    """The base model or an adapter is missing, incomplete or damaged."""

    exit_code = 4


class MachineError(SafetrainError):
    """The machine cannot run this: a critical check failed, or the configuration does not fit."""

    exit_code = 5


class AlreadyRunningError(SafetrainError):
    """Another training run uses this device."""

    exit_code = 6


class TrainingError(SafetrainError):
    """Training stopped: an update went wrong, memory ran out, or an unfinished run does not match this one."""

    exit_code = 7


class BadUpdateError(TrainingError):
    """The loss or gradient of an update is not a number, or the loss jumped."""


class EngineError(TrainingError):
    """mlx failed: out of memory, or a fault of the device."""


class DiskError(SafetrainError):
    """The system could not read or write a file."""

    exit_code = 8


class DiskFullError(DiskError):
    """The disk had no space for a file."""


# The remedy for a full disk, where a checkpoint may exist
FREE_AND_CONTINUE = "free some space and run the same command: it continues from the newest checkpoint, which is intact"


class RunDied(SafetrainError):
    """The training process was killed or hung; the verdict says why. ``exit_code``: 128 + signal, or 124 if hung."""


class InterruptedRun(SafetrainError):
    """A signal ended the run after its state was saved. ``exit_code`` is 128 plus the signal, never 0."""

    def __init__(self, signal_number: int, what: str, **details: str) -> None:
        super().__init__(what, **details, exit_code=128 + signal_number)
