"""`python -m safetrain.watch.trackers NAME`: an export apart from the stage that asks for it."""

import sys

from safetrain.core.errors import SafetrainError
from safetrain.watch.trackers.export import describe, export
from safetrain.watch.trackers.sent import Target


def main() -> None:
    """Export once; exit 1 with a message where that fails."""
    target = Target(sys.argv[1])
    try:
        print(describe(target, export(target)))
    except (SafetrainError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
