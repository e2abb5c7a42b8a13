"""What is measured: the table of workloads, and what each op reads and writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cunorm.dtypes import FLOATS, accumulation

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
    extent : {"full", "row", "channel"}
        ``"full"``: the shape of ``x``; ``"row"``: the last axis of ``x``; ``"channel"``: its
        second axis.
    mean, spread : float
        Of the random values.
    wide : bool
        Whether the array has the accumulation dtype, not that of ``x``.
    """

    name: str
    extent: str
    mean: float
    spread: float
    wide: bool = False


@dataclass(frozen=True)
class Op:
    """The arrays and parameters of one op.

    Attributes
    ----------
    operands : tuple of Operand
        The inputs, in the order of the function.
    outputs : tuple of str
        Those of the shape and dtype of ``x``.
    eps : float, optional
        None where the function takes none.
    sums : tuple of str
        Further outputs, one value per channel.
    function : str
        Name in `cunorm`; that of the op where empty.
    options : tuple of (str, value)
        Further arguments of the function.
    """

    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]
    eps: float | None
    sums: tuple[str, ...] = ()
    function: str = ""
    options: tuple[tuple[str, Any], ...] = ()


_X = Operand("x", "full", 0.5, 1.0)
_RESIDUAL = Operand("residual", "full", 0.25, 1.0)
_WEIGHT = Operand("weight", "row", 1.0, 0.25)
_BIAS = Operand("bias", "row", 0.1, 0.25)
_SCALE = Operand("scale", "full", 1.0, 0.25)
_SHIFT = Operand("shift", "full", 0.1, 0.25)
_GATE = Operand("gate", "full", 0.5, 0.25)

ROW_OPS: dict[str, Op] = {
    "rms_norm": Op((_X, _WEIGHT), ("y",), 1e-6),
    "layer_norm": Op((_X, _WEIGHT, _BIAS), ("y",), 1e-5),
    "fused_add_rms_norm": Op((_X, _RESIDUAL, _WEIGHT), ("y", "residual_out"), 1e-6),
    "fused_add_layer_norm": Op((_X, _RESIDUAL, _WEIGHT, _BIAS), ("y", "residual_out"), 1e-5),
    "ada_layer_norm": Op((_X, _SCALE, _SHIFT), ("y",), 1e-5),
    "ada_layer_norm_zero": Op((_X, _SCALE, _SHIFT, _GATE), ("y",), 1e-5),
}

_GRAD_OUT = Operand("grad_out", "full", 0.1, 1.0)
_PER_CHANNEL = (
    Operand("weight", "channel", 1.0, 0.25),
    Operand("bias", "channel", 0.1, 0.25),
)
_RUNNING = (
    Operand("running_mean", "channel", 0.5, 0.1, wide=True),
    Operand("running_var", "channel", 1.0, 0.05, wide=True),
)
_GIVEN = (
    Operand("mean", "channel", 0.5, 0.1, wide=True),
    Operand("rstd", "channel", 1.0, 0.05, wide=True),
)

CHANNEL_OPS: dict[str, Op] = {
    "batch_norm_train": Op(
        (_X, *_RUNNING, *_PER_CHANNEL),
        ("y",),
        1e-5,
        function="batch_norm",
        options=(("training", True),),
    ),
    "batch_norm_infer": Op((_X, *_RUNNING, *_PER_CHANNEL), ("y",), 1e-5, function="batch_norm"),
    "batch_norm_bwd": Op(
        (_GRAD_OUT, _X, _PER_CHANNEL[0], *_GIVEN),
        ("grad_x",),
        None,
        ("grad_weight", "grad_bias"),
        function="batch_norm_backward",
    ),
    "group_norm": Op((_X, *_PER_CHANNEL), ("y",), 1e-5),
    "instance_norm": Op((_X, *_PER_CHANNEL), ("y",), 1e-5),
}

OPS: dict[str, Op] = {**ROW_OPS, **CHANNEL_OPS}


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
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    copy_us: float | None = None
    peer_us: float | None = None
    peer: str = ""
    groups: int = 0
    channels_last: bool = False

    @property
    def spec(self) -> Op:
        return OPS[self.op]

    @property
    def shape_text(self) -> str:
        text = "x".join(map(str, self.shape))
        text += f" g{self.groups}" if self.groups else ""
        return text + (" nhwc" if self.channels_last else "")

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
        """Arguments of the function that are not arrays, without ``normalized_shape``."""
        options = dict(self.spec.options)
        if self.spec.eps is not None:
            options["eps"] = self.spec.eps
        return {**options, "num_groups": self.groups} if self.groups else options

    def shape_of(self, operand: Operand) -> tuple[int, ...]:
        if operand.extent == "full":
            return self.shape
        return self.shape[-1:] if operand.extent == "row" else self.shape[1:2]

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

        A weight or bias of one row is left out, as in the recorded table: it is read once from
        memory and then served by the caches, and is noise beside ``x`` but for a single row.
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

WORKLOADS = ROW_WORKLOADS + CHANNEL_WORKLOADS


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
