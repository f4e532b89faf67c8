"""Reads settings: defaults, then one TOML file, then `--section.key value`."""
