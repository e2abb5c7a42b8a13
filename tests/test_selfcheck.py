"""``python -m cunorm``: what it prints, what it leaves out, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cunorm
from cunorm import dtypes, host, selfcases, selfcheck

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """What is printed must not depend on the machine."""
    monkeypatch.setattr(selfcheck, "find_gpu", lambda: (None, "CuPy is not installed"))


def table(capsys):
    """The rows printed, as lists of words, and the whole text."""
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if line.startswith(selfcheck.OPS)]
    return rows, text


def numbers(row):
    """What stands between the shape of a row and its verdict."""
    verdict = next(i for i, word in enumerate(row) if word in ("PASS", "FAIL"))
    return [float(word) for word in row[verdict - 5 : verdict]]


def test_every_op_variant_and_dtype_passes(capsys):
    pytest.importorskip("ml_dtypes")
    assert selfcheck.main(["--quick"]) == 0
    rows, text = table(capsys)
    variants = [
        (v, d) for op in selfcheck.OPS for d in dtypes.FLOATS for v in selfcases.variants(op)
    ]
    assert [(row[0], row[1], row[row.index("PASS") + 1 :]) for row in rows] == [
        (variant.op, dtype, variant.note.split()) for variant, dtype in variants
    ]
    for row in rows:
        assert " ".join(row[2:]).startswith(("130 x 33 ", "6 x 24 x 7 x 9 "))
        ulps, of_bound, microseconds, gb_per_s, of_copy = numbers(row)
        assert 0 <= ulps <= of_bound  # the allowance is off the first and part of the second
        assert 0 < of_bound <= 1
        assert microseconds > 0
        assert gb_per_s >= 0
        assert of_copy >= 0
    assert text.endswith("92 passed, 0 failed, 0 skipped\n")


def test_every_op_has_inputs_and_an_object():
    ops = {kind.name for kind in vars(cunorm).values() if hasattr(kind, "input_names")}
    assert ops == set(selfcheck.OPS) == set(host.KERNELS)


def test_the_header_says_what_runs(capsys):
    selfcheck.main(["--quick", "--op", "rms_norm", "--dtype", "float32"])
    _, text = table(capsys)
    first, *rest = text.splitlines()
    assert f"cunorm {cunorm.__version__}" in first
    assert f"NumPy {np.__version__}" in first
    assert "target numpy" in first
    assert "(CuPy is not installed)" in rest
    assert "1 passed, 0 failed, 0 skipped" in text


def test_ops_and_dtypes_can_be_picked(capsys):
    options = ["--op", "rms_norm", "--op", "layer_norm", "--dtype", "float64", "--quick"]
    assert selfcheck.main(options) == 0
    rows, _ = table(capsys)
    assert [row[:2] for row in rows] == [["rms_norm", "float64"], ["layer_norm", "float64"]]


def test_three_shapes_without_quick(capsys):
    assert selfcheck.main(["--op", "layer_norm", "--dtype", "float32"]) == 0
    rows, _ = table(capsys)
    shapes = [(int(row[2]), int(row[4])) for row in rows]
    assert shapes[:2] == [(130, 33), (3, 12_289)]
    assert shapes[2][0] * shapes[2][1] * 4 == selfcheck.Host.large_bytes


def wrong_kernel(change):
    """The host's rms_norm, with y changed."""

    def kernel(op, *inputs, out, return_stats):
        results = host.KERNELS["rms_norm"](op, *inputs, out=(), return_stats=True)
        y = change(results[0])
        for place in out:
            place[...] = y
        return (y, *results[1:]) if return_stats else y

    return {"rms_norm": kernel}


@pytest.fixture
def registered():
    names = []

    def register(name, kernels):
        cunorm.register_target(name, kernels)
        names.append(name)

    yield register
    for name in names:
        cunorm.unregister_target(name)


def test_an_error_past_the_bound_fails(capsys, registered):
    """Two units in the last place of one element are enough."""

    def change(y):
        y = y.copy()
        y[7, 30] += 3 * np.spacing(y[7, 30])
        return y

    registered("slightly-wrong", wrong_kernel(change))
    options = ["--target", "slightly-wrong", "--op", "rms_norm", "--dtype", "float16", "--quick"]
    assert selfcheck.main(options) == 1
    rows, text = table(capsys)
    assert rows[0][-1] == "FAIL"
    assert 2 <= float(rows[0][5]) < 4
    assert float(rows[0][6]) > 1
    assert "0 passed, 1 failed" in text


