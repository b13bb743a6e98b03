"""config.json of flash-linear-attention's `delta_net` and `gated_deltanet`, and our own config."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from deltanet_jax.convert.files import shown
from deltanet_jax.core import checks
from deltanet_jax.models.config import DeltaNetConfig

__all__ = ["check_fields", "config_from_fla", "config_to_fla", "wrong_type"]

LARGEST = 2**31 - 1  # of a size, and of a product of two

# Their defaults (0.6.0), of what shapes the model and of what only one value here can be.
SHARED = {
    "hidden_size": 2048,
    "use_short_conv": True,
    "allow_neg_eigval": False,
    "conv_size": 4,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "delta_net": SHARED
    | {"expand_k": 1.0, "expand_v": 1.0, "num_heads": 16, "num_hidden_layers": 24}
    | {"use_gate": False, "use_beta": True, "qk_norm": "l2", "qk_activation": "silu"},
    "gated_deltanet": SHARED
    | {"expand_v": 2.0, "head_dim": 256, "num_heads": 6, "num_v_heads": None}
    | {"num_hidden_layers": 21, "use_gate": True, "output_gate_activation": "swish"},
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "qk_norm": ("l2", "sum"),
    "qk_activation": ("silu", "relu", "elu", "identity"),
    "output_gate_activation": ("swish", "silu", "sigmoid"),
    "hidden_act": ("swish", "silu"),
    "attn": (None,),
    "attnres_block_size": (None,),
    "conv_bias": (False,),
    "norm_first": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}
SIZES = (
    *("hidden_size", "conv_size", "vocab_size", "num_heads", "num_hidden_layers", "head_dim"),
    *("intermediate_size", "num_v_heads"),
)
RATIOS = ("hidden_ratio", "norm_eps", "expand_k", "expand_v")
FLAGS = ("use_short_conv", "allow_neg_eigval", "tie_word_embeddings", "use_gate", "use_beta")
# They say how it runs, is trained or is stored, not what it computes. `use_output_norm` is one:
# the norm is there whatever it says.
INERT = {
    *("_name_or_path", "architectures", "attn_mode", "auto_map", "bos_token_id"),
    *("chunk_size_feed_forward", "dtype", "elementwise_affine", "eos_token_id"),
    *("fuse_cross_entropy", "fuse_linear_cross_entropy", "fuse_norm", "fuse_swiglu"),
    *("id2label", "initializer_range", "is_encoder_decoder", "label2id"),
    *("max_position_embeddings", "model_type", "output_attentions", "output_hidden_states"),
    *("pad_token_id", "problem_type", "return_dict", "torch_dtype", "transformers_version"),
    *("use_cache", "use_l2warp", "use_output_norm"),
    # What every config of transformers can hold, above all for sampling.
    *("_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "bad_words_ids"),
    *("attn_implementation", "begin_suppress_tokens", "cross_attention_hidden_size"),
    *("decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping"),
    *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task"),
    *("forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "is_decoder"),
    *("length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups"),
    *("num_beams", "num_return_sequences", "output_scores", "prefix", "remove_invalid_values"),
    *("repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens"),
    *("task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder"),
    *("tokenizer_class", "top_k", "top_p", "torchscript", "typical_p", "use_bfloat16"),
}
ARCHITECTURES = {"delta_net": "DeltaNetForCausalLM", "gated_deltanet": "GatedDeltaNetForCausalLM"}


def config_from_fla(
    data: Mapping[str, Any], param_dtype: str, dtype: str | None
) -> tuple[DeltaNetConfig | None, list[str]]:
    """Our config, and every option that it cannot have; `None` if not even the shapes are known."""
    if wrong := wrong_type(data, tuple(DEFAULTS)):
        return None, wrong
    kind = data["model_type"]
    defaults = DEFAULTS[kind]
    said = {n: x for n, x in data.items() if x is not None}
    problems = [
        f"`{name}` is {shown(said[name])}, supported: {', '.join(map(repr, choices))}"
        for name, choices in CHOICES.items()
        if name in said and said[name] not in choices
    ]
    known = defaults.keys() | CHOICES.keys() | INERT
    problems += [
        f"`{n}` is an unknown option: {shown(said[n])}" for n in sorted(said.keys() - known)
    ]
    theirs = defaults | {n: data[n] for n in defaults if n in data}
    optional = ("hidden_ratio", *(n for n, x in defaults.items() if x is None))
    if wrong := check_fields(theirs, SIZES, RATIOS, FLAGS, optional):
        return None, problems + wrong
    try:
        return DeltaNetConfig(
            **_fields(kind, theirs), param_dtype=param_dtype, dtype=dtype
        ), problems
    except ValueError as error:
        return None, [*problems, str(error)]


def wrong_type(data: Mapping[str, Any], kinds: tuple[str, ...]) -> list[str]:
    """Return what is wrong with the type of a model, if it is none of these."""
    kind = data.get("model_type")
    if isinstance(kind, str) and kind in kinds:
        return []
    wanted = kinds[0] if len(kinds) == 1 else f"one of {', '.join(kinds)}"
    wrong = f"`model_type` must be {wanted}; got {shown(kind)}"
    if isinstance(inner := data.get("text_config"), dict):
        wrong += f", whose language model is in `text_config`: {shown(inner.get('model_type'))}"
    return [wrong]


def check_fields(
    data: Mapping[str, Any],
    sizes: Sequence[str],
    ratios: Sequence[str],
    flags: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> list[str]:
    """Return what is wrong with the values of these keys, as far as `data` has them."""
    kinds: list[tuple[Sequence[str], Callable[[str, object], object]]] = [
        (sizes, partial(checks.whole, least=1, most=LARGEST)),
        (ratios, partial(checks.number, above=0, most=LARGEST)),
        (flags, checks.flag),
    ]
    problems = []
    for names, check in kinds:
        for name in names:
            if name not in data or (data[name] is None and name in optional):
                continue
            try:
                check(name, data[name])
            except ValueError as error:
                problems.append(str(error))
    return problems


def _fields(kind: str, theirs: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = theirs["hidden_size"], theirs["num_heads"]
    fields = {
        "vocab_size": theirs["vocab_size"],
        "hidden_size": hidden,
        "num_layers": theirs["num_hidden_layers"],
        "num_heads": heads,
        "allow_neg_eigval": theirs["allow_neg_eigval"],
        "conv_size": theirs["conv_size"] if theirs["use_short_conv"] else None,
        "use_output_gate": theirs["use_gate"],
        "norm_eps": theirs["norm_eps"],
        "mlp_size": _mlp_size(hidden, theirs["hidden_ratio"], theirs["intermediate_size"]),
        "tie_embeddings": theirs["tie_word_embeddings"],
    }
    if kind == "delta_net":
        key = _per_head("expand_k", theirs["expand_k"], hidden, heads)
        value = _per_head("expand_v", theirs["expand_v"], hidden, heads)
        own = {
            "head_dim": key,
            "expand_v": value / key,
            "use_beta": theirs["use_beta"],
            "qk_norm": theirs["qk_norm"],
            "feature_map": theirs["qk_activation"],
        }
    else:
        act = theirs["output_gate_activation"]
        own = {
            "head_dim": theirs["head_dim"],
            "expand_v": theirs["expand_v"],
            "num_v_heads": theirs["num_v_heads"],
            "gate": "scalar",
            "output_gate_activation": "silu" if act == "swish" else act,
        }
    return _canonical(fields | own)


def _per_head(name: str, expand: float, hidden: int, heads: int) -> int:
    width = round(hidden * expand)
    if abs(width - hidden * expand) > 1e-6 * width or width % heads or not 0 < width <= LARGEST:
        raise ValueError(
            f"`{name}` times `hidden_size` must be a multiple of `num_heads`; "
            f"got {expand!r} times {hidden}, and {heads}"
        )
    return width // heads


def _mlp_size(hidden: int, ratio: float | None, size: int | None) -> int:
    """Their rule: 2/3 of `ratio * hidden`, rounded up to a multiple of 256."""
    if size is not None:
        return size
    return -(-int(hidden * (4 if ratio is None else ratio) * 2 / 3) // 256) * 256


def _canonical(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out options that equal our defaults, so that equal models have equal configs."""
    defaulted = DeltaNetConfig(**fields | {"mlp_size": None}).mlp_width
    if fields["head_dim"] * fields["num_heads"] == fields["hidden_size"]:
        fields["head_dim"] = None
    if fields.get("num_v_heads") == fields["num_heads"]:
        fields["num_v_heads"] = None
    if fields["mlp_size"] == defaulted:
        fields["mlp_size"] = None
    return fields


