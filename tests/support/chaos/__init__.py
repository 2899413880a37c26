"""Ends trainings in ways that tests and benchmarks stage, and looks at what is said and at what the next start does."""
