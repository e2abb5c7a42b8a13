"""What is measured: the table of workloads, and what each op reads and writes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cunorm.dtypes import FLOATS

#: What ``Workload.copy_us`` and ``Workload.peer_us`` are.
RECORDED = (
    "recorded 2026-11-29 on an H200: copy, and the fastest of torch, torch.compile, Liger, "
    "quack and TileOPs, by the same method"
)

SHORT_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


@dataclass(frozen=True)
class Operand:
    """One input of an op and how it is drawn.

    Attributes
    ----------
    name : str
        The name under which peers find the array.
    extent : {"full", "row"}
        ``"full"``: the shape of ``x``; ``"row"``: the last axis of ``x``.
    mean, spread : float
        Of the random values.
    """

    name: str
    extent: str
    mean: float
    spread: float


@dataclass(frozen=True)
class Op:
    """The arrays of one op; ``outputs`` all have the shape and dtype of ``x``."""

    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]
    eps: float


_X = Operand("x", "full", 0.5, 1.0)
_RESIDUAL = Operand("residual", "full", 0.25, 1.0)
_WEIGHT = Operand("weight", "row", 1.0, 0.25)
_BIAS = Operand("bias", "row", 0.1, 0.25)
_SCALE = Operand("scale", "full", 1.0, 0.25)
_SHIFT = Operand("shift", "full", 0.1, 0.25)
_GATE = Operand("gate", "full", 0.5, 0.25)

OPS: dict[str, Op] = {
    "rms_norm": Op((_X, _WEIGHT), ("y",), 1e-6),
    "layer_norm": Op((_X, _WEIGHT, _BIAS), ("y",), 1e-5),
    "fused_add_rms_norm": Op((_X, _RESIDUAL, _WEIGHT), ("y", "residual_out"), 1e-6),
    "fused_add_layer_norm": Op((_X, _RESIDUAL, _WEIGHT, _BIAS), ("y", "residual_out"), 1e-5),
    "ada_layer_norm": Op((_X, _SCALE, _SHIFT), ("y",), 1e-5),
    "ada_layer_norm_zero": Op((_X, _SCALE, _SHIFT, _GATE), ("y",), 1e-5),
}


@dataclass(frozen=True)
class Workload:
    """One op on one shape and dtype.

    Attributes
    ----------
    op : str
        Key of `OPS`.
    shape : tuple of int
        Shape of ``x``.
    dtype : str
        NumPy name of the dtype of every array.
    copy_us, peer_us : float, optional
        Recorded microseconds, see `RECORDED`.
    peer : str
        Which peer was the fastest in the record.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    copy_us: float | None = None
    peer_us: float | None = None
    peer: str = ""

    @property
    def spec(self) -> Op:
        return OPS[self.op]

    @property
    def shape_text(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def label(self) -> str:
        return f"{self.op} {self.shape_text} {SHORT_DTYPES[self.dtype]}"

    @property
    def itemsize(self) -> int:
        return FLOATS[self.dtype].itemsize

    def shape_of(self, operand: Operand) -> tuple[int, ...]:
        return self.shape if operand.extent == "full" else self.shape[-1:]

    @property
    def input_bytes(self) -> int:
        """Bytes of one set of inputs, parameters included: what the rotation counts."""
        sizes = (math.prod(self.shape_of(operand)) for operand in self.spec.operands)
        return sum(sizes) * self.itemsize

    @property
    def bytes_moved(self) -> int:
        """Bytes that a call cannot avoid moving: each input read once, each output written once.

        A weight or bias of one row is left out, as in the recorded table: it is read once from
        memory and then served by the caches, and is noise beside ``x`` but for a single row.
        """
        full = sum(operand.extent == "full" for operand in self.spec.operands)
        return (full + len(self.spec.outputs)) * math.prod(self.shape) * self.itemsize


# op, shape, dtype, recorded copy, recorded fastest peer
WORKLOADS: tuple[Workload, ...] = (
    Workload("rms_norm", (2048, 4096), "bfloat16", 11.0, 10.8, "TileOPs"),
    Workload("rms_norm", (2048, 8192), "bfloat16", 18.4, 19.4, "TileOPs"),
    Workload("rms_norm", (2048, 16384), "bfloat16", 34.5, 35.7, "TileOPs"),
    Workload("rms_norm", (1, 4096), "bfloat16", 1.6, 2.1, "TileOPs"),
    Workload("rms_norm", (1, 16384), "bfloat16", 1.7, 2.8, "TileOPs"),
    Workload("rms_norm", (8192, 128), "bfloat16", 3.7, 3.3, "TileOPs"),
    Workload("rms_norm", (32768, 256), "bfloat16", 10.9, 9.8, "torch.compile"),
    Workload("rms_norm", (32768, 512), "bfloat16", 18.8, 17.9, "TileOPs"),
    Workload("rms_norm", (32768, 1024), "bfloat16", 34.5, 35.1, "torch.compile"),
    Workload("rms_norm", (32768, 2048), "bfloat16", 65.5, 66.3, "TileOPs"),
    Workload("rms_norm", (32768, 4096), "bfloat16", 128.0, 129.3, "Liger"),
    Workload("rms_norm", (32768, 8192), "bfloat16", 254.2, 250.3, "torch.compile"),
    Workload("rms_norm", (32768, 16384), "bfloat16", 502.6, 501.2, "TileOPs"),
    Workload("rms_norm", (32768, 32768), "bfloat16", 1003.5, 1000.5, "TileOPs"),
    Workload("rms_norm", (32768, 65536), "bfloat16", 1994.8, 1978.0, "TileOPs"),
    Workload("rms_norm", (16384, 131072), "bfloat16", 1995.7, 2003.7, "TileOPs"),
    Workload("rms_norm", (8192, 262144), "bfloat16", 1995.2, 2109.4, "TileOPs"),
    Workload("rms_norm", (32768, 4096), "float32", 256.1, 250.4, "torch.compile"),
    Workload("rms_norm", (32768, 4095), "bfloat16", 128.0, 178.6, "TileOPs"),
    Workload("layer_norm", (2048, 4096), "bfloat16", 11.0, 11.2, "TileOPs"),
    Workload("layer_norm", (2048, 8192), "bfloat16", 18.5, 22.3, "TileOPs"),
    Workload("layer_norm", (2048, 16384), "bfloat16", 34.5, 42.7, "TileOPs"),
    Workload("layer_norm", (1, 4096), "bfloat16", 1.6, 2.4, "TileOPs"),
    Workload("layer_norm", (2048, 5120), "float32", 22.6, 24.7, "TileOPs"),
    Workload("layer_norm", (1024, 1152), "bfloat16", 3.9, 3.8, "TileOPs"),
    Workload("layer_norm", (32768, 1024), "bfloat16", 33.7, 35.5, "torch.compile"),
    Workload("layer_norm", (32768, 1024), "float32", 65.4, 66.4, "TileOPs"),
    Workload("layer_norm", (32768, 8192), "bfloat16", 254.2, 262.6, "TileOPs"),
    Workload("layer_norm", (8192, 65536), "float32", 1003.8, 1388.5, "quack"),
    Workload("layer_norm", (1000003, 64), "float32", 124.4, 122.8, "torch.compile"),
    Workload("layer_norm", (8192, 4096), "float64", 127.6, 133.2, "Liger"),
    Workload("fused_add_rms_norm", (2048, 4096), "bfloat16", 18.9, 19.0, "TileOPs"),
    Workload("fused_add_rms_norm", (2048, 8192), "bfloat16", 34.4, 35.7, "TileOPs"),
    Workload("fused_add_rms_norm", (1, 4096), "bfloat16", 1.7, 2.1, "TileOPs"),
    Workload("fused_add_rms_norm", (32768, 4096), "bfloat16", 254.1, 260.9, "TileOPs"),
    Workload("fused_add_rms_norm", (2048, 16384), "bfloat16", 65.8, 68.2, "TileOPs"),
    Workload("fused_add_layer_norm", (2048, 4096), "bfloat16", 18.8, 19.7, "TileOPs"),
    Workload("fused_add_layer_norm", (2048, 8192), "bfloat16", 34.4, 36.8, "TileOPs"),
    Workload("fused_add_layer_norm", (1, 4096), "bfloat16", 1.7, 2.3, "TileOPs"),
    Workload("fused_add_layer_norm", (32768, 4096), "bfloat16", 254.1, 261.9, "TileOPs"),
    Workload("fused_add_layer_norm", (2048, 16384), "bfloat16", 66.0, 75.0, "TileOPs"),
    Workload("ada_layer_norm", (1024, 1152), "bfloat16", 5.2, 5.6, "TileOPs"),
    Workload("ada_layer_norm", (2048, 4096), "bfloat16", 18.8, 18.8, "TileOPs"),
    Workload("ada_layer_norm", (1, 4096), "bfloat16", 1.7, 2.5, "TileOPs"),
    Workload("ada_layer_norm", (32768, 1152), "bfloat16", 73.3, 83.8, "TileOPs"),
    Workload("ada_layer_norm_zero", (1024, 1152), "bfloat16", 5.8, 6.2, "TileOPs"),
    Workload("ada_layer_norm_zero", (2048, 4096), "bfloat16", 22.3, 22.4, "torch.compile"),
    Workload("ada_layer_norm_zero", (1, 4096), "bfloat16", 1.7, 2.6, "TileOPs"),
    Workload("ada_layer_norm_zero", (32768, 1152), "bfloat16", 91.5, 105.0, "TileOPs"),
)


def select(filters: list[str], workloads: tuple[Workload, ...] = WORKLOADS) -> list[Workload]:
    """The workloads that match any of `filters`; all of them when there is none.

    A filter matches when each of its words does: a word that is the name of an op matches that
    op alone, any other word matches as a part of the label or of the dtype's full name.
    """
    if not filters:
        return list(workloads)
    return [w for w in workloads if any(_matches(w, text) for text in filters)]


def _matches(workload: Workload, text: str) -> bool:
    haystack = f"{workload.label} {workload.dtype}".lower()
    for word in text.lower().split():
        if word in OPS:
            if word != workload.op:
                return False
        elif word not in haystack:
            return False
    return True
