"""Bad input: one table of calls, each with the error it must raise and nothing changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bad_input import FLOATS, NO_ARRAY, Arrays, Case, check

import cunorm


def layer(
    call: Callable[[Arrays], Any], message: str, error: type[Exception] = ValueError, *, id: str
) -> Case:
    return Case(id, call, error, f"layer_norm: {message}")


class Opaque:
    """What no library knows."""


# fmt: off
NOT_ARRAYS = [
    Case("x-list", lambda a: cunorm.layer_norm([1.0, 2.0], 2), TypeError,
         f"layer_norm: x {NO_ARRAY}, got list"),
    Case("x-masked", lambda a: cunorm.layer_norm(np.ma.masked_array(a.x), 6), TypeError,
         "layer_norm: x must be an array without a mask, got MaskedArray"),
    Case("x-none", lambda a: cunorm.rms_norm(None, 2), TypeError,
         f"rms_norm: x {NO_ARRAY}, got NoneType"),
    Case("x-str", lambda a: cunorm.ada_layer_norm("abc", a.row, a.row), TypeError,
         f"ada_layer_norm: x {NO_ARRAY}, got str"),
    Case("x-float", lambda a: cunorm.layer_norm(1.0, 1), TypeError,
         f"layer_norm: x {NO_ARRAY}, got float"),
    Case("x-int", lambda a: cunorm.fused_add_rms_norm(3, a.x, a.row), TypeError,
         f"fused_add_rms_norm: x {NO_ARRAY}, got int"),
    Case("x-numpy-scalar", lambda a: cunorm.layer_norm(np.float32(1.0), 1), TypeError,
         f"layer_norm: x {NO_ARRAY}, got float32"),
    Case("x-object", lambda a: cunorm.LayerNormFwdOp(6)(Opaque()), TypeError,
         f"layer_norm: x {NO_ARRAY}, got Opaque"),
    Case("x-list-target-cuda", lambda a: cunorm.layer_norm([1.0], 1, target="cuda"), TypeError,
         f"layer_norm: x {NO_ARRAY}, got list"),
    Case("x-list-target-numpy", lambda a: cunorm.rms_norm([1.0], 1, target="numpy"), TypeError,
         f"rms_norm: x {NO_ARRAY}, got list"),
    Case("weight-list", lambda a: cunorm.layer_norm(a.x, 6, [1.0] * 6), TypeError,
         f"layer_norm: weight {NO_ARRAY}, got list"),
    Case("weight-float", lambda a: cunorm.rms_norm(a.x, 6, 2.0), TypeError,
         f"rms_norm: weight {NO_ARRAY}, got float"),
    Case("bias-tuple", lambda a: cunorm.layer_norm(a.x, 6, None, (0.0,) * 6), TypeError,
         f"layer_norm: bias {NO_ARRAY}, got tuple"),
    Case("residual-none", lambda a: cunorm.fused_add_layer_norm(a.x, None, a.row, a.row), TypeError,
         "fused_add_layer_norm: residual must be an array, got NoneType"),
    Case("residual-float", lambda a: cunorm.fused_add_rms_norm(a.x, 0.0, a.row), TypeError,
         f"fused_add_rms_norm: residual {NO_ARRAY}, got float"),
    Case("scale-none", lambda a: cunorm.ada_layer_norm(a.x, None, a.row), TypeError,
         "ada_layer_norm: scale must be an array, got NoneType"),
    Case("shift-none", lambda a: cunorm.ada_layer_norm(a.x, a.row, None), TypeError,
         "ada_layer_norm: shift must be an array, got NoneType"),
    Case("shift-float", lambda a: cunorm.ada_layer_norm(a.x, a.row, 0.5), TypeError,
         f"ada_layer_norm: shift {NO_ARRAY}, got float"),
    Case("gate-none", lambda a: cunorm.ada_layer_norm_zero(a.x, a.row, a.row, None), TypeError,
         "ada_layer_norm_zero: gate must be an array, got NoneType"),
    Case("gate-str", lambda a: cunorm.ada_layer_norm_zero(a.x, a.row, a.row, "on"), TypeError,
         f"ada_layer_norm_zero: gate {NO_ARRAY}, got str"),
    Case("out-list-of-numbers", lambda a: cunorm.layer_norm(a.x, 6, out=[1.0]), TypeError,
         f"layer_norm: out {NO_ARRAY}, got float"),
]

DTYPES = [
    Case("x-int32", lambda a: cunorm.layer_norm(a.new(4, 6, dtype=np.int32), 6), TypeError,
         f"layer_norm: x must have dtype {FLOATS}, got int32"),
    Case("x-complex64", lambda a: cunorm.rms_norm(a.new(4, 6, dtype=np.complex64), 6), TypeError,
         f"rms_norm: x must have dtype {FLOATS}, got complex64"),
    Case("x-bool", lambda a: cunorm.layer_norm(a.new(4, 6, dtype=bool), 6), TypeError,
         f"layer_norm: x must have dtype {FLOATS}, got bool"),
    Case("x-longdouble", lambda a: cunorm.layer_norm(a.new(4, 6, dtype=np.longdouble), 6),
         TypeError, re.compile(rf"layer_norm: x must have dtype {FLOATS}, got float\d+")),
    Case("x-object-dtype", lambda a: cunorm.layer_norm(np.array([[None] * 6]), 6), TypeError,
         f"layer_norm: x must have dtype {FLOATS}, got object"),
    Case("weight-int64", lambda a: cunorm.layer_norm(a.x, 6, a.new(6, dtype=np.int64)), TypeError,
         f"layer_norm: weight must have dtype {FLOATS}, got int64"),
    Case("weight-float64-x-float32",
         lambda a: cunorm.layer_norm(a.x, 6, a.new(6, dtype=np.float64)), ValueError,
         "layer_norm: weight must have dtype float32, got float64"),
    Case("weight-float16-x-float32", lambda a: cunorm.rms_norm(a.x, 6, a.new(6, dtype=np.float16)),
         ValueError, "rms_norm: weight must have dtype float32, got float16"),
    Case("weight-float32-x-float64",
         lambda a: cunorm.rms_norm(a.new(4, 6, dtype=np.float64), 6, a.row), ValueError,
         "rms_norm: weight must have dtype float64, got float32"),
    Case("bias-float64-x-float16",
         lambda a: cunorm.layer_norm(
             a.new(4, 6, dtype=np.float16), 6, a.row, a.new(6, dtype=np.float64)),
         ValueError, "layer_norm: bias must have dtype float16 or float32, got float64"),
    Case("residual-float64",
         lambda a: cunorm.fused_add_layer_norm(a.x, a.new(4, 6, dtype=np.float64), a.row, a.row),
         ValueError, "fused_add_layer_norm: residual must have dtype float32, got float64"),
    Case("residual-accumulation-dtype",
         lambda a: cunorm.fused_add_rms_norm(a.new(4, 6, dtype=np.float16), a.x, a.row), ValueError,
         "fused_add_rms_norm: residual must have dtype float16, got float32"),
    Case("scale-float64", lambda a: cunorm.ada_layer_norm(a.x, a.new(6, dtype=np.float64), a.row),
         ValueError, "ada_layer_norm: scale must have dtype float32, got float64"),
    Case("gate-complex",
         lambda a: cunorm.ada_layer_norm_zero(a.x, a.row, a.row, a.new(6, dtype=np.complex128)),
         TypeError, f"ada_layer_norm_zero: gate must have dtype {FLOATS}, got complex128"),
]

SHAPES = [
    Case("x-0d", lambda a: cunorm.layer_norm(a.new(), 1), ValueError,
         "layer_norm: normalized_shape must be the trailing shape of x, which has shape (), "
         "got (1,)"),
    Case("x-0d-ada", lambda a: cunorm.ada_layer_norm(a.new(), a.row, a.row), ValueError,
         "ada_layer_norm: x must be an array of one or more axes, got ()"),
    Case("x-0d-fused", lambda a: cunorm.fused_add_rms_norm(a.new(), a.new(), None), ValueError,
         "fused_add_rms_norm: x must be an array of one or more axes, got ()"),
    Case("weight-one-short", lambda a: cunorm.layer_norm(a.x, 6, a.new(5)), ValueError,
         "layer_norm: weight must have shape (6,), got (5,)"),
    Case("weight-twice", lambda a: cunorm.layer_norm(a.x, 6, a.new(12)), ValueError,
         "layer_norm: weight must have shape (6,), got (12,)"),
    Case("weight-0d", lambda a: cunorm.rms_norm(a.x, 6, a.new()), ValueError,
         "rms_norm: weight must have shape (6,), got ()"),
    Case("weight-one", lambda a: cunorm.rms_norm(a.x, 6, a.new(1)), ValueError,
         "rms_norm: weight must have shape (6,), got (1,)"),
    Case("weight-2d", lambda a: cunorm.layer_norm(a.x, 6, a.new(1, 6)), ValueError,
         "layer_norm: weight must have shape (6,), got (1, 6)"),
    Case("weight-flat-for-2d", lambda a: cunorm.layer_norm(a.new(2, 4, 6), (4, 6), a.new(24)),
         ValueError, "layer_norm: weight must have shape (4, 6), got (24,)"),
    Case("bias-of-x", lambda a: cunorm.layer_norm(a.x, 6, a.row, a.x), ValueError,
         "layer_norm: bias must have shape (6,), got (4, 6)"),
    Case("bias-empty", lambda a: cunorm.layer_norm(a.x, 6, None, a.new(0)), ValueError,
         "layer_norm: bias must have shape (6,), got (0,)"),
    Case("residual-row", lambda a: cunorm.fused_add_layer_norm(a.x, a.row, a.row, a.row),
         ValueError, "fused_add_layer_norm: residual must have shape (4, 6), got (6,)"),
    Case("residual-transposed", lambda a: cunorm.fused_add_rms_norm(a.x, a.new(6, 4), a.row),
         ValueError, "fused_add_rms_norm: residual must have shape (4, 6), got (6, 4)"),
    Case("fused-weight", lambda a: cunorm.fused_add_layer_norm(a.x, a.x, a.new(4), a.row),
         ValueError, "fused_add_layer_norm: weight must have shape (6,), got (4,)"),
    Case("fused-bias", lambda a: cunorm.fused_add_layer_norm(a.x, a.x, a.row, a.new(7)), ValueError,
         "fused_add_layer_norm: bias must have shape (6,), got (7,)"),
    Case("scale-of-rows", lambda a: cunorm.ada_layer_norm(a.x, a.new(4), a.row), ValueError,
         re.compile(r"ada_layer_norm: scale must .*\(4, 6\).*, got \(4,\)")),
    Case("scale-other-rows", lambda a: cunorm.ada_layer_norm(a.x, a.new(3, 6), a.row), ValueError,
         re.compile(r"ada_layer_norm: scale must .*\(4, 6\).*, got \(3, 6\)")),
    Case("scale-last-axis-one", lambda a: cunorm.ada_layer_norm(a.x, a.new(4, 1), a.row),
         ValueError, re.compile(r"ada_layer_norm: scale must .*\(4, 6\).*, got \(4, 1\)")),
    Case("shift-0d", lambda a: cunorm.ada_layer_norm(a.x, a.row, a.new()), ValueError,
         re.compile(r"ada_layer_norm: shift must .*\(4, 6\).*, got \(\)")),
    Case("shift-more-axes", lambda a: cunorm.ada_layer_norm(a.x, a.row, a.new(1, 4, 6)), ValueError,
         re.compile(r"ada_layer_norm: shift must .*\(4, 6\).*, got \(1, 4, 6\)")),
    Case("gate-middle-axis",
         lambda a: cunorm.ada_layer_norm_zero(a.new(2, 3, 6), a.row, a.row, a.new(2, 2, 6)),
         ValueError,
         re.compile(r"ada_layer_norm_zero: gate must .*\(2, 3, 6\).*, got \(2, 2, 6\)")),
    Case("gate-batch-only",
         lambda a: cunorm.ada_layer_norm_zero(a.new(2, 3, 6), a.row, a.row, a.new(2, 6)),
         ValueError, re.compile(r"ada_layer_norm_zero: gate must .*\(2, 3, 6\).*, got \(2, 6\)")),
]

NORMALIZED_SHAPES = [
    layer(lambda a: cunorm.layer_norm(a.x, ()),
          "normalized_shape must be one or more sizes that are not negative, got ()",
          id="normalized-shape-empty"),
    layer(lambda a: cunorm.layer_norm(a.x, []),
          "normalized_shape must be one or more sizes that are not negative, got []",
          id="normalized-shape-empty-list"),
    layer(lambda a: cunorm.layer_norm(a.x, -6),
          "normalized_shape must be one or more sizes that are not negative, got -6",
          id="normalized-shape-negative"),
    layer(lambda a: cunorm.LayerNormFwdOp((4, -1)),
          "normalized_shape must be one or more sizes that are not negative, got (4, -1)",
          id="normalized-shape-minus-one"),
    layer(lambda a: cunorm.layer_norm(a.x, 5),
          "normalized_shape must be the trailing shape of x, which has shape (4, 6), got (5,)",
          id="normalized-shape-other"),
    layer(lambda a: cunorm.layer_norm(a.x, 4),
          "normalized_shape must be the trailing shape of x, which has shape (4, 6), got (4,)",
          id="normalized-shape-leading"),
    layer(lambda a: cunorm.layer_norm(a.x, (6, 4)),
          "normalized_shape must be the trailing shape of x, which has shape (4, 6), got (6, 4)",
          id="normalized-shape-swapped"),
    layer(lambda a: cunorm.layer_norm(a.x, (2, 4, 6)),
          "normalized_shape must be the trailing shape of x, which has shape (4, 6), got (2, 4, 6)",
          id="normalized-shape-too-long"),
    layer(lambda a: cunorm.layer_norm(a.x, 6.0),
          "normalized_shape must be an int or a sequence of ints, got float", TypeError,
          id="normalized-shape-float"),
    layer(lambda a: cunorm.LayerNormFwdOp((4, 6.0)),
          "normalized_shape must be an int or a sequence of ints, got tuple", TypeError,
          id="normalized-shape-float-inside"),
    layer(lambda a: cunorm.layer_norm(a.x, "6"),
          "normalized_shape must be an int or a sequence of ints, got str", TypeError,
          id="normalized-shape-str"),
    layer(lambda a: cunorm.layer_norm(a.x, None),
          "normalized_shape must be an int or a sequence of ints, got NoneType", TypeError,
          id="normalized-shape-none"),
    layer(lambda a: cunorm.LayerNormFwdOp({"n": 6}),
          "normalized_shape must be an int or a sequence of ints, got dict", TypeError,
          id="normalized-shape-dict"),
    Case("normalized-shape-rms", lambda a: cunorm.rms_norm(a.x, (6, 6)), ValueError,
         "rms_norm: normalized_shape must be the trailing shape of x, which has shape (4, 6), "
         "got (6, 6)"),
    Case("normalized-shape-rms-array", lambda a: cunorm.RMSNormFwdOp(np.array([6.0])), TypeError,
         "rms_norm: normalized_shape must be an int or a sequence of ints, got ndarray"),
]

EPS = [
    layer(lambda a: cunorm.layer_norm(a.x, 6, eps=-1e-5),
          "eps must be finite and not negative, got -1e-05", id="eps-negative"),
    layer(lambda a: cunorm.LayerNormFwdOp(6, float("nan")),
          "eps must be finite and not negative, got nan", id="eps-nan"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, eps=None), "eps must be a number, got NoneType",
          TypeError, id="eps-none"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, eps="1e-5"), "eps must be a number, got str",
          TypeError, id="eps-str"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, eps=b"1"), "eps must be a number, got bytes",
          TypeError, id="eps-bytes"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, eps=1e-5j), "eps must be a number, got complex",
          TypeError, id="eps-complex"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, eps=10**400),
          f"eps must be finite and not negative, got {10**400}", id="eps-too-large-an-int"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, eps=[1e-5]), "eps must be a number, got list",
          TypeError, id="eps-list"),
    Case("eps-inf", lambda a: cunorm.rms_norm(a.x, 6, eps=float("inf")), ValueError,
         "rms_norm: eps must be finite and not negative, got inf"),
    Case("eps-fused", lambda a: cunorm.fused_add_rms_norm(a.x, a.x, a.row, -1.0), ValueError,
         "fused_add_rms_norm: eps must be finite and not negative, got -1.0"),
    Case("eps-fused-none", lambda a: cunorm.FusedAddRMSNormFwdOp(None), TypeError,
         "fused_add_rms_norm: eps must be a number, got NoneType"),
    Case("eps-fused-layer", lambda a: cunorm.FusedAddLayerNormFwdOp(float("-inf")), ValueError,
         "fused_add_layer_norm: eps must be finite and not negative, got -inf"),
    Case("eps-ada", lambda a: cunorm.AdaLayerNormFwdOp("small"), TypeError,
         "ada_layer_norm: eps must be a number, got str"),
    Case("eps-ada-zero", lambda a: cunorm.ada_layer_norm_zero(a.x, a.row, a.row, a.row, -1),
         ValueError, "ada_layer_norm_zero: eps must be finite and not negative, got -1"),
]
# fmt: on


def shifted_by_a_row(a: Arrays) -> Any:
    base = a.new(5, 6)
    return cunorm.layer_norm(base[:4], 6, out=base[1:])


def reversed_in_place(a: Arrays) -> Any:
    base = a.x
    return cunorm.layer_norm(base, 6, out=base[::-1])


def transposed_in_place(a: Arrays) -> Any:
    base = a.new(6, 6)
    return cunorm.rms_norm(base, 6, out=base.T)


def out_is_the_weight(a: Arrays) -> Any:
    x = a.new(1, 6)
    return cunorm.layer_norm(x, 6, x[0], out=x)


def fused_out_over_residual(a: Arrays) -> Any:
    base = a.new(5, 6)
    return cunorm.fused_add_layer_norm(a.x, base[:4], a.row, a.row, out=(base[1:], a.x))


def same_output_twice(a: Arrays) -> Any:
    out = a.x
    return cunorm.fused_add_rms_norm(a.x, a.x, a.row, out=(out, out))


def outputs_overlap(a: Arrays) -> Any:
    base = a.new(5, 6)
    return cunorm.fused_add_rms_norm(a.x, a.x, a.row, out=(base[:4], base[1:]))


def out_over_gate(a: Arrays) -> Any:
    base = a.new(6, 6)
    return cunorm.ada_layer_norm_zero(a.x, a.row, a.row, base[1], out=base[:4])


# fmt: off
OUT = [
    layer(lambda a: cunorm.layer_norm(a.x, 6, out=a.new(4, 5)),
          "out must have shape (4, 6), got (4, 5)", id="out-shape"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, out=a.new(1, 4, 6)),
          "out must have shape (4, 6), got (1, 4, 6)", id="out-more-axes"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, out=a.new(4, 6, dtype=np.float64)),
          "out must have dtype float32, got float64", id="out-wider"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, out=a.new(4, 6, dtype=np.float16)),
          "out must have dtype float32, got float16", id="out-narrower"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, out=a.new(4, 6, dtype=np.int32)),
          f"out must have dtype {FLOATS}, got int32", TypeError, id="out-int"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, out=a.zero_stride(4, 6)),
          "out must be an array whose elements do not share memory, got strides (0, 1)",
          id="out-zero-stride"),
    layer(shifted_by_a_row, "out partly overlaps x in memory; pass x itself or memory of its own",
          id="out-shifted"),
    layer(reversed_in_place, "out partly overlaps x in memory; pass x itself or memory of its own",
          id="out-reversed"),
    layer(out_is_the_weight,
          "out partly overlaps weight in memory; pass weight itself or memory of its own",
          id="out-over-weight"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, out=a.read_only(4, 6)),
          "out must be writable, got a read-only array", id="out-read-only"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, out=(a.x, a.x)), "out must be an array, got tuple",
          TypeError, id="out-tuple-too-long"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, out=()), "out must be an array, got tuple", TypeError,
          id="out-tuple-empty"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, out=(None,)), "out must be an array, got tuple",
          TypeError, id="out-tuple-of-none"),
    layer(lambda a: cunorm.layer_norm(a.x, 6, out="x"), f"out {NO_ARRAY}, got str", TypeError,
          id="out-str"),
    Case("out-transposed", transposed_in_place, ValueError,
         "rms_norm: out partly overlaps x in memory; pass x itself or memory of its own"),
    Case("out-one-of-two", lambda a: cunorm.fused_add_rms_norm(a.x, a.x, a.row, out=a.x), TypeError,
         "fused_add_rms_norm: out must be a tuple of 2 arrays, got ndarray"),
    Case("out-three-of-two",
         lambda a: cunorm.fused_add_rms_norm(a.x, a.x, a.row, out=(a.x, a.x, a.x)), TypeError,
         "fused_add_rms_norm: out must be a tuple of 2 arrays, got tuple"),
    Case("out-none-inside",
         lambda a: cunorm.fused_add_layer_norm(a.x, a.x, a.row, a.row, out=(a.x, None)), TypeError,
         "fused_add_layer_norm: out must be a tuple of 2 arrays, got tuple"),
    Case("out-second-shape", lambda a: cunorm.fused_add_rms_norm(a.x, a.x, a.row, out=(a.x, a.row)),
         ValueError, "fused_add_rms_norm: out[1] must have shape (4, 6), got (6,)"),
    Case("out-second-read-only",
         lambda a: cunorm.fused_add_rms_norm(a.x, a.x, a.row, out=(a.x, a.read_only(4, 6))),
         ValueError, "fused_add_rms_norm: out[1] must be writable, got a read-only array"),
    Case("out-over-residual", fused_out_over_residual, ValueError,
         "fused_add_layer_norm: out[0] partly overlaps residual in memory; "
         "pass residual itself or memory of its own"),
    Case("out-same-twice", same_output_twice, ValueError,
         "fused_add_rms_norm: out[1] partly overlaps out[0] in memory; pass memory of its own"),
    Case("out-overlapping", outputs_overlap, ValueError,
         "fused_add_rms_norm: out[1] partly overlaps out[0] in memory; pass memory of its own"),
    Case("out-over-gate", out_over_gate, ValueError,
         "ada_layer_norm_zero: out partly overlaps gate in memory; "
         "pass gate itself or memory of its own"),
]

TARGETS = [
    Case("target-unknown", lambda a: cunorm.layer_norm(a.x, 6, target="tpu"), ValueError,
         "unknown target 'tpu'; known targets: cuda, numpy"),
    Case("target-int", lambda a: cunorm.layer_norm(a.x, 6, target=0), TypeError,
         "layer_norm: target must be a target's name or None, got int"),
    Case("target-list", lambda a: cunorm.RMSNormFwdOp(6, target=["numpy"]), TypeError,
         "rms_norm: target must be a target's name or None, got list"),
    Case("target-cuda-host-array", lambda a: cunorm.layer_norm(a.x, 6, target="cuda"), ValueError,
         "layer_norm: target 'cuda' needs arrays on a CUDA device "
         "(CuPy comes with cunorm[cuda12x] or cunorm[cuda13x]), got cpu"),
    Case("target-builtin-host-array",
         lambda a: cunorm.ada_layer_norm(a.x, a.row, a.row, target=cunorm.BUILTIN), ValueError,
         "ada_layer_norm: target 'cuda' needs arrays on a CUDA device "
         "(CuPy comes with cunorm[cuda12x] or cunorm[cuda13x]), got cpu"),
    Case("target-op-unknown", lambda a: cunorm.FusedAddRMSNormFwdOp(target="tpu")(a.x, a.x, a.row),
         ValueError, "unknown target 'tpu'; known targets: cuda, numpy"),
    Case("default-target-unknown", lambda a: cunorm.set_default_target("tpu"), ValueError,
         "unknown target 'tpu'; known targets: cuda, numpy"),
    Case("default-target-int", lambda a: cunorm.set_default_target(1), TypeError,
         "set_default_target: target must be a target's name or None, got int"),
    Case("unregister-unknown", lambda a: cunorm.unregister_target("tpu"), ValueError,
         "unregister_target: no registered target 'tpu'"),
    Case("register-taken", lambda a: cunorm.register_target("cuda", {}), ValueError,
         "register_target: the name 'cuda' is taken"),
    Case("register-name-int", lambda a: cunorm.register_target(1, {}), TypeError,
         "register_target: name must be a str, got int"),
    Case("register-kernels", lambda a: cunorm.register_target("mine", {"layer_norm": 1}), TypeError,
         "register_target: kernels must map op names to callables"),
    Case("register-claims", lambda a: cunorm.register_target("mine", {}, True), TypeError,
         "register_target: claims must be callable, got bool"),
]

QUESTIONS = [
    Case("plan-dtype", lambda a: cunorm.LayerNormFwdOp(6).plan("int8", (4, 6)), TypeError,
         f"layer_norm: x must have dtype {FLOATS}, got int8"),
    Case("plan-shape", lambda a: cunorm.LayerNormFwdOp(6).plan("float32", (4, 5)), ValueError,
         "layer_norm: normalized_shape must be the trailing shape of x, which has shape (4, 5), "
         "got (6,)"),
    Case("plan-without",
         lambda a: cunorm.LayerNormFwdOp(6).plan("float32", (4, 6), without=["gate"]), ValueError,
         "layer_norm: without must be optional parameters, got 'gate'"),
    Case("plan-without-required",
         lambda a: cunorm.AdaLayerNormFwdOp().plan("float32", (4, 6), without=["scale"]),
         ValueError, "ada_layer_norm: without must be optional parameters, got 'scale'"),
    Case("plan-parameter-dtype",
         lambda a: cunorm.RMSNormFwdOp(6).plan("float32", (4, 6), parameter_dtype="float16"),
         ValueError, "rms_norm: weight must have dtype float32, got float16"),
    Case("plan-of-numpy", lambda a: cunorm.RMSNormFwdOp(6, target="numpy").plan("float32", (4, 6)),
         ValueError, "rms_norm: target 'numpy' makes no plans"),
    Case("roofline-shape", lambda a: cunorm.FusedAddRMSNormFwdOp().roofline("float32", ()),
         ValueError, "fused_add_rms_norm: x must be an array of one or more axes, got ()"),
    Case("parameter-shapes", lambda a: cunorm.RMSNormFwdOp((2, 3)).parameter_shapes((6,)),
         ValueError, "rms_norm: normalized_shape must be the trailing shape of x, "
         "which has shape (6,), got (2, 3)"),
]
# fmt: on

CASES = [
    *NOT_ARRAYS,
    *DTYPES,
    *SHAPES,
    *NORMALIZED_SHAPES,
    *EPS,
    *OUT,
    *TARGETS,
    *QUESTIONS,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bad_input(case):
    check(case)


def test_ids_are_unique():
    assert len({case.id for case in CASES}) == len(CASES) >= 75


@pytest.mark.torch
@pytest.mark.parametrize("argument", ["x", "residual", "weight", "bias"])
def test_gradients_are_not_lost(argument):
    torch = pytest.importorskip("torch")
    given = {
        "x": torch.randn(4, 6),
        "residual": torch.randn(4, 6),
        "weight": torch.randn(6),
        "bias": torch.randn(6),
    }
    before = {name: tensor.clone() for name, tensor in given.items()}
    given[argument].requires_grad_()
    message = (
        f"fused_add_layer_norm: {argument} requires grad, and this call would lose its gradient; "
        f"pass {argument}.detach() or call under torch.no_grad()"
    )
    with pytest.raises(ValueError) as raised:
        cunorm.fused_add_layer_norm(**given)
    assert str(raised.value) == message
    for name, tensor in given.items():
        assert torch.equal(tensor.detach(), before[name])


@pytest.mark.torch
def test_a_wrong_torch_tensor():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError) as raised:
        cunorm.layer_norm(torch.ones(4, 6, dtype=torch.int64), 6)
    assert str(raised.value) == f"layer_norm: x must have dtype {FLOATS}, got int64"
    with pytest.raises(ValueError) as raised:
        cunorm.layer_norm(torch.ones(4, 6), 6, target="cuda")
    assert "target 'cuda' needs arrays on a CUDA device" in str(raised.value)
    with pytest.raises(ValueError) as raised:
        cunorm.layer_norm(torch.ones(4, 6), 6, torch.ones(6, device="meta"))
    assert str(raised.value) == "layer_norm: weight must be on cpu like x, got meta"
