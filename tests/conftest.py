"""Set up JAX for the tests: CPU with eight devices, and shapes checked at run time."""

import importlib.metadata
import importlib.util
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Almost all of a test's time is compilation. These settings compile the same graphs several
# times faster, into slower programs; the smoke tests run in CI with XLA's own settings as well.
given = os.environ.get("XLA_FLAGS", "")
flags = {"xla_force_host_platform_device_count": "8"}
if os.environ["JAX_PLATFORMS"] == "cpu" and "xla_backend_optimization_level" not in given:
    flags["xla_backend_optimization_level"] = "0"
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know it
        flags["xla_cpu_use_fusion_emitters"] = "false"
added = [f"--{name}={value}" for name, value in flags.items() if name not in given]
os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()

# The mathematics is checked against its shape annotations. The public functions check their
# callers themselves, with errors that the tests expect, and a `Problem` may hold abstract arrays.
from jaxtyping import install_import_hook

CHECKED = ["affine", "chunk", "decay", "reference", "wy"]

with install_import_hook([f"deltanet_jax.core.{name}" for name in CHECKED], "beartype.beartype"):
    import deltanet_jax  # noqa: F401

import jax
import matplotlib as mpl
import pytest
from hypothesis import settings

mpl.use("Agg")
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=20)
settings.load_profile("repeatable")

HARDWARE = {"gpu": "an NVIDIA GPU (JAX_PLATFORMS=cuda,cpu)", "tpu": "a TPU (JAX_PLATFORMS=tpu,cpu)"}


# Its packages live in an environment of their own: `make test-parity`.
collect_ignore = [] if importlib.util.find_spec("fla") else ["parity"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs hardware that is not here, and say so."""
    platform = jax.default_backend()
    for item in items:
        for marker, what in HARDWARE.items():
            if item.get_closest_marker(marker) and platform != marker:
                item.add_marker(pytest.mark.skip(reason=f"needs {what}; this is a {platform}"))
