"""Every collective in a compiled program, including the branches of conditionals."""

from lbopt.plan import HloProgram
from lbopt.plan._collectives import OPS, first_group


def exchanges(text, num_devices):
    """Return sorted (operation, dtype, elements of the result, participating devices)."""
    found = []
    for computation in HloProgram(text).computations.values():
        for one in computation.values():
            op = one.op.removesuffix("-start")
            if op not in OPS:
                continue

            arrays = one.arrays
            if one.op.endswith("-start") and op != "all-reduce":
                arrays = [array for array in arrays if array.dims or array.dtype != "u32"]
                arrays = arrays[len(arrays) // 2 :]

            elements = 0
            for array in arrays:
                size = 1
                for dim in array.dims:
                    size *= dim
                elements += size

            found.append(
                (op, arrays[0].dtype, elements, len(first_group(one.attributes, num_devices)))
            )

    return sorted(found)


def of_gradients(found, least=16):
    """Leave out scalars and other small sums, such as metrics and statistics per layer."""
    return [one for one in found if one[2] >= least]
