"""A model by its headers and config.json: no weight is read, nothing of it is run."""
