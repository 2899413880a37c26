"""Where files are, and how they are written whole or not at all."""
