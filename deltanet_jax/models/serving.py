"""Continuous batching: requests come and go while one batch of slots keeps running.

Every slot is a row of one cache whose size does not depend on how much its request has read,
so there is no memory to page and none to run out of. One compiled program reads any number of
tokens in every slot up to its width: a prompt's next piece in one, a sampled token in another,
nothing in a third. It is compiled for two widths, a piece of a prompt and one token.
"""

import threading
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
from jaxtyping import Array, Bool, Float, Int, Key

from deltanet_jax.core import checks
from deltanet_jax.layers.cache import reset_slots
from deltanet_jax.models.delta_net_lm import DeltaNetLM, LMCache
from deltanet_jax.models.generate import check_key, check_sampling, last_real, sample

__all__ = ["Request", "Server"]


@dataclass(eq=False)
class Request:
    """A prompt, and what has been sampled after it; equal to itself alone."""

    prompt: np.ndarray  # int [T], T >= 1
    num_tokens: int
    number: int = 0  # requests of its server before it
    tokens: list[int] = field(default_factory=list)
    unread: deque[int] = field(default_factory=deque)  # what its slot has still to read

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.num_tokens


class Server:
    """Serves requests of any lengths from a fixed number of slots; memory is constant.

    A lock guards every method: one thread may call `run` while others submit and cancel. They
    wait for the step that is running. A request's `tokens` may be read at any time.

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
            model: The model; its parameters are those of now, whatever it learns later. Arrays
                that are donated afterwards are lost to the server too.
            num_slots: Requests that run at a time.
            prefill: Tokens of a prompt that one step reads.
            temperature: Divides the logits; 0 takes the most likely token.
            top_k: Sample among this many most likely tokens; among all by default.
            key: Source of randomness; needed unless `temperature` is 0.

        Raises:
            ValueError: If an argument is out of range; the message names it.
        """
        temperature, top_k = check_sampling(temperature, top_k, model.config.vocab_size)
        self._key = check_key(key, temperature)
        self._lock = threading.RLock()
        self._submitted = 0
        self.prefill = checks.whole("prefill", prefill, least=1)
        self.slots: list[Request | None] = [None] * checks.whole("num_slots", num_slots, least=1)
        self._fresh = np.zeros(len(self.slots), bool)  # slots whose state is not reset yet
        self.waiting: deque[Request] = deque()
        self.sampled = 0  # tokens, of all requests
        graph, state = nnx.split(model)
        # Variables of its own: those of the model take new arrays when it is trained.
        self._state = jax.tree.map(lambda x: x, state)
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
        count = checks.whole("num_tokens", num_tokens, least=1)
        with self._lock:
            request = Request(ids, count, self._submitted, unread=deque(ids.tolist()))
            self._submitted += 1
            self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> bool:
        """Drop a request that waits or runs, and return whether it did; its tokens stay."""
        with self._lock:
            if request in self.waiting:
                self.waiting.remove(request)
                return True
            if request in self.slots:
                self.slots[self.slots.index(request)] = None
                return True
        return False

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
        """Read the next tokens of every slot, and sample; return finished requests.

        Raises:
            FloatingPointError: If logits of a request are not finite. The request is cancelled,
                and the others have made their step.
        """
        with self._lock:
            return self._step()

    def _step(self) -> list[Request]:
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
        sampled, finite, cache = self._advance(self._state, self._cache, tokens, counts, key)
        result, is_finite = np.asarray(sampled), np.asarray(finite)
        # No request has changed before this: what interrupts the step loses none of its tokens.
        self._key, self._cache = next_key, cache
        self._fresh[:] = False
        for request, count in zip(self.slots, counts, strict=True):
            for _ in range(count):
                request.unread.popleft()  # type: ignore[union-attr]
        broken = [r for r, ok in zip(self.slots, is_finite, strict=True) if r and not ok]
        for request in broken:
            self.cancel(request)
        finished = self._collect(result)
        if broken:
            names = ", ".join(
                f"request {r.number} (prompt of {len(r.prompt)}, {len(r.tokens)} sampled)"
                for r in broken
            )
            raise FloatingPointError(f"logits that are not finite; cancelled: {names}")
        return finished

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
) -> tuple[Int[Array, " B"], Bool[Array, " B"], LMCache]:
    """Read `counts[i]` tokens in slot `i`, and sample; also whether its logits are finite."""
    model = nnx.merge(graph, state)
    mask = jnp.arange(tokens.shape[1]) < counts[:, None]
    features, cache = model.read(tokens, cache, mask=mask)
    logits: Float[Array, "B vocab"] = model.logits(last_real(features, mask))[:, 0]
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    return sample(logits, key, temperature, top_k), finite, cache
