"""Describes a model by its headers and config.json, without reading weights or running its code."""
