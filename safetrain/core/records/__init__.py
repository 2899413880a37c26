"""Settings and results: what is configured, asked for, recommended, measured."""
