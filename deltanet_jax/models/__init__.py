"""The language model: config, modules, generation, serving, training and checkpoints."""

from deltanet_jax.models.config import DeltaNetConfig
from deltanet_jax.models.delta_net_lm import DeltaNetLM
from deltanet_jax.models.generate import generate
from deltanet_jax.models.serving import Request, Server

__all__ = ["DeltaNetConfig", "DeltaNetLM", "Request", "Server", "generate"]
