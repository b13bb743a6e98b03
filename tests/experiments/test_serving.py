"""The claims of `serving`."""

from experiments.serving import Serving, run


def test_memory_does_not_grow_with_context(tmp_path):
    options = Serving(
        contexts=(4, 40),
        slots=2,
        requests=3,
        num_tokens=3,
        prefill=8,
        hidden_size=8,
        num_layers=1,
        vocab_size=16,
        results=tmp_path,
    )
    short, long = run(options).rows
    assert long["prompt_tokens"] > 5 * short["prompt_tokens"]
    assert short["cache_bytes"] == long["cache_bytes"]
    assert short["tokens"] == long["tokens"] == 9
    assert min(r["tokens_per_second"] for r in (short, long)) > 0
