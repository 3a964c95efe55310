"""Configuration files: read, overridden, resolved, and turned into an algorithm.

A file names a preset and its keywords; the preset's signature is the schema. Whatever is left out gets its default,
so a resolved configuration says all that decides a run. Must not know how a run is made.
"""

from sparseloco.config.entries import Entry, load_entries
from sparseloco.config.file import load_config, parse_config
from sparseloco.config.method import algorithm_to_toml, build_algorithm, keywords_of
from sparseloco.settings import RunConfig, to_toml

__all__ = [
    "Entry",
    "RunConfig",
    "algorithm_to_toml",
    "build_algorithm",
    "keywords_of",
    "load_config",
    "load_entries",
    "parse_config",
    "to_toml",
]
