"""How long a phase of the training process may take before it counts as hung, for who ends it and who looks on."""

from safetrain.core.protocol.flight import Edge, FlightRecord, Phase

TIMES_THE_LONGEST = 10.0  # slow paths of mlx, other programs and a hot laptop cost far less
FIRST_TIME = 15.0  # times the floor, for a phase's first time: loading, compiling, the first evaluation
UNBOUNDED = (Phase.WAIT,)  # it has its own time limit


def allowed_seconds(last: FlightRecord | None, floor_seconds: float, longest_seconds: float | None) -> float | None:
    """How long after ``last`` the next record may come, None for ever.

    ``longest_seconds``: what the same phase has taken before, None on its first time.
    """
    if last is not None and last.phase in UNBOUNDED and last.edge is Edge.BEFORE:
        return None
    if longest_seconds is None:
        return FIRST_TIME * floor_seconds
    return max(floor_seconds, TIMES_THE_LONGEST * longest_seconds)
