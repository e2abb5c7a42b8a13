"""The floating-point types that cunorm computes on, by name.

A dtype is its NumPy name everywhere in cunorm ("bfloat16" included), so that nothing here needs
ml_dtypes, CuPy or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Float:
    """A stored type: its size, its C type in the kernels, and what it accumulates in."""

    itemsize: int
    c_name: str
    accumulation: str
    mantissa_bits: int
    min_exponent: int  # of the smallest normal number


FLOATS = {
    "float16": Float(2, "__half", "float32", 10, -14),
    "bfloat16": Float(2, "__nv_bfloat16", "float32", 7, -126),
    "float32": Float(4, "float", "float32", 23, -126),
    "float64": Float(8, "double", "float64", 52, -1022),
}


def accumulation(name: str) -> str:
    """Name of the type in which values of type `name` are added up."""
    return FLOATS[name].accumulation


def name_of(dtype: Any) -> str:
    """Name of a dtype given as a name, a NumPy or CuPy dtype, a scalar type or a torch dtype."""
    if isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    if isinstance(name, str):
        return name
    return str(dtype).removeprefix("torch.")


def numpy_dtype(name: str) -> Any:
    """The NumPy dtype of that name; bfloat16 needs ml_dtypes."""
    import numpy

    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError as error:
            raise TypeError(
                "bfloat16 arrays need the package ml_dtypes: pip install ml_dtypes"
            ) from error
        return numpy.dtype(ml_dtypes.bfloat16)
    return numpy.dtype(name)
