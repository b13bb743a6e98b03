"""Properties of a chip that the Hopper kernels use."""

import jax

__all__ = ["SMS_OF_H200", "sm_count"]

SMS_OF_H200 = 132


def sm_count() -> int:
    """Return the number of SMs of the GPU that a call is traced for.

    A device that is only described says it itself: the abstract device of the mesh that is set.
    Else it is the number of the GPU in this machine. Without one it is an H200's, so that the
    interpreter cuts a call as that GPU would.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.num_cores is not None:
        return int(described.num_cores)
    if jax.default_backend() != "gpu":
        return SMS_OF_H200
    return int(getattr(jax.devices()[0], "core_count", SMS_OF_H200))
