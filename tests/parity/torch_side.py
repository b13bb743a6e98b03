"""The PyTorch side: their functions with gradients, and their models without Triton."""

from collections.abc import Callable
from typing import Any

import fla.layers.delta_net
import fla.layers.gated_deltanet
import fla.modules.mlp
import numpy as np
import pytest
import torch
from fla.modules import FusedRMSNormGated, RMSNorm, ShortConvolution
from fla.ops.delta_rule.naive import delta_rule_recurrence
from fla.ops.gated_delta_rule.gate import naive_gdn_gate
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from torch.nn import functional as F

from tests.oracle import Expected, cotangents_for

Tensors = dict[str, torch.Tensor]


def pullback(function: Callable[[Tensors], tuple], inputs: dict[str, np.ndarray]) -> Expected:
    """Outputs, state and the gradient of every input; a state of `None` is not compared."""
    tensors = {n: torch.from_numpy(np.array(x)).requires_grad_() for n, x in inputs.items()}
    # A function that writes into its argument would otherwise write into a leaf.
    o, state = function({n: x * 1 for n, x in tensors.items()})
    outputs = [x for x in (o, state) if x is not None]
    cotangents = [torch.from_numpy(c) for c in cotangents_for(inputs)][: len(outputs)]
    torch.autograd.backward(outputs, cotangents)
    numbers = {n: x.grad.numpy() for n, x in tensors.items()}
    return Expected(o.detach().numpy(), None if state is None else state.detach().numpy(), numbers)


def heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _l2(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: None,
    use_qk_l2norm_in_kernel: bool,
) -> tuple:
    assert cu_seqlens is None
    if use_qk_l2norm_in_kernel:
        q, k = _l2(q), _l2(k)
    o, state = delta_rule_recurrence(*heads_first(q, k, v, beta), initial_state, True)
    return o.transpose(1, 2), state if output_final_state else None


def _gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor | None,
    allow_neg_eigval: bool,
    output_final_state: bool,
    cu_seqlens: None,
    **flags: bool,
) -> tuple:
    """As both kernels are called by the layer: gate, sigmoid and norm inside, state [V, K]."""
    assert cu_seqlens is None
    assert all(flags.values())
    group = v.shape[2] // q.shape[2]
    q, k = (_l2(x).repeat_interleave(group, dim=2) for x in (q, k))
    beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    state = None if initial_state is None else initial_state.transpose(-1, -2)
    o, state = naive_recurrent_gated_delta_rule(
        q, k, v, beta, naive_gdn_gate(g, A_log, dt_bias), None, state, True
    )
    return o, state.transpose(-1, -2) if output_final_state else None


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, cache: torch.Tensor | None, activation: str | None
) -> tuple:
    """Over [B, T, D]; the cache holds the last W inputs, as theirs does."""
    D, W = weight.shape
    if cache is None:
        cache = x.new_zeros(x.shape[0], D, W)
    past = torch.cat([cache, x.transpose(1, 2)], dim=-1)
    y = F.conv1d(past[..., 1:], weight[:, None], groups=D).transpose(1, 2)
    return (F.silu(y) if activation else y), past[..., -W:]


def _rms(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight


GATES = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}


@pytest.fixture
def fla_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their Triton kernels replaced by their own naive functions, or by plain PyTorch.

    Configuration, modules, order of operations, caches and files remain theirs.
    """

    def replace(place: Any, name: str, by: Callable[..., Any]) -> None:
        assert hasattr(place, name), name
        monkeypatch.setattr(place, name, by)

    for name in ("fused_recurrent_delta_rule", "chunk_delta_rule"):
        replace(fla.layers.delta_net, name, _delta_rule)
    for name in ("fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule"):
        replace(fla.layers.gated_deltanet, name, _gated_delta_rule)
    replace(
        fla.layers.gated_deltanet,
        "causal_conv1d",
        lambda x, weight, bias, activation, backend: _convolution(x, weight, None, activation),
    )
    replace(
        ShortConvolution,
        "forward",
        lambda self, x, cache, output_final_state, cu_seqlens: _convolution(
            x, self.weight[:, 0], cache, self.activation
        ),
    )
    replace(RMSNorm, "forward", _rms)
    replace(
        FusedRMSNormGated,
        "forward",
        lambda self, x, g: _rms(self, x) * GATES[self.activation](g),
    )
    replace(fla.modules.mlp, "swiglu", lambda gate, x: F.silu(gate) * x)
