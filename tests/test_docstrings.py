"""The examples of the reference: every public name has one, and it prints what it says."""

import doctest
import importlib
import inspect
import math
import os
import tempfile
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

MODULES = [
    "deltanet_jax",
    "deltanet_jax.convert",
    "deltanet_jax.layers",
    "deltanet_jax.models",
    "deltanet_jax.models.checkpoint",
    "deltanet_jax.models.sharding",
    "deltanet_jax.models.training",
    "deltanet_jax.parallel.context",
]
# Data that others' examples use, and `DeltaNet` under the names of its forms.
WITHOUT = {"AssociativeDeltaNet", "ChunkwiseDeltaNet", "DeltaNetCache", "RecurrentDeltaNet"}
WITHOUT |= {"Request"}
# What docs/api.md tells its readers to import.
IMPORTED = {"jax": jax, "jnp": jnp, "np": np, "nnx": nnx}
IMPORTED |= {"math": math, "os": os, "partial": partial, "tempfile": tempfile}


def public() -> dict[str, object]:
    """Everything that can be called, by its name."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        found |= {f"{name}.{public}": getattr(module, public) for public in module.__all__}
    return {name: value for name, value in found.items() if callable(value)}


PUBLIC = public()
NAMES = {name.rpartition(".")[2]: value for name, value in PUBLIC.items() if "parallel" not in name}


@pytest.mark.parametrize("name", sorted(n for n in PUBLIC if n.rpartition(".")[2] not in WITHOUT))
def test_the_example_of_a_public_name_holds(name):
    thing = inspect.unwrap(PUBLIC[name])
    where = {**IMPORTED, **NAMES, name.rpartition(".")[2]: PUBLIC[name]}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(thing), where, name, None, 0)
    assert example.examples, f"{name} has no `Example:`"
    check(example)


def test_the_example_of_the_surface_for_implementers_holds():
    module = importlib.import_module("deltanet_jax.extend")
    where = {**IMPORTED, **{name: getattr(module, name) for name in module.__all__}}
    check(doctest.DocTestParser().get_doctest(module.__doc__, where, module.__name__, None, 0))


def check(example: doctest.DocTest) -> None:
    """Run an example and compare what it prints."""
    report = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert result.failed == 0, "".join(report)
