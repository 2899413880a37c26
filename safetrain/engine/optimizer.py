"""Builds the optimizer that the settings name, from mlx's own."""

import mlx.optimizers as optim

from safetrain.core.errors import ConfigError

MOMENTUM = 0.9  # of plain descent


def build_optimizer(name: str, weight_decay: float) -> optim.Optimizer:
    """``name`` is one of the schema's; the learning rate is set before each update.

    Raises ConfigError for weight decay with Adam, which has none: adamw is that.
    """
    if name == "adam":
        if weight_decay:
            raise ConfigError("Adam has no weight decay.", got=f"{weight_decay:g}", do="train.optimizer=adamw")
        return optim.Adam(0.0, bias_correction=True)
    if name == "adamw":
        return optim.AdamW(0.0, weight_decay=weight_decay, bias_correction=True)
    if name == "adafactor":
        return optim.Adafactor(0.0, weight_decay=weight_decay, scale_parameter=False, relative_step=False)
    if name == "muon":
        return optim.Muon(0.0, weight_decay=weight_decay)
    return optim.SGD(0.0, momentum=MOMENTUM, weight_decay=weight_decay)
