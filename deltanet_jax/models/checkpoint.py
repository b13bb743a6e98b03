"""Checkpoints of a training run: written atomically, found again after a kill."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import jax
from flax import nnx

from deltanet_jax.core import checks
from deltanet_jax.models.checksum import checksums
from deltanet_jax.models.config import DeltaNetConfig
from deltanet_jax.models.delta_net_lm import DeltaNetLM

try:
    import orbax.checkpoint as ocp
except ModuleNotFoundError as error:
    raise ImportError(
        "checkpoints need orbax-checkpoint: pip install 'deltanet_jax[train]'"
    ) from error

__all__ = ["Checkpoints"]

PARTS = ("state", "config")  # of a whole checkpoint


class Checkpoints:
    """The checkpoints of one run, in one directory; a context manager.

    Each holds the model, the optimiser, the step and the config. A checkpoint appears under
    its final name only once it is complete, so one that a kill interrupted is never found.

    Example:
        >>> config = DeltaNetConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=2)
        >>> model, other = (DeltaNetLM(config, rngs=nnx.Rngs(seed)) for seed in (0, 1))
        >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        ...     checkpoints.save(7, model)
        ...     step = checkpoints.restore(other)
        >>> step, bool(jnp.all(model.embedding[...] == other.embedding[...]))
        (7, True)
    """

    def __init__(self, directory: str | Path, *, keep: int = 2) -> None:
        """Open a directory, made if it is missing.

        Args:
            directory: Directory of the checkpoints.
            keep: Number of the newest checkpoints to keep.
        """
        self._keep = checks.whole("keep", keep, least=1)
        self.directory = Path(directory).resolve()
        self._writes = False
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        """Open the directory; a writer removes what interrupted saves left, a reader nothing."""
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=self._writes,
        )
        return ocp.CheckpointManager(self.directory, options=options)

    def _steps(self) -> list[int]:
        """Return the steps whose checkpoints are whole; warn of others."""
        whole: list[int] = []
        torn: list[int] = []
        for step in sorted(self._manager.all_steps()):
            parts = all((self.directory / str(step) / part).is_dir() for part in PARTS)
            (whole if parts else torn).append(step)
        if torn:
            warnings.warn(f"{self.directory}: incomplete steps are ignored: {torn}", stacklevel=3)
        return whole

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, or `None` if there is none."""
        return max(self._steps(), default=None)

    def save(
        self, step: int, model: DeltaNetLM, optimizer: "nnx.Optimizer[DeltaNetLM] | None" = None
    ) -> None:
        """Write a checkpoint of this step; returns when it is complete."""
        step = checks.whole("step", step, least=0)
        if not self._writes:
            self._writes = True
            self._manager.close()
            self._manager = self._open()
        state = _pure(model, optimizer)
        saved = self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(state),
                checksums=ocp.args.JsonSave(checksums(state)),
                config=ocp.args.JsonSave(model.config.to_dict()),
            ),
            force=True,
        )
        if not saved:
            raise ValueError(f"`step` {step} is already in {self.directory}")

    def load_config(self, step: int | None = None) -> DeltaNetConfig:
        """The config that a checkpoint was written with."""
        step = self._step(step)
        data = self._read(step, config=ocp.args.JsonRestore())["config"]
        with self._explained(step):
            return DeltaNetConfig.from_dict(data)

    def restore(
        self,
        model: DeltaNetLM,
        optimizer: "nnx.Optimizer[DeltaNetLM] | None" = None,
        *,
        step: int | None = None,
    ) -> int:
        """Fill a model, and its optimiser, in place; return the step they were written at.

        Arrays keep the sharding they have in `model`.

        Args:
            model: A model of the config that the checkpoint was written with; its
                implementation may differ.
            optimizer: An optimiser of the same kind; `None` restores the model alone, whether
                or not the checkpoint has an optimiser.
            step: Step of the checkpoint; the newest by default.

        Raises:
            FileNotFoundError: If there is no such checkpoint.
            ValueError: If the config disagrees; the message names the fields. If the checkpoint
                is damaged; the message names its step and the one before. `model` is unchanged.
        """
        step = self._step(step)
        _check_same_config(model.config, self.load_config(step))
        wanted = _pure(model, optimizer)
        restored = self._read(
            step,
            state=ocp.args.PyTreeRestore(
                jax.tree.map(_abstract, wanted),
                restore_args=jax.tree.map(_as_it_is, wanted),
                partial_restore=optimizer is None,
            ),
        )["state"]
        self._verify(step, restored)
        for module, name in ((model, "model"), (optimizer, "optimizer")):
            if module is not None:
                state = nnx.state(module)
                nnx.replace_by_pure_dict(state, restored[name])
                nnx.update(module, state)
        return step

    def _verify(self, step: int, restored: dict[str, Any]) -> None:
        if not (self.directory / str(step) / "checksums").is_dir():  # written before 0.2
            return
        stored = self._read(step, checksums=ocp.args.JsonRestore())["checksums"]
        with self._explained(step):
            wrong = [name for name, x in checksums(restored).items() if stored.get(name) != x]
            if wrong:
                raise ValueError(f"these arrays do not have their checksums: {', '.join(wrong)}")

    def _read(self, step: int, **args: Any) -> Any:
        with self._explained(step):
            return self._manager.restore(step, args=ocp.args.Composite(**args))

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Say of an error in which checkpoint it is, and which is the one before."""
        try:
            yield
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            before = max((s for s in self._steps() if s < step), default=None)
            remedy = "" if before is None else f"; the one before is of step {before}"
            reason = shorten(f"{type(error).__name__}: {error}", 300)  # TensorStore's are long
            raise ValueError(
                f"the checkpoint of step {step} in {self.directory} cannot be restored{remedy} "
                f"({reason})"
            ) from error

    def _step(self, step: int | None) -> int:
        steps = self._steps()
        found = max(steps, default=None) if step is None else checks.whole("step", step, least=0)
        if found is None or found not in steps:
            wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
            raise FileNotFoundError(f"{self.directory} does not hold {wanted}")
        return found

    def close(self) -> None:
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _pure(
    model: DeltaNetLM, optimizer: "nnx.Optimizer[DeltaNetLM] | None"
) -> dict[str, dict[Any, Any]]:
    """Nested dictionaries of arrays: what is stored does not depend on Flax's classes."""
    parts = {"model": nnx.to_pure_dict(nnx.state(model))}
    if optimizer is not None:
        parts["optimizer"] = nnx.to_pure_dict(nnx.state(optimizer))
    return parts


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        x.shape, x.dtype, sharding=x.sharding
    )


def _as_it_is(x: jax.Array) -> ocp.ArrayRestoreArgs:
    return ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype, strict=True)


def _check_same_config(model: DeltaNetConfig, stored: DeltaNetConfig) -> None:
    ours, theirs = model.to_dict(), stored.to_dict()
    differing = [
        f"{name} is {ours[name]!r}, the checkpoint's {theirs[name]!r}"
        for name in ours
        if ours[name] != theirs[name]
    ]
    if differing:
        raise ValueError("`model.config` differs from the checkpoint's: " + "; ".join(differing))
