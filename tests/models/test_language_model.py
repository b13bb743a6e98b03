"""The language model: forms, packing, padding, decoding, training."""

import importlib
import sys
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deltanet_jax.models import DeltaNetConfig, DeltaNetLM, generate
from deltanet_jax.models.generate import _generate, _Sampling, sample
from deltanet_jax.models.training import (
    bits_per_token,
    make_optimizer,
    next_token_loss,
    train_step,
)
from tests.cases import PORTABLE

CONFIG = DeltaNetConfig(vocab_size=19, hidden_size=16, num_layers=2, num_heads=2, mlp_size=24)


def make(implementation=None, seed=0, **change):
    config = DeltaNetConfig.from_dict(CONFIG.to_dict() | change)
    return DeltaNetLM(config, implementation=implementation, rngs=nnx.Rngs(seed))


def tokens(B=2, T=21, seed=0):
    return jax.random.randint(jax.random.key(seed), (B, T), 0, CONFIG.vocab_size)


@pytest.fixture(scope="module")
def model():
    return make()


def test_every_form_gives_the_same_losses_and_gradients():
    results = []
    for form in PORTABLE:
        loss_of = partial(next_token_loss, tokens=tokens())
        loss, gradient = nnx.value_and_grad(loss_of)(make(form))
        results.append((loss, nnx.to_pure_dict(gradient)))
    for other in results[1:]:
        chex.assert_trees_all_close(other, results[0], rtol=2e-4, atol=2e-6)


def test_one_form_is_loaded_with_the_parameters_of_another():
    a, b = make("recurrent", seed=0), make("chunkwise", seed=1)
    assert np.abs(a(tokens()) - b(tokens())).max() > 1e-2
    nnx.update(b, nnx.state(a))
    np.testing.assert_allclose(a(tokens()), b(tokens()), rtol=1e-4, atol=1e-5)


def test_packed_documents_equal_separate_ones(model):
    parts = [tokens(1, n, seed=n) for n in (5, 1, 9)]
    ids = jnp.asarray([[0] * 5 + [1] + [2] * 9])
    packed = model(jnp.concatenate(parts, 1), segment_ids=ids)
    np.testing.assert_allclose(
        packed, jnp.concatenate([model(x) for x in parts], 1), rtol=1e-4, atol=1e-5
    )


def test_the_loss_skips_targets_across_borders_and_padding(model):
    x = tokens(1, 6)
    ids = jnp.asarray([[0, 0, 0, 1, 1, 1]])
    halves = (next_token_loss(model, x[:, :3]) + next_token_loss(model, x[:, 3:])) / 2
    np.testing.assert_allclose(next_token_loss(model, x, segment_ids=ids), halves, rtol=1e-5)
    real = jnp.asarray([[True] * 4 + [False] * 2])
    np.testing.assert_allclose(
        next_token_loss(model, x, mask=real), next_token_loss(model, x[:, :4]), rtol=1e-5
    )


@pytest.mark.parametrize("padding", [-100, -1, 10**6])
def test_padding_tokens_outside_the_vocabulary_are_harmless(model, padding):
    real = jnp.asarray([[False, True, True, True, True, False], [True] * 4 + [False] * 2])
    x = tokens(T=6)
    outside = jnp.where(real, x, padding)
    loss_and_gradient = nnx.value_and_grad(partial(next_token_loss, mask=real))
    wanted, wanted_gradient = loss_and_gradient(model, x)
    loss, gradient = loss_and_gradient(model, outside)
    assert loss == wanted
    chex.assert_trees_all_equal(nnx.to_pure_dict(gradient), nnx.to_pure_dict(wanted_gradient))
    np.testing.assert_array_equal(model(outside, mask=real), model(x, mask=real))


@pytest.mark.parametrize("cuts", [(1, 2), (5,), (4, 10, 11)])
def test_a_text_in_pieces_equals_the_whole(model, cuts):
    x = tokens()
    cache, logits = model.init_cache(2), []
    for piece in jnp.split(x, cuts, axis=1):
        part, cache = model.extend(piece, cache)
        logits.append(part)
    np.testing.assert_allclose(jnp.concatenate(logits, 1), model(x), rtol=1e-4, atol=1e-5)


def test_greedy_generation_takes_the_likeliest_token_each_time(model):
    x = tokens(T=6)
    new = generate(model, x, 5, key=jax.random.key(0), temperature=0)
    for _ in range(5):
        x = jnp.concatenate([x, jnp.argmax(model(x)[:, -1:], -1)], axis=1)
    np.testing.assert_array_equal(new, x[:, -5:])


