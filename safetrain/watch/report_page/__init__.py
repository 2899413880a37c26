"""One page about a run: what is read (run_records), what is shown (shown), and how it is written (rendering)."""
