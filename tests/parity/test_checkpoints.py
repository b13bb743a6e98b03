"""Whole small models through both sides: the same files, the same logits, prefill and decode."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fla.models import (
    DeltaNetConfig,
    DeltaNetForCausalLM,
    GatedDeltaNetConfig,
    GatedDeltaNetForCausalLM,
)
from flax import nnx
from transformers import DynamicCache, Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from deltanet_jax.convert import load_fla, load_qwen3_next, save_fla, save_qwen3_next
from tests.convert.directories import read, write
from tests.parity.torch_side import fla_on_cpu
from tests.tolerances import TOLERANCES, assert_close

__all__ = ["fla_on_cpu"]

FORWARD, GRADIENT = TOLERANCES["float32"]
SHAPE = {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
PLAIN = {"fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False}
DELTA_NETS = {
    "default": {"num_heads": 2},
    "narrow-keys": {"num_heads": 2, "expand_k": 0.5, "expand_v": 1.5, "use_gate": True},
    "sum-elu": {"num_heads": 4, "qk_norm": "sum", "qk_activation": "elu", "conv_size": 3},
    "bare": {"num_heads": 2, "use_short_conv": False, "use_beta": False, "qk_activation": "relu"},
    "reflections-tied": {
        "num_heads": 2,
        "allow_neg_eigval": True,
        "tie_word_embeddings": True,
        "qk_activation": "identity",
    },
}
GATED_DELTANETS = {
    "default": {"num_heads": 2, "head_dim": 12},
    "grouped-sigmoid": {
        "num_heads": 2,
        "num_v_heads": 4,
        "head_dim": 8,
        "expand_v": 1.0,
        "output_gate_activation": "sigmoid",
    },
    "ungated-reflections": {
        "num_heads": 2,
        "head_dim": 8,
        "use_gate": False,
        "allow_neg_eigval": True,
    },
}
MODELS = [
    (model, config, name, options)
    for model, config, cases in (
        (DeltaNetForCausalLM, DeltaNetConfig, DELTA_NETS),
        (GatedDeltaNetForCausalLM, GatedDeltaNetConfig, GATED_DELTANETS),
    )
    for name, options in cases.items()
]
each_model = pytest.mark.parametrize(
    ("model", "config", "options"),
    [(m, c, o) for m, c, _, o in MODELS],
    ids=[f"{c.model_type}-{n}" for _, c, n, _ in MODELS],
)
pytestmark = [
    pytest.mark.usefixtures("fla_on_cpu"),
    pytest.mark.filterwarnings("ignore"),
]


def tokens_of(T: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], size=(2, T))


def theirs_and_ours(tmp_path, model, config, options, **how):
    """A random model of theirs, and ours from its files; every parameter is random."""
    torch.manual_seed(0)
    theirs = model(config(**SHAPE, **PLAIN, **options)).eval()
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            noise = torch.randn_like(x)
            gate = name.endswith(("A_log", "dt_bias"))
            x.copy_(x + 0.2 * noise if gate or "norm" in name else noise * x.shape[-1] ** -0.5)
    theirs.save_pretrained(tmp_path / "theirs", **how)
    return theirs, load_fla(tmp_path / "theirs")


@each_model
def test_prefill_and_decoding_give_the_same_logits(tmp_path, model, config, options):
    theirs, ours = theirs_and_ours(tmp_path, model, config, options, max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    tokens = tokens_of(75)
    with torch.no_grad():
        whole = theirs(torch.from_numpy(tokens)).logits
        part = theirs(torch.from_numpy(tokens[:, :70]), use_cache=True)
    assert_close("logits", ours(jnp.asarray(tokens)), whole.numpy(), FORWARD)
    got, cache = ours.extend(jnp.asarray(tokens[:, :70]), ours.init_cache(2))
    assert_close("prefill", got, part.logits.numpy(), FORWARD)
    past = part.past_key_values
    for t in range(70, 75):
        with torch.no_grad():
            out = theirs(
                torch.from_numpy(tokens[:, t : t + 1]), past_key_values=past, use_cache=True
            )
        past = out.past_key_values
        got, cache = ours.extend(jnp.asarray(tokens[:, t : t + 1]), cache)
        assert_close(f"token {t}", got, out.logits.numpy(), FORWARD)
        assert_close(f"token {t}, whole", got, whole[:, t : t + 1].numpy(), FORWARD)
    for i, layer in enumerate(cache):
        state = past[i]["recurrent_state"].numpy()
        state = state if config is DeltaNetConfig else np.swapaxes(state, -1, -2)
        assert_close(f"state {i}", layer.state, state, FORWARD)


@each_model
def test_what_we_write_they_read(tmp_path, model, config, options):
    theirs, ours = theirs_and_ours(tmp_path, model, config, options)
    save_fla(ours, tmp_path / "back", max_shard_bytes=20_000, extra=PLAIN)
    again = model.from_pretrained(tmp_path / "back").eval()
    assert again.config.num_heads == theirs.config.num_heads
    wanted, got = theirs.state_dict(), again.state_dict()
    assert sorted(wanted) == sorted(got)
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    with torch.no_grad():
        tokens = torch.from_numpy(tokens_of(9))
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)


@each_model
def test_gradients_of_the_parameters_agree(tmp_path, model, config, options):
    theirs, ours = theirs_and_ours(tmp_path, model, config, options)
    tokens, weights = tokens_of(17), np.random.default_rng(1).normal(size=(2, 17, 37))
    theirs.train()
    logits = theirs(torch.from_numpy(tokens)).logits
    (logits * torch.from_numpy(weights).float()).sum().backward()
    wanted = {name: x.grad.numpy() for name, x in theirs.named_parameters()}
    gradient = nnx.grad(lambda m: jnp.sum(m(jnp.asarray(tokens)) * jnp.asarray(weights)))(ours)
    nnx.update(ours, nnx.state(gradient))
    save_fla(ours, tmp_path / "gradient")
    got = read(tmp_path / "gradient")
    assert sorted(got) == sorted(wanted)
    for name, x in wanted.items():
        assert_close(name, got[name], x, GRADIENT)


@pytest.fixture
def qwen_on_cpu(monkeypatch):
    """The functions that they fall back on where fla has no kernel."""
    for name in (
        "torch_recurrent_gated_delta_rule",
        "torch_chunk_gated_delta_rule",
        "causal_conv1d_fn",
        "causal_conv1d_update",
    ):
        monkeypatch.setattr(qwen, name, getattr(qwen, name).__wrapped__)


@pytest.mark.usefixtures("qwen_on_cpu")
def test_the_mixer_of_qwen3_next_agrees(tmp_path):
    config = Qwen3NextConfig(
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        vocab_size=37,
        num_experts=2,
        moe_intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    theirs = qwen.Qwen3NextGatedDeltaNet(config, 0)
    with torch.no_grad():
        theirs.norm.weight.add_(0.2 * torch.randn(12))
    prefix = "model.layers.0.linear_attn."
    tensors = {prefix + n: x.detach().numpy() for n, x in theirs.state_dict().items()}
    directory = write(tmp_path / "x", json.loads(config.to_json_string(False)), tensors)
    ours = load_qwen3_next(directory)[0]
    x = np.random.default_rng(0).normal(size=(2, 75, 32)).astype(np.float32)
    cotangent = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)

    leaf = torch.from_numpy(x).requires_grad_()
    y = theirs(leaf)
    y.backward(torch.from_numpy(cotangent))
    wanted = {prefix + n: p.grad.numpy() for n, p in theirs.named_parameters()}
    gradient, dx = nnx.grad(lambda m, x: jnp.vdot(m(x), cotangent), argnums=(0, 1))(
        ours, jnp.asarray(x)
    )
    assert_close("y", ours(jnp.asarray(x)), y.detach().numpy(), FORWARD)
    assert_close("dx", dx, leaf.grad.numpy(), GRADIENT)

    cache, past = ours.init_cache(2), DynamicCache(config=config)
    with torch.no_grad():
        for piece in (slice(0, 70), *(slice(t, t + 1) for t in range(70, 75))):
            out = theirs(torch.from_numpy(x[:, piece]), cache=past)
            got, cache = ours.extend(jnp.asarray(x[:, piece]), cache)
            assert_close(f"{piece}", got, out.numpy(), FORWARD)
        state = past.get_recurrent_state(0, state_idx=0).numpy()
    assert_close("state", cache.state, state, FORWARD)

    nnx.update(ours, nnx.state(gradient))
    save_qwen3_next({0: ours}, tmp_path / "gradient")
    got = read(tmp_path / "gradient")
    for name, gradient in wanted.items():
        assert_close(name, got[name], gradient, GRADIENT)
