"""Ends trainings in every way that can be staged, with what tests/support/chaos has and tests have no use for."""
