"""safetrain fine-tunes language models: it checks before it trains, survives kills, and explains what happened."""

import sys

if sys.platform == "win32":
    sys.exit("safetrain runs on macOS and Linux. On Windows, install it inside WSL (learn.microsoft.com/windows/wsl).")
