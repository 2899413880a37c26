"""What tests and benchmarks share: random models, settings, projects to run, and the deaths and faults staged in them.

Nothing here is a test, and nothing here imports from ``benchmarks``.
"""
