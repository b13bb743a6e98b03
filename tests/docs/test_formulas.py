"""Every equation of `docs/mathematics.md` against the float64 oracle or float64 autodiff."""

import pathlib
import runpy
from functools import partial

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax import compat
from deltanet_jax.core import chunk, problem, reference
from deltanet_jax.core.chunk_solve import solve_chunk
from deltanet_jax.core.step import step
from tests.docs import formulas
from tests.docs.formulas import Tokens

C, K, V = 32, 6, 5
TOLERANCE = 1e-12
MEMBERS = [(gate, delta) for gate in ("none", "scalar", "vector") for delta in (False, True)]
IDS = [f"{gate}-{'delta' if delta else 'sum'}" for gate, delta in MEMBERS]


def draw(gate: str, delta: bool, tokens: int = C, seed: int = 0) -> tuple[Tokens, np.ndarray]:
    """Weak decay, correlated unit keys, beta up to 2, non-zero state: nothing can cancel."""
    rng = np.random.default_rng(seed)
    k = 0.8 * rng.normal(size=(1, K)) + rng.normal(size=(tokens, K))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    D = K if gate == "vector" else 1
    g = np.zeros((tokens, 1)) if gate == "none" else -0.2 * rng.random((tokens, D))
    beta = 2 * rng.random((tokens, 1)) if delta else None
    q, v = rng.normal(size=(tokens, K)), rng.normal(size=(tokens, V))
    return Tokens(q, k, v, g, beta), rng.normal(size=(K, V))


