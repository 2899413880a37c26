"""In which type a training computes: what a person says, else the faster one where the machine was asked.

None stands for the type that the base is stored in.
"""

from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import Machine
from safetrain.core.records.schema import Train


def compute_dtype_of(train: Train, machine: Machine, model: ModelFiles) -> str | None:
    """The pin, or what suits machine and base."""
    return train.compute_dtype or usual_dtype(machine, model, dequantized=bool(train.dequantize_base))


def usual_dtype(machine: Machine, model: ModelFiles, *, dequantized: bool = False) -> str | None:
    """float32 for a base in bfloat16 on a machine that was found to be slower in that; no other base is cast.

    ``dequantized``: a quantized base is not multiplied as one (train.dequantize_base).
    """
    if not model.in_bfloat16:
        return None
    plain = dequantized or model.quantization_bits is None
    return machine.compute_dtype if plain else machine.quantized_compute_dtype


def why_compute_dtype(train: Train, machine: Machine, model: ModelFiles) -> str:
    """The reason, in words."""
    if train.compute_dtype is not None:
        return "set by you"
    if machine.backend == "cpu":
        return "a CPU computes everything in float32, whatever the base is stored in"
    if compute_dtype_of(train, machine, model) is not None:
        return "this GPU emulates bfloat16, in which the base is stored; layers in float32 were measured to be faster"
    return "the type that the base is stored in: nothing is known to be faster here"
