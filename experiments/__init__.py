"""Experiments on the operators and layers: `python -m experiments --help`."""
