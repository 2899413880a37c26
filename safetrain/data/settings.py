"""What decides how data is read: the section data of params.yaml, and the limits of the model."""

from dataclasses import dataclass
from typing import Any

from safetrain.core.records.schema import Data
from safetrain.data.findings import Severities
from safetrain.data.forms import Columns, checked_columns
from safetrain.data.render import USUAL_LABELLING, Labelling

USUAL_SIMILARITY = 0.8


@dataclass(frozen=True)
class Limits:
    """What the model can take. None: it does not say."""

    vocabulary: int | None
    max_positions: int | None


@dataclass(frozen=True)
class DataSettings:
    """What params.yaml decides of the data (section data), where there is one."""

    labelling: Labelling = USUAL_LABELLING
    severities: Severities = Severities()  # noqa: RUF009 frozen
    columns: Columns | None = None
    similarity: float = USUAL_SIMILARITY  # from which on two questions are near copies; 1: never
    valid_fraction: float = 0.1
    test_fraction: float = 0.1
    documents: bool = False  # for a training from scratch


USUAL_SETTINGS = DataSettings()


def settings_of(data: Data | Any, columns: Columns | None = None, *, documents: bool = False) -> DataSettings:
    """The settings in the section data of params.yaml; ``columns`` go before its own. Raises ConfigError."""
    return DataSettings(
        labelling=Labelling(data.append_end, data.train_empty_thinking, data.opening),
        severities=Severities(tuple(data.downgrade or ()), tuple(data.upgrade or ())),
        columns=columns or checked_columns(data.columns),
        similarity=data.near_duplicate_similarity,
        valid_fraction=data.valid_fraction,
        test_fraction=data.test_fraction,
        documents=documents,
    )
