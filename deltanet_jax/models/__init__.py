"""The language model: config, modules, generation, training and checkpoints."""

from deltanet_jax.models.config import DeltaNetConfig
from deltanet_jax.models.delta_net_lm import DeltaNetLM
from deltanet_jax.models.generate import generate

__all__ = ["DeltaNetConfig", "DeltaNetLM", "generate"]
