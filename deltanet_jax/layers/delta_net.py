"""The token mixers: one layer, three algorithms for its recurrence."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from deltanet_jax import parallel
from deltanet_jax.core.numerics import common_dtype
from deltanet_jax.layers import checks
from deltanet_jax.layers.cache import DeltaNetCache
from deltanet_jax.layers.convolution import ShortConvolution, next_inputs
from deltanet_jax.layers.execution import mix_along_context, mix_here
from deltanet_jax.layers.gates import DecayParameters, bounded_strength, write_strength
from deltanet_jax.layers.heads import activate_heads, key_features, value_features
from deltanet_jax.layers.norms import RMSNorm
from deltanet_jax.layers.options import OUTPUT_GATES, LayerOptions, check_implementation
from deltanet_jax.layers.padding import Packing, pack, runs_of
from deltanet_jax.layers.parameters import EMBED, HEADS, LinearPrecision, projection
from deltanet_jax.ops.api import Choice, linear_attention, step
from deltanet_jax.ops.signature import ConstructorSignature, checked_call

__all__ = ["AssociativeDeltaNet", "ChunkwiseDeltaNet", "DeltaNet", "RecurrentDeltaNet"]


class DeltaNet(nnx.Module):
    """Token mixer whose heads are delta-rule memories.

    ::

        q, k, v  = conv(x W_q), conv(x W_k), conv(x W_v)      causal, depthwise, `conv_size` taps
        q, k     = qk_norm(feature_map(q)), qk_norm(feature_map(k));  v = silu(v)
        beta     = sigmoid(x W_b)                             per value head
        g        = -exp(A_log) softplus(x W_a + dt_bias)      per head, or per key channel
        S_t      = (I - beta_t k_t^T k_t) Diag(exp(g_t)) S_{t-1} + beta_t k_t^T v_t
        y_t      = concat_heads(RMSNorm(K^-0.5 q_t S_t)) W_o

    There are no biases. The subclasses differ in one class attribute, `implementation`, and
    all have one tree of parameters: `nnx.update(b, nnx.state(a))` turns one into another. The
    variants without the delta rule are functions only (`gated_linear_attention` and so on).

    Example:
        >>> layer, x = DeltaNet(8, num_heads=2, rngs=nnx.Rngs(0)), jnp.ones((1, 5, 8))
        >>> y, cache = layer.extend(x, layer.init_cache(1))
        >>> y.shape, cache.state.shape, bool(jnp.allclose(y, layer(x), atol=1e-5))
        ((1, 5, 8), (1, 2, 4, 4), True)
    """

    __signature__ = ConstructorSignature()
    implementation: Choice = None

    @checked_call
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        expand_v: float = 1.0,
        num_v_heads: int | None = None,
        gate: str = "none",
        use_beta: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int | None = 4,
        feature_map: str = "silu",
        dpfp_nu: int = 1,
        qk_norm: str = "l2",
        use_output_gate: bool = False,
        output_gate_activation: str = "silu",
        norm_eps: float = 1e-5,
        chunk_size: int | None = None,
        implementation: Choice = None,
        context_axis: str | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: LinearPrecision = None,
        kernel_init: nnx.Initializer = nnx.initializers.lecun_normal(),
        rngs: nnx.Rngs,
    ) -> None:
        """Make a layer; parameters start as `kernel_init` says, `lecun_normal` by default.

        Args:
            hidden_size: Channels of the input and of the output.
            num_heads: Heads `H` of queries and keys.
            head_dim: Channels per key head; `hidden_size // num_heads` by default.
            expand_v: Channels per value head, as a multiple of `head_dim`.
            num_v_heads: Heads `HV` of values, a multiple of `num_heads`, and as many by
                default; each has its own state.
            gate: `"none"`, `"scalar"` (one decay per value head: Gated DeltaNet) or
                `"vector"` (one per key channel, through a bottleneck of `head_dim`: KDA).
            use_beta: Learn the write strength; otherwise it is 1 (2 with `allow_neg_eigval`).
            allow_neg_eigval: Double the write strength to (0, 2).
            conv_size: Taps of the convolutions, or `None` for none.
            feature_map: `"silu"`, `"relu"`, `"elu"` (plus one), `"identity"`, `"dpfp"`.
            dpfp_nu: With `"dpfp"`, its order: the key dim is `2 * dpfp_nu * head_dim`.
            qk_norm: `"l2"`, `"sum"` or `"none"`.
            use_output_gate: Multiply the normalised output by `silu(x W_g)`.
            output_gate_activation: `"silu"`, or `"sigmoid"` in its place.
            norm_eps: Epsilon of the output norm.
            chunk_size: Tokens per chunk; each implementation has its default.
            implementation: Overrides the class attribute; see `linear_attention`.
            context_axis: Mesh axis that the time axis is sharded over: of the mesh set by
                `jax.set_mesh`, or of a surrounding `shard_map`. Devices then exchange maps of
                the state and the convolutions' last inputs, never activations. Every mesh axis
                must divide what it shards, and there is no `mask`.
            dtype: Dtype of computation; by default what input and parameters promote to. States,
                norms and gates are float32 in any case.
            param_dtype: Dtype of parameters, except `A_log` and `dt_bias`, which are float32.
            precision: Precision of matrix products.
            kernel_init: Initialiser of the projections.
            rngs: Source of randomness, stream `params`.

        Raises:
            ValueError: If an option has a value it cannot have; the message names it.
        """
        checks.check_rngs(rngs)
        self.options = LayerOptions(
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            expand_v=expand_v,
            num_v_heads=num_v_heads,
            gate=gate,
            use_beta=use_beta,
            allow_neg_eigval=allow_neg_eigval,
            conv_size=conv_size,
            feature_map=feature_map,
            dpfp_nu=dpfp_nu,
            qk_norm=qk_norm,
            use_output_gate=use_output_gate,
            output_gate_activation=output_gate_activation,
            norm_eps=norm_eps,
            chunk_size=chunk_size,
        )
        if implementation is not None:
            self.implementation = check_implementation(implementation)
        self.context_axis = context_axis
        self.dtype = None if dtype is None else checks.check_dtype("dtype", dtype)
        self.param_dtype = checks.check_dtype("param_dtype", param_dtype)
        self.precision = precision
        self._make_parameters(
            partial(
                projection,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                precision=precision,
                kernel_init=kernel_init,
                rngs=rngs,
            ),
            rngs,
        )

    def _make_parameters(self, linear: "partial[nnx.Linear]", rngs: nnx.Rngs) -> None:
        o = self.options
        D, HV = o.hidden_size, o.value_heads
        keys, values = o.num_heads * o.width, HV * o.value_dim
        self.q_proj = linear(D, keys, (EMBED, HEADS))
        self.k_proj = linear(D, keys, (EMBED, HEADS))
        self.v_proj = linear(D, values, (EMBED, HEADS))
        if o.conv_size is not None:
            conv = partial(
                ShortConvolution, width=o.conv_size, param_dtype=self.param_dtype, rngs=rngs
            )
            self.q_conv, self.k_conv, self.v_conv = conv(keys), conv(keys), conv(values)
        if o.use_beta:
            self.b_proj = linear(D, HV, (EMBED, HEADS))
        if o.gate == "scalar":
            self.a_proj = linear(D, HV, (EMBED, HEADS))
            self.decay = DecayParameters((HV,), rngs=rngs)
        elif o.gate == "vector":
            self.a_down_proj = linear(D, o.width, (EMBED, None))
            self.a_up_proj = linear(o.width, HV * o.key_dim, (None, HEADS))
            self.decay = DecayParameters((HV, o.key_dim), rngs=rngs)
        if o.use_output_gate:
            self.g_proj = linear(D, values, (EMBED, HEADS))
        self.o_norm = RMSNorm(o.value_dim, eps=o.norm_eps, param_dtype=self.param_dtype)
        self.o_proj = linear(values, D, (HEADS, EMBED))

    @checked_call
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Mix whole sequences from a zero state.

        Args:
            x: Inputs, `[B, T, hidden_size]`.
            segment_ids: Integers; state and convolution restart wherever the id changes.
            mask: True for real tokens. The others act as if they were absent, wherever they
                stand, whatever they hold; their outputs are zero. With `segment_ids` too,
                the ids of the real tokens alone count.

        Raises:
            ValueError: If a shape or dtype is wrong; the message names the argument.
        """
        return self._apply(x, None, segment_ids, mask)[0]

    def init_cache(self, batch_size: int) -> DeltaNetCache:
        """The cache before the first token."""
        o = self.options
        B = checks.check_batch_size(batch_size)
        dtype = self.dtype or self.param_dtype
        state_dtype = common_dtype(dtype, jnp.float32)
        state = jnp.zeros((B, o.value_heads, o.key_dim, o.value_dim), state_dtype)
        if o.conv_size is None:
            return DeltaNetCache(state)
        past = o.conv_size - 1
        keys, values = o.num_heads * o.width, o.value_heads * o.value_dim
        # Three arrays, though two are equal: the same buffer cannot be donated twice.
        return DeltaNetCache(state, *(jnp.zeros((B, past, n), dtype) for n in (keys, keys, values)))

    @checked_call
    def extend(
        self,
        x: Float[Array, "B T D"],
        cache: DeltaNetCache,
        *,
        mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], DeltaNetCache]:
        """Continue from a cache with any number of tokens.

        A sequence in pieces gives what it gives whole. One token runs in the recurrent form,
        more in the layer's own.

        Returns:
            Outputs, and the cache after these tokens; masked tokens leave it as it is.

        Raises:
            ValueError: If a shape or dtype is wrong; the message names the argument.
        """
        x = checks.check_input(x, self.options.hidden_size)
        checks.check_cache(cache, jax.eval_shape(partial(self.init_cache, x.shape[0])))
        y, new = self._apply(x, cache, None, mask)
        return y, jax.tree.map(lambda old, part: part.astype(old.dtype), cache, new)

    def _apply(
        self,
        x: Float[Array, "B T D"],
        cache: DeltaNetCache | None,
        segment_ids: Int[Array, "B T"] | None,
        mask: Bool[Array, "B T"] | None,
    ) -> tuple[Float[Array, "B T D"], DeltaNetCache]:
        """Check, and mix here or along the context axis."""
        x = checks.check_input(x, self.options.hidden_size)
        segment_ids = checks.check_per_token("segment_ids", segment_ids, x.shape[:2], np.integer)
        mask = checks.check_per_token("mask", mask, x.shape[:2], np.bool_)
        kernel = getattr(self.q_proj, "kernel", None)  # a replaced part may have none
        if self.dtype is None and kernel is not None:
            # As the projections would, which strict promotion forbids.
            x = x.astype(common_dtype(x, kernel[...]))
        axis = self.context_axis
        if axis is None or (cache is not None and x.shape[1] == 1):
            return mix_here(self, x, cache, segment_ids, mask)
        if mask is not None:
            raise ValueError(
                "`mask` does not go with `context_axis`: pad on the right and leave it out, "
                "since no token sees a later one"
            )
        return mix_along_context(self, axis, x, cache, segment_ids)

    def _mix(
        self,
        x: Float[Array, "B T D"],
        cache: DeltaNetCache | None,
        segment_ids: Int[Array, "B T"] | None,
        mask: Bool[Array, "B T"] | None,
        axis: str | None = None,
    ) -> tuple[Float[Array, "B T D"], DeltaNetCache]:
        """Mix the tokens of this device; along `axis` they are its shard."""
        packing = None if mask is None else pack(mask)
        if packing is not None:
            x = packing.gather(x)
        runs = None
        if segment_ids is not None:
            runs = runs_of(segment_ids, packing) if axis is None else self._runs(segment_ids, axis)
        q, k, v, inputs = self._heads(x, cache, runs, packing, axis)
        g, beta = self._gates(x, k)
        if packing is not None:
            # Behind the real tokens: nothing is read, written or forgotten.
            q, k, v, g, beta = jax.tree.map(packing.zero_padding, (q, k, v, g, beta))
        tokens: dict[str, Any] = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        if cache is not None and axis is None and x.shape[1] == 1:
            o, state = step(**jax.tree.map(lambda y: y[:, 0], tokens), state=cache.state)
            o = o[:, None]
        else:
            operator = linear_attention
            if axis is not None:
                operator = partial(parallel.linear_attention, axis_name=axis)
            o, state = operator(
                **tokens,
                initial_state=None if cache is None else cache.state,
                segment_ids=runs if axis is None else segment_ids,
                chunk_size=self.options.chunk_size,
                implementation=self.implementation,
                precision=self.precision,
            )
        y = self._output(o, x)
        return y if packing is None else packing.scatter(y), DeltaNetCache(state, *inputs)

    def _runs(self, segment_ids: Int[Array, "B T"], axis: str) -> Int[Array, "B W-1+T"]:
        """Runs of a shard's tokens and of those that its convolutions look back to."""
        past = (self.options.conv_size or 1) - 1
        first = jnp.repeat(segment_ids[:, :1], past, axis=1)
        before = parallel.halo(segment_ids, past, axis, first)
        return runs_of(jnp.concatenate([before, segment_ids], axis=1))

    def _heads(
        self,
        x: Float[Array, "B T D"],
        cache: DeltaNetCache | None,
        runs: Int[Array, "B T"] | None,
        packing: Packing | None,
        axis: str | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, ...]]:
        """Queries, keys and values per head, and the convolutions' part of the next cache."""
        o = self.options
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        heads = (o.num_heads, o.num_heads, o.value_heads)
        features = partial(key_features, options=o)
        activations = (features, features, value_features)
        convs: tuple[ShortConvolution | None, ...] = (None, None, None)
        past: tuple[jax.Array | None, ...] = (None, None, None)
        if o.conv_size is not None:
            convs = (self.q_conv, self.k_conv, self.v_conv)
            past = past if cache is None else cache[1:]
            if axis is not None:
                look_back = partial(parallel.halo, width=o.conv_size - 1, axis_name=axis)
                past = tuple(
                    look_back(y, first=before) for y, before in zip(projected, past, strict=True)
                )
        q, k, v = map(
            partial(activate_heads, runs=runs), projected, convs, past, heads, activations
        )
        if cache is None or o.conv_size is None:
            return q, k, v, ()
        lengths = None if packing is None else packing.lengths
        inputs = [
            next_inputs(y, o.conv_size, before, lengths)
            for y, before in zip(projected, past, strict=True)
            if before is not None
        ]
        if axis is not None:
            inputs = [parallel.from_last(y, axis) for y in inputs]
        return q, k, v, tuple(inputs)

    def _gates(
        self, x: Float[Array, "B T D"], k: Float[Array, "B T H K"]
    ) -> tuple[jax.Array | None, jax.Array]:
        """Log-decay or `None`, and write strength."""
        o = self.options
        g = None
        if o.gate == "scalar":
            g = self.decay(self.a_proj(x))
        elif o.gate == "vector":
            a = self.a_up_proj(self.a_down_proj(x))
            g = self.decay(a.reshape(*a.shape[:2], o.value_heads, o.key_dim))
        logits = self.b_proj(x) if o.use_beta else None
        beta = write_strength(
            logits, (*x.shape[:2], o.value_heads), allow_neg_eigval=o.allow_neg_eigval
        )
        if o.allow_neg_eigval and o.qk_norm == "l2":
            beta = bounded_strength(beta, k)
        return g, beta

    def _output(
        self, o: Float[Array, "B T HV V"], x: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        y = self.o_norm(o).reshape(*o.shape[:2], o.shape[2] * o.shape[3])
        if self.options.use_output_gate:
            y = y * OUTPUT_GATES[self.options.output_gate_activation](self.g_proj(x))
        return self.o_proj(y)


class RecurrentDeltaNet(DeltaNet):
    """`DeltaNet` token by token: the least memory, the longest chain."""

    implementation = "recurrent"


class AssociativeDeltaNet(DeltaNet):
    """`DeltaNet` by an associative scan over token maps: the shortest chain, the most memory."""

    implementation = "associative"


class ChunkwiseDeltaNet(DeltaNet):
    """`DeltaNet` by chunks in the WY form: matrix products, and one state per chunk."""

    implementation = "chunkwise"
