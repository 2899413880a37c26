"""The places of files, and functions that write them whole or not at all."""