def test_padding_of_a_prompt_changes_nothing(model):
    prompts = tokens(T=7)
    mask = jnp.asarray([[False] * 3 + [True] * 4, [True] * 5 + [False] * 2])
    new = generate(model, prompts, 4, key=jax.random.key(0), temperature=0, mask=mask)
    for row, real in enumerate((prompts[:1, 3:], prompts[1:, :5])):
        alone = generate(model, real, 4, key=jax.random.key(0), temperature=0)
        np.testing.assert_array_equal(new[row], alone[0])


def test_sampling_keeps_to_the_top_k_and_follows_the_temperature():
    logits = jnp.broadcast_to(jnp.asarray([0.0, 3.0, 2.0, 1.0]), (4000, 4))
    key = jax.random.key(0)
    assert set(np.unique(sample(logits, key, 1.0, 2))) == {1, 2}
    assert set(np.unique(sample(logits, key, 0.0, None))) == {1}
    share = np.bincount(sample(logits, key, 2.0, None), minlength=4) / 4000
    np.testing.assert_allclose(share, jax.nn.softmax(logits[0] / 2), atol=0.03)


def test_top_k_keeps_exactly_k_of_equal_tokens():
    logits = jnp.zeros((500, 4))
    assert len(np.unique(sample(logits, jax.random.key(0), 1.0, 3))) == 3


def test_reading_a_prompt_makes_logits_of_its_last_token_alone():
    T, vocab = 512, 4096
    model = make(vocab_size=vocab)
    graph, state = nnx.split(model)
    how = _Sampling(num_tokens=2, temperature=1.0, top_k=None)
    lowered = _generate.lower(state, tokens(T=T), None, jax.random.key(0), graph=graph, how=how)
    memory = lowered.compile().memory_analysis().temp_size_in_bytes
    assert memory < 2 * T * vocab * 4


def test_generation_repeats_with_its_key(model):
    first, again, other = (
        generate(model, tokens(T=3), 8, key=jax.random.key(seed)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert np.any(np.asarray(first != other))


def test_the_cache_does_not_grow(model):
    short, long = (model.extend(tokens(T=n), model.init_cache(2))[1] for n in (3, 40))
    chex.assert_trees_all_equal_shapes_and_dtypes(short, long, model.init_cache(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": -1}, "`num_tokens`"),
        ({"temperature": -0.5}, "`temperature`"),
        ({"temperature": float("nan")}, "`temperature`"),
        ({"top_k": 0}, "`top_k`"),
        ({"top_k": 20}, "`top_k`"),
        ({"prompt": jnp.zeros((1, 0), int)}, "`prompt`"),
        ({"prompt": [[1, 2]]}, "`prompt` must be an integer array"),
        ({"prompt": jnp.zeros((1, 2))}, "`prompt` must have an integer dtype"),
        ({"prompt": jnp.asarray([[1, 99]])}, r"`prompt` must hold tokens in \[0, .*got 99"),
        ({"mask": jnp.asarray([[True] * 3, [False] * 3])}, r"`mask` .* rows \[1\] have none"),
        ({"num_tokens": 2.5}, "`num_tokens` must be an integer"),
        ({"num_tokens": True}, "`num_tokens` must be an integer"),
        ({"temperature": "0.5"}, "`temperature` must be a number"),
        ({"top_k": "3"}, "`top_k` must be an integer"),
        ({"key": None}, "`key` is required"),
    ],
)
def test_bad_sampling_is_named(model, change, message):
    call = {"prompt": tokens(T=3), "num_tokens": 2, "key": jax.random.key(0)} | change
    with pytest.raises(ValueError, match=message):
        generate(model, **call)


def test_training_learns_a_repeated_pattern():
    model = make("chunkwise")
    optimizer = make_optimizer(model, 1e-2, total_steps=60, warmup_steps=5)
    x = jnp.tile(jnp.arange(7), 4)[None, :21]
    losses = [float(train_step(model, optimizer, x)["loss"]) for _ in range(60)]
    assert losses[0] > 2
    assert losses[-1] < 0.1
    assert bits_per_token(losses[0]) == pytest.approx(losses[0] / 0.6931472)


def test_weight_decay_leaves_gates_norms_and_convolutions_alone():
    model = make(gate="scalar")
    before = nnx.to_flat_state(jax.tree.map(jnp.copy, nnx.state(model)))
    optimizer = make_optimizer(model, 1e-2, total_steps=2, weight_decay=10.0)
    optimizer.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)))
    moved = {
        "/".join(map(str, path))
        for (path, old), (_, new) in zip(before, nnx.to_flat_state(nnx.state(model)), strict=True)
        if np.any(np.asarray(old[...] != new[...]))
    }
    assert {"embedding", "head/kernel", "blocks/0/mixer/q_proj/kernel"} <= moved
    assert not any(part in path for path in moved for part in ("norm", "decay", "conv"))


