"""safetrain decides before it spends hours, trains exactly, survives anything, and shows what happened."""

import sys

if sys.platform == "win32":
    sys.exit("safetrain runs on macOS and Linux. On Windows, install it inside WSL (learn.microsoft.com/windows/wsl).")
