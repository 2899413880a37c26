"""Ends trainings in every way that can be staged, and looks at what was said of it and at what the next start makes."""
