"""Set up JAX for the tests: CPU with eight devices, and shapes checked at run time."""

import gc
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

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

# Compiled programs are kept for the next run, and for the processes that tests start.
CACHE = Path(__file__).parents[1] / ".cache" / "jax" / importlib.metadata.version("jaxlib")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")

# The mathematics is checked against its shape annotations. The public functions check their
# callers themselves, with errors that the tests expect, and a `Problem` may hold abstract arrays.
from jaxtyping import install_import_hook

CHECKED = ["affine", "chunk", "decay", "reference", "triangular"]

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

# Each compiled program takes a few regions of a process's memory. Linux gives a process 65530
# by default; a compiler that gets no more aborts.
MANY_REGIONS = 30_000
REGIONS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Give the memory of compiled programs back before a process has too many regions of it."""
    yield
    if REGIONS.exists() and len(REGIONS.read_text().splitlines()) > MANY_REGIONS:
        jax.clear_caches()
        gc.collect()


# Its packages live in an environment of their own: `make test-parity`.
collect_ignore = [] if importlib.util.find_spec("fla") else ["parity"]


def pytest_configure(config: pytest.Config) -> None:
    """Leave long tests out unless markers are chosen."""
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs hardware that is not here, and say so."""
    platform = jax.default_backend()
    for item in items:
        for marker, what in HARDWARE.items():
            if item.get_closest_marker(marker) and platform != marker:
                item.add_marker(pytest.mark.skip(reason=f"needs {what}; this is a {platform}"))
