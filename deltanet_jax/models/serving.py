"""Continuous batching: requests come and go while one batch of slots keeps running.

Every slot is a row of one cache whose size does not depend on how much its request has read,
so there is no memory to page and none to run out of. One compiled program reads any number of
tokens in every slot up to its width: a prompt's next piece in one, a sampled token in another,
nothing in a third. It is compiled for two widths, a piece of a prompt and one token.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from deltanet_jax.core import checks
from deltanet_jax.layers.cache import reset_slots
from deltanet_jax.models.delta_net_lm import DeltaNetLM, LMCache
from deltanet_jax.models.generate import check_sampling, last_real, sample

__all__ = ["Request", "Server"]


@dataclass(eq=False)
class Request:
    """A prompt, and what has been sampled after it; equal to itself alone."""

    prompt: np.ndarray  # int [T], T >= 1
    num_tokens: int
    tokens: list[int] = field(default_factory=list)
    unread: deque[int] = field(default_factory=deque)  # what its slot has still to read

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.num_tokens


class Server:
    """Serves requests of any lengths from a fixed number of slots; memory is constant.

    Example:
        >>> config = DeltaNetConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=2)
        >>> server = Server(DeltaNetLM(config, rngs=nnx.Rngs(0)), num_slots=2, prefill=4)
        >>> requests = [server.submit(prompt, 3) for prompt in ([1, 2], [3], [4, 5, 6])]
        >>> server.run()
        >>> [len(request.tokens) for request in requests]
        [3, 3, 3]
    """

    def __init__(
        self,
        model: DeltaNetLM,
        num_slots: int,
        *,
        prefill: int = 64,
        temperature: float = 0.0,
        top_k: int | None = None,
        key: Key[Array, ""] | None = None,
    ) -> None:
        """Set up empty slots.

        Args:
            model: The model; its parameters are read once, here.
            num_slots: Requests that run at a time.
            prefill: Tokens of a prompt that one step reads.
            temperature: Divides the logits; 0 takes the most likely token.
            top_k: Sample among this many most likely tokens; among all by default.
            key: Source of randomness; needed unless `temperature` is 0.

        Raises:
            ValueError: If an argument is out of range; the message names it.
        """
        check_sampling(temperature, top_k, model.config.vocab_size)
        if key is None:
            if temperature != 0:
                raise ValueError("`key` is required unless `temperature` is 0; got None")
            key = jax.random.key(0)
        self.prefill = checks.whole("prefill", prefill, least=1)
        self.slots: list[Request | None] = [None] * checks.whole("num_slots", num_slots, least=1)
        self._fresh = np.zeros(len(self.slots), bool)  # slots whose state is not reset yet
        self.waiting: deque[Request] = deque()
        self.sampled = 0  # tokens, of all requests
        self._key = key
        graph, self._state = nnx.split(model)
        self._advance = partial(_advance, graph=graph, temperature=temperature, top_k=top_k)
        self._vocab = model.config.vocab_size
        self._cache = model.init_cache(num_slots)

    def submit(self, prompt: Sequence[int] | np.ndarray, num_tokens: int) -> Request:
        """Queue a request; its `tokens` fill up as `step` is called.

        Raises:
            ValueError: If the prompt is empty or holds what is no token, or `num_tokens` is not
                positive.
        """
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"`prompt` must be integers [T] with T >= 1; got {ids.dtype} {ids.shape}"
            )
        if ids.min() < 0 or ids.max() >= self._vocab:
            raise ValueError(
                f"`prompt` must hold tokens in [0, {self._vocab}); got {ids.min()} to {ids.max()}"
            )
        request = Request(
            ids, checks.whole("num_tokens", num_tokens, least=1), unread=deque(ids.tolist())
        )
        self.waiting.append(request)
        return request

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting) or any(r is not None for r in self.slots)

    @property
    def reads_prompts(self) -> bool:
        """Whether the next step reads more than one token of any request."""
        free = sum(r is None for r in self.slots)
        running = [r for r in self.slots if r is not None]
        return any(len(r.unread) > 1 for r in (*running, *islice(self.waiting, free)))

    @property
    def cache_bytes(self) -> int:
        """Bytes of all slots; constant."""
        return sum(x.nbytes for x in jax.tree.leaves(self._cache))

    def step(self) -> list[Request]:
        """Read the next tokens of every slot, and sample; return finished requests."""
        self._admit()
        active = [r for r in self.slots if r is not None]
        if not active:
            return []
        width = self.prefill if any(len(r.unread) > 1 for r in active) else 1
        tokens = np.zeros((len(self.slots), width), np.int32)
        counts = np.zeros(len(self.slots), np.int32)
        for i, request in enumerate(self.slots):
            if request is not None:
                counts[i] = min(width, len(request.unread))
                tokens[i, : counts[i]] = list(islice(request.unread, int(counts[i])))
        next_key, key = jax.random.split(self._key)
        # Only where a request begins: it is one more pass over all states.
        if self._fresh.any():
            self._cache = _reset(self._cache, self._fresh)
        sampled, cache = self._advance(self._state, self._cache, tokens, counts, key)
        result = np.asarray(sampled)
        # No request has changed before this: what interrupts the step loses none of its tokens.
        self._key, self._cache = next_key, cache
        self._fresh[:] = False
        for request, count in zip(self.slots, counts, strict=True):
            for _ in range(count):
                request.unread.popleft()  # type: ignore[union-attr]
        return self._collect(result)

    def run(self) -> None:
        """Step until every request is done."""
        while self.busy:
            self.step()

    def _admit(self) -> None:
        """Give free slots to waiting requests."""
        for i, request in enumerate(self.slots):
            if request is None and self.waiting:
                self.slots[i], self._fresh[i] = self.waiting.popleft(), True

    def _collect(self, sampled: np.ndarray) -> list[Request]:
        finished = []
        for i, request in enumerate(self.slots):
            if request is None or request.unread:
                continue
            self.sampled += 1
            request.tokens.append(int(sampled[i]))
            request.unread.append(int(sampled[i]))
            if request.done:
                finished.append(request)
                self.slots[i] = None
        return finished


_reset = jax.jit(reset_slots, donate_argnames=("cache",))


@partial(jax.jit, static_argnames=("graph", "temperature", "top_k"), donate_argnames=("cache",))
def _advance(
    state: nnx.State[Any, Any],
    cache: LMCache,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
    key: Key[Array, ""],
    *,
    graph: nnx.GraphDef[DeltaNetLM],
    temperature: float,
    top_k: int | None,
) -> tuple[Int[Array, " B"], LMCache]:
    """Read `counts[i]` tokens in slot `i`, and sample."""
    model = nnx.merge(graph, state)
    mask = jnp.arange(tokens.shape[1]) < counts[:, None]
    features, cache = model.read(tokens, cache, mask=mask)
    logits: Float[Array, "B vocab"] = model.logits(last_real(features, mask))[:, 0]
    return sample(logits, key, temperature, top_k), cache