def test_tied_embeddings_have_no_head():
    model = make(tie_embeddings=True)
    assert not hasattr(model, "head")
    assert model(tokens()).shape == (2, 21, 19)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_bfloat16_model_are_not_rounded_to_bfloat16(tied):
    logits = make(dtype="bfloat16", tie_embeddings=tied)(tokens())
    assert np.any(np.asarray(logits != logits.astype(jnp.bfloat16).astype(jnp.float32)))


def test_bfloat16_computes_near_float32_and_returns_float32_logits(model):
    rough = make(dtype="bfloat16")
    logits = rough(tokens())
    assert logits.dtype == jnp.float32
    error = np.asarray(logits - model(tokens()))
    assert np.sqrt(np.mean(error**2)) < 0.03 * np.std(np.asarray(model(tokens())))


def test_every_product_of_a_bfloat16_head_has_bfloat16_operands():
    """In both directions: one of the vocabulary in float32 costs as much as several layers."""
    model = make(dtype="bfloat16", vocab_size=97)
    loss_of = partial(next_token_loss, tokens=tokens())
    text = jax.jit(lambda m: nnx.grad(loss_of)(m)).lower(model).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line and "x97x" in line]
    products += [line for line in text.splitlines() if "dot_general" in line and "<97x" in line]
    assert len(products) >= 3
    for line in products:
        operands = line.split(" : ")[-1].split("->")[0]
        assert "f32" not in operands.replace("bf16", ""), line


def test_gradients_of_a_bfloat16_head_are_near_those_of_float32(model):
    x, w = jax.random.normal(jax.random.key(0), (2, 5, 16)), jnp.zeros((2, 5, 19)).at[..., 3].set(1)

    def gradient(model, x):
        return nnx.grad(lambda m: jnp.sum(m.logits(x) * w))(model).head.kernel[...]

    narrow = gradient(model, x.astype(jnp.bfloat16)).astype(jnp.float32)
    want = gradient(model, x)
    assert jnp.linalg.norm(narrow - want) < 1e-2 * jnp.linalg.norm(want)
    tangent = jax.jvp(model.logits, (x,), (x,))[1]  # forward mode too
    assert tangent.shape == (2, 5, 19)


def test_config_survives_json_and_names_what_is_wrong():
    assert DeltaNetConfig.from_json(CONFIG.to_json()) == CONFIG
    with pytest.raises(ValueError, match=r"unknown \['depth'\]"):
        DeltaNetConfig.from_dict(CONFIG.to_dict() | {"depth": 3})
    with pytest.raises(ValueError, match=r"missing \['vocab_size'"):
        DeltaNetConfig.from_dict({})
    for field, value in (("num_layers", 0), ("gate", "both"), ("dtype", "int8"), ("mlp_size", -1)):
        with pytest.raises(ValueError, match=f"`{field}`"):
            DeltaNetConfig.from_dict(CONFIG.to_dict() | {field: value})


def test_bad_tokens_are_named(model):
    with pytest.raises(ValueError, match=r"`tokens` must have shape \[B, T\]"):
        model(jnp.zeros(3, int))
    with pytest.raises(ValueError, match="`tokens` must have an integer dtype"):
        model(jnp.zeros((1, 3)))
    with pytest.raises(ValueError, match="`tokens` must be an integer array .*got list"):
        model([[1, 2]])
    with pytest.raises(ValueError, match=r"`tokens` must hold tokens in \[0, 19\); got -1"):
        model(jnp.asarray([[3, -1]]))
    with pytest.raises(ValueError, match="`tokens` must be .* T >= 2"):
        next_token_loss(model, tokens(T=1))
    with pytest.raises(ValueError, match="`rngs` must be a flax.nnx.Rngs"):
        DeltaNetLM(CONFIG, rngs=jax.random.key(0))
    with pytest.raises(ValueError, match="one part per block"):
        model.extend(tokens(), model.init_cache(2)[:1])


@pytest.mark.parametrize(("module", "missing"), [("training", "optax"), ("checkpoint", "orbax")])
def test_a_missing_library_is_named_with_its_extra(module, missing, monkeypatch):
    name = f"deltanet_jax.models.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for loaded in [n for n in sys.modules if n.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"{missing}.*deltanet_jax\[train\]"):
        importlib.import_module(name)