def config_to_fla(config: DeltaNetConfig) -> tuple[dict[str, Any], list[str]]:
    """Their config.json, and every option of ours that it cannot say."""
    c = config
    kind = "gated_deltanet" if c.gate == "scalar" else "delta_net"
    head = c.head_dim or c.hidden_size // c.num_heads
    theirs: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "torch_dtype": c.param_dtype,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_heads": c.num_heads,
        "allow_neg_eigval": c.allow_neg_eigval,
        "use_short_conv": c.conv_size is not None,
        "conv_size": c.conv_size or SHARED["conv_size"],
        "use_gate": c.use_output_gate,
        "norm_eps": c.norm_eps,
        "intermediate_size": c.mlp_width,
        "hidden_act": "swish",
        "tie_word_embeddings": c.tie_embeddings,
    }
    if kind == "gated_deltanet":
        wanted: dict[str, tuple[Any, ...]] = {
            "use_beta": (True,),
            "feature_map": ("silu",),
            "qk_norm": ("l2",),
        }
        theirs |= {"head_dim": head, "expand_v": c.expand_v, "num_v_heads": c.num_v_heads}
        act = c.output_gate_activation
        theirs["output_gate_activation"] = "swish" if act == "silu" else act
    else:
        wanted = {
            "gate": ("none",),
            "num_v_heads": (None, c.num_heads),
            "feature_map": CHOICES["qk_activation"],
            "qk_norm": CHOICES["qk_norm"],
        }
        if c.use_output_gate:
            wanted["output_gate_activation"] = ("silu",)
        width = c.num_heads * head
        theirs |= {
            "expand_k": width / c.hidden_size,
            "expand_v": width * c.expand_v / c.hidden_size,
            "use_beta": c.use_beta,
            "qk_norm": c.qk_norm,
            "qk_activation": c.feature_map,
        }
    return theirs, [
        f"`{name}` is {getattr(c, name)!r}, {kind} has {' or '.join(map(repr, choices))}"
        for name, choices in wanted.items()
        if getattr(c, name) not in choices
    ]
