"""Converts adapters and tuned models to the formats of other programs, and imports adapters."""
