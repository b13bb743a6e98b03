"""Every variant by every implementation against the oracle: a small subset for every jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deltanet_jax
from deltanet_jax.core import reference
from tests.cases import PORTABLE, VARIANTS
from tests.tolerances import TOLERANCES, assert_close

pytestmark = pytest.mark.smoke

B, T, H, HV, K, V = 1, 37, 1, 2, 8, 12  # two value heads per key head, a chunk and a piece
CHUNK = 20  # two sub-blocks of a vector gate


def draw(variant: str) -> dict[str, np.ndarray]:
    """Inputs in float32: unit keys, weak decay, beta up to 2, a state to start from."""
    random = np.random.default_rng(7)
    q, k = random.standard_normal((2, B, T, H, K))
    inputs = {
        "q": q,
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": random.standard_normal((B, T, HV, V)),
        "initial_state": random.standard_normal((B, HV, K, V)),
    }
    gate, delta = VARIANTS[variant]
    if gate == "scalar":
        inputs["g"] = -0.1 * random.random((B, T, HV))
    if gate == "vector":
        inputs["g"] = -0.1 * random.random((B, T, HV, K))
    if delta:
        inputs["beta"] = 2 * random.random((B, T, HV))
    return {name: x.astype(np.float32) for name, x in inputs.items()}


def loss_of(implementation: str, weights: jax.Array):
    def loss(inputs: dict[str, jax.Array]):
        o, state = deltanet_jax.linear_attention(
            **inputs, implementation=implementation, chunk_size=CHUNK
        )
        return jnp.sum(weights * o) + jnp.sum(state), (o, state)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.fixture(scope="module", params=VARIANTS)
def case(request):
    """The inputs of a variant, the oracle's answer, and the slope of its loss along a direction."""
    inputs = draw(request.param)
    random = np.random.default_rng(8)
    weights = random.standard_normal((B, T, HV, V))
    direction = {name: random.standard_normal(x.shape) for name, x in inputs.items()}

    def oracle(step: float) -> tuple[float, np.ndarray, np.ndarray]:
        moved = {n: x.astype(np.float64) + step * direction[n] for n, x in inputs.items()}
        o, state = reference.recurrence(**moved)
        return float(np.sum(weights * o) + np.sum(state)), o, state

    # Central differences of fourth order, in float64: good to 1e-9 here.
    h = 1e-3
    near, far = (oracle(m * h)[0] - oracle(-m * h)[0] for m in (1, 2))
    return inputs, weights, direction, oracle(0.0)[1:], (8 * near - far) / (12 * h)


@pytest.mark.parametrize("implementation", PORTABLE)
def test_implementation_agrees_with_the_oracle(case, implementation):
    inputs, weights, direction, (o, state), slope = case
    (_, got), gradients = loss_of(implementation, weights.astype(np.float32))(inputs)
    tolerance = TOLERANCES["float32"]
    assert_close("o", got[0], o, tolerance.forward)
    assert_close("final_state", got[1], state, tolerance.forward)
    assert gradients.keys() == inputs.keys()
    along = {n: np.asarray(x, np.float64) * direction[n] for n, x in gradients.items()}
    size = np.sqrt(sum(np.sum(x**2) for x in along.values()))
    assert size > 0
    error = abs(sum(np.sum(x) for x in along.values()) - slope) / size
    assert error <= tolerance.gradient, f"slope off by {error:.1e} of the gradient's size"


def test_decoding_token_by_token_continues_a_prefill():
    inputs = draw("kda")
    start = inputs.pop("initial_state")
    head = {name: x[:, : T - 5] for name, x in inputs.items()}
    whole, last = reference.recurrence(**inputs, initial_state=start)
    _, state = deltanet_jax.kimi_delta_attention(**head, initial_state=start)
    decode = jax.jit(deltanet_jax.step)
    for t in range(T - 5, T):
        token = {name: x[:, t] for name, x in inputs.items()}
        o, state = decode(**token, state=state)
        assert_close(f"o at {t}", o, whole[:, t], TOLERANCES["float32"].forward)
    assert_close("final_state", state, last, TOLERANCES["float32"].forward)


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("outside", [False, True], ids=["vmap-of-grad", "grad-of-vmap"])
def test_gradients_of_examples_under_two_vmaps(implementation, outside):
    """Arrays of rank 7 and more, on which the CPU compiler of jaxlib 0.10.2 is fragile."""
    inputs = draw("kda")
    loss = loss_under_vmap(implementation)

    def summed(x):
        return jnp.sum(jax.vmap(jax.vmap(loss))(x))

    gradient = jax.grad(summed) if outside else jax.vmap(jax.vmap(jax.grad(loss)))
    stacked = {name: jnp.stack([jnp.stack([x])] * 2) for name, x in inputs.items()}
    got, want = jax.jit(gradient)(stacked), jax.grad(loss_under_vmap("recurrent"))(inputs)
    for name, x in want.items():
        assert_close(f"d{name}", got[name][1, 0], x, TOLERANCES["float32"].gradient)


def loss_under_vmap(implementation):
    def loss(x):
        o, state = deltanet_jax.linear_attention(
            **x, implementation=implementation, chunk_size=CHUNK
        )
        return jnp.sum(jnp.sin(o)) + jnp.sum(state)

    return loss
