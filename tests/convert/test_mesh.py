"""Loading inside `jax.set_mesh`: as without it, and sharded by the rules that are given."""

import contextlib

import chex
import jax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from deltanet_jax.convert import load_fla, load_qwen3_next
from deltanet_jax.models.sharding import RULES, make_mesh
from tests.convert.directories import CONFIGS, random_tensors, write

LOADERS = {
    "delta_net": lambda path: load_fla(path).blocks[0].mixer,
    "gated_deltanet": lambda path: load_fla(path).blocks[0].mixer,
    "qwen3_next": lambda path: load_qwen3_next(path, layers=[0])[0],
}
MESHES = {
    "auto": lambda: make_mesh(data=2, fsdp=4),
    "explicit": lambda: make_mesh(data=2, fsdp=4, explicit=True),
    "foreign": lambda: jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)),
}


@pytest.mark.parametrize("rules", [(), RULES], ids=["no-rules", "rules"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_checkpoint_is_loaded_inside_a_mesh(tmp_path, kind, mesh, rules):
    if rules and mesh == "foreign":
        rules = (("embed", "x"), ("heads", None), ("mlp", None), ("vocab", None))
    path = write(tmp_path / "x", CONFIGS[kind], random_tensors(kind))
    plain = LOADERS[kind](path)
    given = nnx.logical_axis_rules(rules) if rules else contextlib.nullcontext()
    with jax.set_mesh(MESHES[mesh]()), given:
        mixer = LOADERS[kind](path)
    chex.assert_trees_all_equal(*(nnx.to_pure_dict(nnx.state(x)) for x in (mixer, plain)))
    kernel = mixer.q_proj.kernel[...]
    assert kernel.sharding.device_set == set(jax.devices())
    wanted = ("fsdp", "heads") if mesh != "foreign" else ("x", None)
    if not rules:  # the mesh may have an axis of this very name
        wanted = (None, "heads" if mesh != "foreign" else None)
    assert kernel.sharding.spec == PartitionSpec(*wanted)


def test_a_tensor_that_a_mesh_axis_does_not_divide_is_named(tmp_path):
    path = write(tmp_path / "x", CONFIGS["delta_net"], random_tensors("delta_net"))
    mesh, rules = make_mesh(heads=2), nnx.logical_axis_rules(RULES)
    with jax.set_mesh(mesh), rules, pytest.raises(ValueError, match=r"model\.embeddings\.weight"):
        load_fla(path)