def test_a_statistic_that_is_wrong_fails(capsys, registered):
    def kernel(op, *inputs, out, return_stats):
        y, rstd = host.KERNELS["rms_norm"](op, *inputs, out=(), return_stats=True)
        return (y, rstd * np.float32(1.0001)) if return_stats else y

    registered("wrong-rstd", {"rms_norm": kernel})
    options = ["--target", "wrong-rstd", "--op", "rms_norm", "--dtype", "float32", "--quick"]
    assert selfcheck.main(options) == 1
    rows, _ = table(capsys)
    assert rows[0][-1] == "FAIL"


def test_an_exception_is_a_failed_row_and_the_check_goes_on(capsys, registered):
    def kernel(op, *inputs, out, return_stats):
        if inputs[0].dtype == np.float16:
            raise RuntimeError("the launch failed\nfor a long reason")
        return host.KERNELS["rms_norm"](op, *inputs, out=out, return_stats=return_stats)

    registered("half-broken", {"rms_norm": kernel})
    options = ["--target", "half-broken", "--op", "rms_norm", "--quick"]
    options += ["--dtype", "float16", "--dtype", "float32"]
    assert selfcheck.main(options) == 1
    rows, text = table(capsys)
    assert "FAIL  RuntimeError: the launch failed\n" in text
    assert [row[1] for row in rows] == ["float16", "float32"]
    assert rows[1][-1] == "PASS"
    assert "1 passed, 1 failed" in text


def test_ops_that_a_target_lacks_are_named_and_not_listed(capsys, registered):
    registered("one-op", {"rms_norm": host.KERNELS["rms_norm"]})
    options = ["--target", "one-op", "--quick", "--dtype", "float32"]
    assert selfcheck.main(options) == 0
    rows, text = table(capsys)
    assert "target one-op" in text
    assert [row[0] for row in rows] == ["rms_norm"]
    lacking = ", ".join(op for op in selfcheck.OPS if op != "rms_norm")
    assert f"\nnot in target 'one-op': {lacking}\n" in text
    assert "1 passed, 0 failed, 0 skipped" in text


def test_a_running_statistic_that_is_wrong_fails(capsys, registered):
    def kernel(op, *inputs, **options):
        results = host.KERNELS["batch_norm"](op, *inputs, **options)
        if op.training:
            inputs[2][3] *= np.float32(1 + 2e-6)
        return results

    registered("wrong-running-var", {"batch_norm": kernel})
    options = ["--target", "wrong-running-var", "--dtype", "float32", "--quick"]
    assert selfcheck.main(options) == 1
    rows, _ = table(capsys)
    assert [row[-2:] for row in rows] == [["FAIL", "training"], ["PASS", "inference"]]


@pytest.mark.parametrize(
    "op",
    [
        "batch_norm",
        "batch_norm_backward",
        "group_norm",
        "group_norm_backward",
        "instance_norm",
        "instance_norm_backward",
    ],
)
def test_large_arrays_with_channels(capsys, monkeypatch, op):
    """Samples repeat a block, and are judged in parts."""
    monkeypatch.setattr(selfcases, "BLOCK", 2 * 64 * 56 * 56)
    assert selfcheck.main(["--op", op, "--dtype", "float32"]) == 0
    rows, _ = table(capsys)
    assert [" ".join(row[2:9]) for row in rows].count("5 x 64 x 56 x 56") == len(rows) / 3
    assert sum("channel_axis=-1" in row for row in rows) == len(rows) / 3


def test_a_large_array_wrong_in_its_last_channel_fails(capsys, registered, monkeypatch):
    monkeypatch.setattr(selfcases, "BLOCK", 2 * 64 * 56 * 56)

    def kernel(op, *inputs, **options):
        y = host.KERNELS["batch_norm_normalize"](op, *inputs, **options)
        if y.shape[0] == 5:
            y[-1, -1, -1, -1] += 1
        return y

    registered("wrong-at-the-end", {"batch_norm_normalize": kernel})
    options = ["--target", "wrong-at-the-end", "--dtype", "float32"]
    assert selfcheck.main(options) == 1
    rows, _ = table(capsys)
    assert ["FAIL" in row for row in rows] == [False, True, True]


BACKWARD_OUTPUTS = [
    (op, i)
    for op in (
        "fused_add_layer_norm_backward",
        "ada_layer_norm_zero_backward",
        "group_norm_backward",
        "instance_norm_backward",
    )
    for i in range(len(selfcases.CLASSES[op].output_names))
]


