"""The six stages. Each reads its configuration, calls the library and writes its records."""

import importlib.util
import sys

if importlib.util.find_spec("hydra") is None:
    sys.exit(
        f"safetrain is not installed for this Python ({sys.executable}).\n"
        "  do:       run 'make' once, then 'source .venv/bin/activate' in this terminal"
    )
