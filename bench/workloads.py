"""What is measured: the table of workloads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from bench.ops import CHANNEL_OPS, OPS, ROW_OPS, Op, Operand
from cunorm.dtypes import FLOATS, accumulation

__all__ = [
    "CHANNEL_OPS",
    "CHANNEL_WORKLOADS",
    "OPS",
    "RECORDED",
    "ROW_OPS",
    "ROW_WORKLOADS",
    "UNRECORDED",
    "WORKLOADS",
    "Op",
    "Operand",
    "Workload",
    "select",
]

#: What ``Workload.copy_us`` and ``Workload.peer_us`` are.
RECORDED = (
    "recorded 2026-11-29 on an H200: copy, and the fastest of torch, torch.compile, Liger, "
    "quack and TileOPs, by the same method"
)

SHORT_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


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
    groups : int
        Of group norm.
    channels_last : bool
        Whether the channels, the second axis, are neighbours in memory.
    start : int
        The element of an aligned array at which inputs of the shape of ``x`` start.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    copy_us: float | None = None
    peer_us: float | None = None
    peer: str = ""
    groups: int = 0
    channels_last: bool = False
    start: int = 0

    @property
    def spec(self) -> Op:
        return OPS[self.op]

    @property
    def shape_text(self) -> str:
        text = "x".join(map(str, self.shape))
        text += f" g{self.groups}" if self.groups else ""
        text += " nhwc" if self.channels_last else ""
        return text + (f" from {self.start}" if self.start else "")

    @property
    def label(self) -> str:
        return f"{self.op} {self.shape_text} {SHORT_DTYPES[self.dtype]}"

    @property
    def itemsize(self) -> int:
        return FLOATS[self.dtype].itemsize

    @property
    def function(self) -> str:
        """Name of the op's function in `cunorm`."""
        return self.spec.function or self.op

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the function that are not arrays."""
        options = dict(self.spec.options)
        if self.spec.eps is not None:
            options["eps"] = self.spec.eps
        if self.function.removesuffix("_backward") in ("layer_norm", "rms_norm"):
            options["normalized_shape"] = self.shape[-1]
        return {**options, "num_groups": self.groups} if self.groups else options

    def shape_of(self, operand: Operand) -> tuple[int, ...]:
        extents = {
            "full": self.shape,
            "row": self.shape[-1:],
            "rows": self.shape[:-1],
            "channel": self.shape[1:2],
            "samples": (self.shape[0], self.groups or self.shape[1]),
        }
        return extents[operand.extent]

    @property
    def sum_shape(self) -> tuple[int, ...]:
        """Shape of the outputs that are sums."""
        return self.shape[1:2] if self.op in CHANNEL_OPS else self.shape[-1:]

    def dtype_of(self, operand: Operand) -> str:
        return accumulation(self.dtype) if operand.wide else self.dtype

    @property
    def input_bytes(self) -> int:
        """Bytes of one set of inputs, parameters included: what the rotation counts."""
        return sum(
            math.prod(self.shape_of(operand)) * FLOATS[self.dtype_of(operand)].itemsize
            for operand in self.spec.operands
        )

    @property
    def bytes_moved(self) -> int:
        """Bytes that a call cannot avoid moving: each input read once, each output written once.

        What is not of the shape of ``x`` is left out, as in the recorded table: parameters of one
        row, their gradients and statistics are noise beside ``x`` but for a single row.
        """
        full = sum(operand.extent == "full" for operand in self.spec.operands)
        return (full + len(self.spec.outputs)) * math.prod(self.shape) * self.itemsize


# op, shape, dtype, recorded copy, recorded fastest peer
ROW_WORKLOADS: tuple[Workload, ...] = (
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
    Workload("rms_norm_bwd", (2048, 4096), "bfloat16", 15.0, 29.9, "quack"),
    Workload("layer_norm_bwd", (2048, 4096), "bfloat16", 15.0, 37.1, "torch"),
    Workload("rms_norm_bwd", (32768, 1024), "bfloat16", 50.4, 61.6, "quack"),
    Workload("layer_norm_bwd", (32768, 1024), "bfloat16", 50.4, 87.9, "torch.compile"),
    Workload("rms_norm_bwd", (32768, 4096), "bfloat16", 191.6, 229.3, "quack"),
    Workload("layer_norm_bwd", (32768, 4096), "bfloat16", 191.0, 267.2, "quack"),
    Workload("rms_norm_bwd", (8192, 16384), "bfloat16", 190.7, 310.5, "quack"),
    Workload("layer_norm_bwd", (8192, 16384), "bfloat16", 191.9, 328.9, "quack"),
    Workload("layer_norm_bwd", (32768, 1024), "float32", 98.0, 127.3, "torch.compile"),
)

CHANNEL_WORKLOADS: tuple[Workload, ...] = (
    Workload("batch_norm_train", (32, 64), "float16", 1.7, 2.1, "TileOPs"),
    Workload("batch_norm_bwd", (32, 64), "float16", 1.7, 2.2, "torch.compile"),
    Workload("batch_norm_train", (8, 64, 32, 32), "bfloat16", 3.1, 2.9, "TileOPs"),
    Workload("batch_norm_bwd", (8, 64, 32, 32), "bfloat16", 3.4, 3.7, "TileOPs"),
    Workload("batch_norm_train", (4, 256, 28, 28), "float16", 3.5, 3.8, "TileOPs"),
    Workload("batch_norm_bwd", (4, 256, 28, 28), "float16", 3.9, 4.3, "TileOPs"),
    Workload("batch_norm_train", (4, 256, 28, 28), "float32", 4.4, 4.6, "TileOPs"),
    Workload("batch_norm_bwd", (4, 256, 28, 28), "float32", 5.3, 5.3, "TileOPs"),
    Workload("batch_norm_train", (4, 128, 1024, 1024), "float16", 505.6, 746.7, "TileOPs"),
    Workload("batch_norm_bwd", (4, 128, 1024, 1024), "float16", 756.3, 1203.3, "TileOPs"),
    Workload("batch_norm_train", (256, 64, 56, 56), "bfloat16", 51.2, 85.9, "TileOPs"),
    Workload("batch_norm_bwd", (256, 64, 56, 56), "bfloat16", 75.8, 127.2, "TileOPs"),
    Workload("batch_norm_train", (256, 2048, 7, 7), "bfloat16", 27.4, 82.6, "TileOPs"),
    Workload("batch_norm_bwd", (256, 2048, 7, 7), "bfloat16", 39.5, 91.8, "TileOPs"),
    Workload("batch_norm_train", (65536, 512), "float32", 66.2, 112.9, "torch.compile"),
    Workload("batch_norm_bwd", (65536, 512), "float32", 97.7, 166.4, "torch.compile"),
    Workload("batch_norm_train", (2, 32, 128, 128, 128), "float32", 255.9, 380.5, "TileOPs"),
    Workload("batch_norm_bwd", (2, 32, 128, 128, 128), "float32", 381.0, 606.3, "TileOPs"),
    Workload("batch_norm_infer", (4, 256, 28, 28), "float16", 3.5, 3.1, "torch.compile"),
    Workload("batch_norm_infer", (4, 256, 28, 28), "float32", 4.4, 4.0, "TileOPs"),
    Workload("batch_norm_infer", (4, 128, 1024, 1024), "float16", 505.4, 506.0, "TileOPs"),
    Workload("batch_norm_infer", (256, 64, 56, 56), "bfloat16", 51.3, 52.1, "TileOPs"),
    Workload("batch_norm_infer", (256, 2048, 7, 7), "bfloat16", 27.5, 48.6, "TileOPs"),
    Workload("batch_norm_infer", (65536, 512), "float32", 66.0, 69.1, "TileOPs"),
    Workload("batch_norm_infer", (2, 32, 128, 128, 128), "float32", 255.8, 254.6, "torch.compile"),
    Workload("group_norm", (8, 128, 32, 32), "bfloat16", 3.7, 3.7, "TileOPs", groups=32),
    Workload("group_norm", (4, 256, 28, 28), "float32", 4.4, 4.8, "TileOPs", groups=32),
    Workload("group_norm", (4, 128, 30, 30), "float16", 3.0, 3.8, "TileOPs", groups=16),
    Workload("group_norm", (2, 320, 128, 128), "bfloat16", 12.9, 21.5, "TileOPs", groups=32),
    Workload("group_norm", (8, 512, 256, 256), "bfloat16", 255.7, 405.8, "TileOPs", groups=32),
    Workload("group_norm", (1, 128, 1024, 1024), "float16", 128.9, 210.2, "TileOPs", groups=32),
    Workload("group_norm", (2, 32, 128, 128, 128), "float32", 255.4, 400.5, "TileOPs", groups=8),
    Workload("group_norm_bwd", (8, 128, 32, 32), "bfloat16", 4.4, 14.1, "torch.compile", groups=32),
    Workload(
        "group_norm_bwd", (2, 320, 128, 128), "bfloat16", 18.0, 35.2, "torch.compile", groups=32
    ),
    Workload(
        "group_norm_bwd", (8, 512, 256, 256), "bfloat16", 379.7, 610.3, "torch.compile", groups=32
    ),
    Workload("instance_norm", (8, 128, 32, 32), "bfloat16", 3.7, 3.3, "TileOPs"),
    Workload("instance_norm", (4, 256, 28, 28), "float32", 4.4, 3.7, "TileOPs"),
    Workload("instance_norm", (4, 128, 30, 30), "float16", 3.0, 2.7, "TileOPs"),
    Workload("instance_norm", (2, 320, 128, 128), "bfloat16", 12.8, 13.9, "TileOPs"),
    Workload("instance_norm", (8, 512, 256, 256), "bfloat16", 255.7, 356.5, "torch.compile"),
    Workload("instance_norm", (1, 128, 1024, 1024), "float16", 128.9, 281.7, "torch.compile"),
    Workload("instance_norm", (2, 32, 128, 128, 128), "float32", 255.3, 495.3, "torch.compile"),
    Workload(
        "batch_norm_train",
        (256, 64, 56, 56),
        "bfloat16",
        51.4,
        128.3,
        "torch.compile",
        channels_last=True,
    ),
    Workload(
        "batch_norm_infer",
        (256, 64, 56, 56),
        "bfloat16",
        51.5,
        67.7,
        "torch.compile",
        channels_last=True,
    ),
    Workload(
        "batch_norm_bwd",
        (256, 64, 56, 56),
        "bfloat16",
        75.1,
        150.0,
        "torch.compile",
        channels_last=True,
    ),
    Workload(
        "batch_norm_train",
        (256, 2048, 7, 7),
        "bfloat16",
        27.4,
        73.8,
        "torch.compile",
        channels_last=True,
    ),
    Workload(
        "batch_norm_infer",
        (256, 2048, 7, 7),
        "bfloat16",
        27.4,
        36.1,
        "torch.compile",
        channels_last=True,
    ),
    Workload(
        "batch_norm_bwd",
        (256, 2048, 7, 7),
        "bfloat16",
        39.4,
        83.2,
        "torch.compile",
        channels_last=True,
    ),
    Workload(
        "batch_norm_train",
        (32, 256, 56, 56),
        "float16",
        27.5,
        74.4,
        "torch.compile",
        channels_last=True,
    ),
    Workload(
        "batch_norm_infer",
        (32, 256, 56, 56),
        "float16",
        27.5,
        36.0,
        "torch.compile",
        channels_last=True,
    ),
    Workload(
        "batch_norm_bwd",
        (32, 256, 56, 56),
        "float16",
        39.4,
        84.2,
        "torch.compile",
        channels_last=True,
    ),
    Workload(
        "group_norm",
        (2, 320, 128, 128),
        "bfloat16",
        13.0,
        30.1,
        "torch.compile",
        groups=32,
        channels_last=True,
    ),
    Workload(
        "group_norm",
        (8, 512, 256, 256),
        "bfloat16",
        257.6,
        1260.0,
        "torch.compile",
        groups=32,
        channels_last=True,
    ),
    Workload(
        "instance_norm",
        (2, 320, 128, 128),
        "bfloat16",
        13.1,
        31.1,
        "torch.compile",
        channels_last=True,
    ),
)

#: Those of forward ops whose backward nobody else has a fast one of: no record to compare with.
UNRECORDED: tuple[Workload, ...] = tuple(
    replace(w, op=f"{w.op}_bwd", copy_us=None, peer_us=None, peer="")
    for w in ROW_WORKLOADS + CHANNEL_WORKLOADS
    if w.op.startswith(("fused_add", "ada_layer_norm", "instance_norm"))
)

WORKLOADS = ROW_WORKLOADS + CHANNEL_WORKLOADS + UNRECORDED


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