@pytest.mark.parametrize(("op", "number"), BACKWARD_OUTPUTS)
def test_a_large_gradient_wrong_at_its_end_fails(capsys, registered, monkeypatch, op, number):
    """Rows repeat a block; sums over all of them are judged column by column."""
    monkeypatch.setattr(selfcases, "BLOCK", 2 * 64 * 56 * 56)
    wrong = []

    def kernel(one, *inputs, **options):
        results = host.KERNELS[op](one, *inputs, **options)
        if results[0].size > 500_000 and wrong:
            results[number][(-1,) * results[number].ndim] += 1
        return results

    registered("wrong-at-the-end", {op: kernel})
    options = ["--target", "wrong-at-the-end", "--op", op, "--dtype", "float32"]
    assert selfcheck.main(options) == 0
    wrong.append(True)
    assert selfcheck.main(options) == 1
    rows, _ = table(capsys)
    assert ["FAIL" in row for row in rows] == [False, False, False, False, False, True]


def test_bfloat16_without_ml_dtypes_is_skipped_with_the_reason(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert selfcheck.main(["--quick", "--op", "layer_norm"]) == 0
    rows, text = table(capsys)
    assert [row[1] for row in rows] == list(dtypes.FLOATS)
    assert "SKIP" in rows[1]
    assert "pip install ml_dtypes" in text
    assert "3 passed, 0 failed, 1 skipped" in text


def test_the_gpu_target_without_a_gpu_is_an_error(capsys):
    assert selfcheck.main(["--target", "cuda"]) == 1
    _, text = table(capsys)
    assert text == "target 'cuda' needs a GPU: CuPy is not installed\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "nowhere"], "unknown target 'nowhere'; known targets: cuda, numpy"),
        (["--op", "no_norm"], "invalid choice: 'no_norm'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_unknown_names_are_refused(capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        selfcheck.main(options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_large_array_is_judged_at_its_edges():
    """Rows repeat a block; the check must look at the first rows, the last and some between."""
    assert selfcases.checked_rows(1000, 256) == [0, 1, 255, 256, 500, 998, 999]
    assert selfcases.checked_rows(3, 2) == [0, 1, 2]
    repeated = selfcheck.Host().repeated(np.arange(6).reshape(3, 2), 7)
    np.testing.assert_array_equal(repeated[:, 0], [0, 2, 4, 0, 2, 4, 0])


def test_a_large_array_wrong_in_its_last_row_fails(capsys, registered, monkeypatch):
    monkeypatch.setattr(selfcases, "BLOCK", 1 << 17)

    def change(y):
        y = y.copy()
        y[-1, -1] += 1
        return y

    registered("wrong-at-the-end", wrong_kernel(change))
    options = ["--target", "wrong-at-the-end", "--op", "rms_norm", "--dtype", "float32"]
    assert selfcheck.main(options) == 1
    rows, _ = table(capsys)
    assert [row[-1] for row in rows] == ["FAIL"] * 3


BROKEN_CUPY = {
    "no device": (
        "class runtime:\n    getDeviceCount = staticmethod(lambda: 0)\n",
        "(CUDA sees no device)",
    ),
    "no driver": (
        "class runtime:\n    @staticmethod\n    def getDeviceCount():\n"
        "        raise RuntimeError('driver version is insufficient')\n",
        "finds no usable GPU: RuntimeError: driver version is insufficient)",
    ),
    "broken import": (
        "raise ImportError('libcuda.so.1: cannot open shared object file')",
        "(CuPy cannot be imported: ImportError: libcuda.so.1: cannot open shared object file)",
    ),
}


@pytest.mark.parametrize("kind", BROKEN_CUPY)
def test_cupy_without_a_gpu_is_said_in_a_line_and_numpy_used(kind, tmp_path):
    """The whole command, in a process of its own, with a CuPy that does not work."""
    cuda, message = BROKEN_CUPY[kind]
    package = tmp_path / "cupy"
    (package / "cuda").mkdir(parents=True)
    (package / "cuda" / "__init__.py").write_text(cuda)
    (package / "__init__.py").write_text("__version__ = '14'\nfrom cupy import cuda\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    ran = subprocess.run(
        [sys.executable, "-m", "cunorm", "--quick", "--op", "rms_norm", "--dtype", "float32"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert len([line for line in ran.stdout.splitlines() if message in line]) == 1
    assert "target numpy" in ran.stdout
    assert "1 passed" in ran.stdout


@pytest.mark.gpu
def test_the_gpu_passes(capsys, monkeypatch):
    monkeypatch.undo()
    assert selfcheck.main(["--op", "layer_norm", "--op", "fused_add_rms_norm"]) == 0
    rows, text = table(capsys)
    assert "target cuda" in text
    assert len(rows) == 2 * 4 * 3
    for row in rows:
        if int(row[4]) == 4096:  # the one that is large enough to tell
            assert 0.3 < float(row[9]) < 2
