"""Language models of a few numbers: equal sizes, a cache that continues, a run that resumes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deltanet_jax.models import DeltaNetConfig
from experiments import checkpoint, language_model, sweep
from experiments.command_line import parse
from experiments.language_model import ABLATIONS, ARMS, PRESETS, LanguageModel
from experiments.models import MEMORIES, make_model
from experiments.record import read_rows
from experiments.tasks.corpus import write_corpus

TINY = LanguageModel(
    seeds=2, steps=60, block=20, batch_size=4, arms=("delta",), ablations=(), contexts=(8, 16),
    length=16, test_windows=4, hidden_size=8, heads=1, layers=1, sample_bytes=5,
    decode_tokens=2, rates=(1e-2,),
)  # fmt: skip
TEXT = b"abcabcab" * 200
SHAPE = DeltaNetConfig(vocab_size=11, hidden_size=8, num_layers=1, num_heads=2)


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    (directory / "one").write_bytes(TEXT)
    return replace(TINY, text=(str(directory / "one"),), results=directory)


@pytest.fixture(scope="module", autouse=True)
def compile_once():
    """Programs depend on the case alone, and every run here has the same."""
    compiled, compile_case = {}, sweep._compile

    def cached(options, case):
        if case.title not in compiled:
            compiled[case.title] = compile_case(options, case)
        return compiled[case.title]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "_compile", cached)
        yield


@pytest.fixture(scope="module")
def whole(options):
    assert language_model.run(replace(options, name="whole")) == 0
    return options.results / "language-model" / "whole"


def rows(directory, kind):
    return [row for row in read_rows(directory / "metrics.jsonl") if row["kind"] == kind]


def test_text_that_repeats_is_learned(whole):
    (result,) = rows(whole, "result")
    # With no context three letters of these shares take 1.56 bits; with it, none.
    assert all(lane["bits"] < 0.5 for lane in result["lanes"])
    assert all(set(lane["sample"]) <= set(range(256)) for lane in result["lanes"])
    assert len(result["lanes"]) == 2


def test_only_the_cache_of_keys_and_values_grows(whole):
    sizes = {(r["memory"], r["context"]): r["bytes"] for r in rows(whole, "decode")}
    assert sizes["delta", 16] == sizes["delta", 8]
    token = 2 * 4 * TINY.hidden_size * TINY.layers
    assert sizes["softmax", 16] - sizes["softmax", 8] == 8 * token
    assert (whole / "decoding.png").exists()
    assert (whole / "language_model.pdf").exists()


def test_a_killed_run_goes_on_as_the_unbroken_one(options, whole, monkeypatch):
    save = checkpoint.save

    def die(path, state, step):
        if step == 40:
            raise SystemExit("killed")
        save(path, state, step)

    broken = options.results / "language-model" / "broken"
    monkeypatch.setattr(checkpoint, "save", die)
    with pytest.raises(SystemExit):
        language_model.run(replace(options, name="broken", contexts=()))
    monkeypatch.setattr(checkpoint, "save", save)
    assert language_model.run(LanguageModel(resume=broken)) == 0
    losses = [{r["step"]: r["loss"] for r in rows(d, "train")} for d in (broken, whole)]
    assert losses[0] == losses[1]
    assert rows(broken, "result")[0]["lanes"] == rows(whole, "result")[0]["lanes"]


def test_the_models_of_the_gpu_preset_have_one_size(monkeypatch):
    options, counts = PRESETS["gpu"], {}
    count = language_model.parameters
    monkeypatch.setattr(
        language_model, "parameters", lambda case: counts.setdefault(case.title, count(case))
    )
    split = language_model.Split(np.zeros(2000, np.uint8), np.zeros(2000, np.uint8))
    language_model.cases(options, split)
    assert set(counts) == set(options.arms + options.ablations)
    assert max(counts.values()) < 1.005 * min(counts.values())


def test_models_of_other_sizes_or_names_are_refused(monkeypatch):
    split = language_model.Split(np.zeros(2000, np.uint8), np.zeros(2000, np.uint8))
    for change in ({"arms": ("mamba",)}, {"ablations": ("delta",)}, {"test_windows": 3}):
        with pytest.raises(ValueError, match="arms|ablations|models|test_windows"):
            language_model.cases(replace(TINY, **change), split)
    monkeypatch.setattr(language_model, "SAME_SIZE", 1e-4)
    with pytest.raises(ValueError, match="one size"):
        language_model.cases(replace(TINY, arms=("linear", "gated-delta")), split)


@pytest.mark.parametrize(
    ("memory", "conv_size"), [("softmax", None), ("softmax", 4), ("linear", 4)]
)
def test_a_cache_continues_what_the_whole_sequence_gives(memory, conv_size):
    model = make_model(replace(SHAPE, conv_size=conv_size), memory, nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 11)
    if memory == "softmax":
        cache = tuple(block.mixer.init_cache(2, 9) for block in model.blocks)
    else:
        cache = model.init_cache(2)
    first, cache = model.extend(tokens[:, :5], cache)
    second, cache = model.extend(tokens[:, 5:], cache)
    pieces = jnp.concatenate([first, second], axis=1)
    np.testing.assert_allclose(pieces, model(tokens), rtol=1e-4, atol=1e-5)


def test_the_sum_adds_and_does_not_correct():
    """One token three times: three times the state of once, and beta has no part in it."""
    model = make_model(replace(SHAPE, conv_size=None), "linear", nnx.Rngs(0))
    mixer = model.blocks[0].mixer
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(1), (1, 1, 8)), (1, 3, 8))
    _, cache = mixer.extend(x, mixer.init_cache(1))
    _, once = mixer.extend(x[:, :1], mixer.init_cache(1))
    np.testing.assert_allclose(cache.state, 3 * once.state, rtol=1e-5)
    assert not hasattr(mixer, "b_proj")
    assert set(MEMORIES) == {arm.memory for arm in ARMS.values()}
    assert all(arm.memory == "delta" for arm in ABLATIONS.values())


def test_a_corpus_and_a_directory_hold_the_same_text(tmp_path):
    rng = np.random.default_rng(0)
    files = {f"{i}.txt": rng.integers(0, 256, 300).astype(np.uint8) for i in range(4)}
    (tmp_path / "files").mkdir()
    for name, data in files.items():
        (tmp_path / "files" / name).write_bytes(data.tobytes())
    write_corpus(tmp_path / "corpus", files.values())
    texts = [
        language_model.read(replace(TINY, text=(str(tmp_path / name),), text_bytes=1000))[0]
        for name in ("files", "corpus")
    ]
    assert texts[0].sha256 == texts[1].sha256
    assert len(texts[0].data) == 1000
    write_corpus(tmp_path / "words", [np.arange(300)], dtype="uint16")
    for path, message in (("words", "bytes"), ("files/0.txt", "more than")):
        with pytest.raises(ValueError, match=message):
            language_model.read(replace(TINY, text=(str(tmp_path / path),)))


def test_the_command_line_takes_the_presets_defaults():
    assert parse(["language-model"]) == PRESETS["cpu"]
    found = parse(["language-model", "--preset", "gpu", "--arms", "--ablations", "--seed", "3"])
    assert found == replace(PRESETS["gpu"], arms=(), ablations=(), seed=3)