def oracle(x: Tokens, S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    g = x.g[None, :, None, :] if x.g.shape[1] > 1 else x.g[None]
    o, state = reference.recurrence(
        x.q[None, :, None],
        x.k[None, :, None],
        x.v[None, :, None],
        g=g,
        beta=None if x.beta is None else x.beta[None],
        scale=1.0,
        initial_state=S[None, None],
    )
    return o[0, :, 0], state[0, 0]


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    error = np.sqrt(np.mean((got - want) ** 2)) / np.sqrt(np.mean(want**2))
    assert error < TOLERANCE, error


@pytest.mark.parametrize(("gate", "delta"), MEMBERS, ids=IDS)
@pytest.mark.parametrize("form", [formulas.token_loop, formulas.form_1, formulas.form_2])
def test_chunk_forms_equal_the_recurrence(form, gate, delta):
    x, S = draw(gate, delta)
    for got, want in zip(form(x, S), oracle(x, S), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize(("gate", "delta"), MEMBERS, ids=IDS)
def test_chunk_maps_compose_over_chunks(gate, delta):
    x, S = draw(gate, delta, tokens=3 * C)
    maps = [
        formulas.chunk_map(Tokens(*(None if a is None else a[i : i + C] for a in x)))
        for i in range(0, 3 * C, C)
    ]
    (M1, R1), (M2, R2), (M3, R3) = maps
    left = (M3 @ (M2 @ M1), M3 @ (M2 @ R1 + R2) + R3)
    right = ((M3 @ M2) @ M1, (M3 @ M2) @ R1 + (M3 @ R2 + R3))
    want = oracle(x, S)[1]
    for M, R in (left, right):
        assert_close(M @ S + R, want)
    swapped = (M1 @ M2 @ M3) @ S + M1 @ (M2 @ R3 + R2) + R1
    commutes = gate == "none" and not delta  # every M is the identity
    assert commutes == (np.abs(swapped - want).max() < 1e-2)


@pytest.mark.parametrize("strength", [0.2, 5.0])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_sub_blocks_with_a_reference_row_equal_the_pairwise_scores(size, strength):
    x, _ = draw("vector", True)
    g = strength / 0.2 * x.g
    assert_close(formulas.block_scores(x.q, x.k, g, size), formulas.scores(x.q, x.k, g))


def test_wy_keys_of_a_scalar_gate_are_the_ungated_ones_decayed():
    x, _ = draw("scalar", True)
    gated = formulas.wy(x, formulas.parts(x))[0]
    plain = x._replace(g=np.zeros_like(x.g))
    ungated = formulas.wy(plain, formulas.parts(plain))[0]
    assert_close(gated, np.exp(np.cumsum(x.g, axis=0)) * ungated)


def test_token_chunk_map_is_the_token_map():
    x, _ = draw("vector", True, tokens=1)
    M, R = formulas.chunk_map(x)
    erase = np.eye(K) - x.beta[0] * np.outer(x.k[0], x.k[0])
    assert_close(M, erase @ np.diag(np.exp(x.g[0])))
    assert_close(R, x.beta[0] * np.outer(x.k[0], x.v[0]))


def autodiff(x: Tokens, S: np.ndarray, dO: np.ndarray, dS1: np.ndarray) -> list[np.ndarray]:
    """Reverse mode through the token loop; nothing of the chunk algebra is in it."""

    def run(q, k, v, g, beta, S):
        def body(S, token):
            o, S = step(S, token)
            return S, o

        S, o = jax.lax.scan(body, S, problem.Tokens(q, k, v, g, beta))
        return o, S

    with compat.enable_x64():
        _, pull = jax.vjp(run, *(jnp.asarray(a) for a in (*x, S)))
        return [np.asarray(d) for d in pull((jnp.asarray(dO), jnp.asarray(dS1)))]


@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
def test_backward_formulas_equal_autodiff(gate):
    x, S = draw(gate, True)
    rng = np.random.default_rng(1)
    dO, dS1 = rng.normal(size=(C, V)), rng.normal(size=(K, V))
    got = formulas.backward(x, S, dO, dS1)
    for mine, want in zip(got, autodiff(x, S, dO, dS1), strict=True):
        assert_close(mine, want)


def test_backward_identities():
    x, S = draw("vector", True)
    rng = np.random.default_rng(1)
    dO, dS1 = rng.normal(size=(C, V)), rng.normal(size=(K, V))
    p = formulas.parts(x)
    W, U = formulas.wy(x, p)
    writes = U - W @ S
    Z = p.T.T @ (p.A.T @ dO + p.k_out @ dS1)
    grads = formulas.backward(x, S, dO, dS1)
    M, _ = formulas.chunk_map(x)
    assert_close(grads.beta, np.sum(Z * writes, axis=1, keepdims=True) / x.beta)
    assert_close(grads.state, M.T @ dS1 + (p.q_in - p.A @ W).T @ dO)
    dU = p.A.T @ dO + p.k_out @ dS1
    dW = -dU @ S.T
    through_factors = -np.tril(p.T.T @ (dU @ U.T + dW @ W.T), -1)
    assert_close(through_factors, -np.tril(Z @ writes.T, -1))


@pytest.mark.parametrize(("correlation", "beta"), [(0.6, 1.0), (0.6, 2.0), (0.9, 1.0)])
def test_powers_lose_the_inverse_and_merges_keep_it(correlation, beta):
    path = pathlib.Path(__file__).parents[2] / "docs" / "inverse_error.py"
    table = runpy.run_path(str(path))["errors"](correlation, beta)
    assert min(table["doubling"], table["newton"]) > 1e3
    assert max(table["substitution"], table["blocked"], table["ladder"]) < 1e-6


@pytest.mark.parametrize("delta", [False, True])
def test_a_reset_is_a_finite_gate(delta):
    x, S = draw("vector", delta)
    cut = 11
    x.g[cut] = -1000.0
    o, state = formulas.form_2(x, S)
    tail = Tokens(*(None if a is None else a[cut:] for a in x))
    want_o, want_state = oracle(tail, np.zeros_like(S))
    assert_close(o[cut:], want_o)
    assert_close(state, want_state)


def products(function, *args) -> int:
    """Multiply-adds, times two, of the matrix products in the jaxpr of `function`."""

    def count(jaxpr) -> int:
        total = 0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (contracting, _), _ = equation.params["dimension_numbers"]
                shape = equation.invars[0].aval.shape
                inner = np.prod([shape[axis] for axis in contracting])
                # A product that sums over one term only is a scaling, written as a product.
                if inner > 1:
                    total += 2 * int(inner * np.prod(equation.outvars[0].aval.shape))
            for inner_jaxpr in jax.extend.core.jaxprs_in_params(equation.params):
                total += count(inner_jaxpr)
        return total

    return count(jax.make_jaxpr(function)(*args).jaxpr)


@pytest.mark.parametrize("tokens", [32, 64])
def test_cost_table_counts_the_products_of_the_code(tokens):
    n, K, V = tokens, 32, 48
    shapes = (n, K), (n, K), (n, V)
    array = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    x = problem.Tokens(*(array(s) for s in shapes), None, array((n, 1)))
    S = array((K, V))

    def form_1(x, S):
        return solve_chunk(x, S, None)

    def form_2(x, S):
        form = chunk.prepare_wy(x, None)
        writes = form.writes(S, None)
        return chunk.read(x, S, writes, None), form.advance(S, writes, None)

    # Per token and column of the right-hand side, for blocks of 32 rows and of 16.
    solve_2, solve_1 = n + 32, n + 16
    # Per token: two products of whole blocks for each size 2, 4, ... up to half a block.
    merges_2, merges_1 = 4 * 2 * 2 * 32**2, 3 * 2 * 2 * 16**2
    wy = n * (6 * K * V + 4 * n * K + 2 * n * V + solve_2 * (K + V) + merges_2)
    form_1_cost = n * (6 * K * V + 4 * n * K + 2 * n * V + solve_1 * V + merges_1)
    plain = n * (4 * K * V + 2 * n * K + 2 * n * V)
    maps = n * (2 * K * K + 2 * K * V)
    assert products(form_2, x, S) == wy
    assert products(form_1, x, S) == form_1_cost
    assert products(form_2, x._replace(beta=None), S) == plain
    form = jax.eval_shape(lambda x: chunk.prepare_wy(x, None), x)
    assert products(lambda form: chunk.chunk_map(form, None), form) == maps
