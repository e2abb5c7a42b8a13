"""What ``import cunorm`` does not do, and what works where nothing but NumPy is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Makes the optional packages look as they do where they are not installed.
BLOCK_OPTIONAL = """
import sys

class Blocked:
    names = {"cupy", "cupy_backends", "cupyx", "torch", "ml_dtypes", "cuda", "scipy", "jax"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Blocked())
"""


def run(code: str) -> str:
    """Run ``code`` in a new interpreter where every warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_optional_package():
    loaded = run(
        "import sys, cunorm\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(roots & {'cupy', 'cupyx', 'cupy_backends', 'torch', 'ml_dtypes', 'cuda',"
        " 'scipy', 'jax'}))"
    )
    assert loaded.split() == []


def test_call_on_host_arrays_loads_no_optional_package():
    loaded = run(
        "import sys, numpy, cunorm\n"
        "cunorm.layer_norm(numpy.ones((2, 3), 'float32'), 3)\n"
        "cunorm.rms_norm(numpy.ones((2, 3)), 3)\n"
        "cunorm.batch_norm(numpy.ones((2, 3)), training=True)\n"
        "cunorm.group_norm(numpy.ones((2, 4)), 2)\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(roots & {'cupy', 'cupyx', 'cupy_backends', 'torch', 'cuda', 'scipy'}))"
    )
    assert loaded.split() == []


def test_numpy_alone_is_enough():
    out = run(
        BLOCK_OPTIONAL
        + "import numpy, cunorm\n"
        + "x = numpy.array([[1.0, 3.0], [-2.0, 2.0]])\n"
        + "print(*cunorm.layer_norm(x, 2, eps=0.0).ravel())\n"
        + "y, total = cunorm.fused_add_rms_norm(x, x, numpy.ones(2), eps=0.0)\n"
        + "print(*total.ravel())\n"
        + "print(*numpy.mean(y * y, axis=-1).round(12))\n"
    )
    assert out.splitlines() == ["-1.0 1.0 -1.0 1.0", "2.0 6.0 -4.0 4.0", "1.0 1.0"]


def test_every_public_name_is_there_without_the_optional_packages():
    out = run(
        BLOCK_OPTIONAL
        + "import cunorm\n"
        + "print(*[name for name in cunorm.__all__ if getattr(cunorm, name, None) is None])\n"
        + "print(*sorted(set(cunorm.__all__) - set(dir(cunorm))))\n"
    )
    assert out.split() == []


@pytest.mark.parametrize("extra", ["cuda12x", "cuda13x"])
def test_cuda_target_without_cupy_names_the_extras(extra: str):
    out = run(
        BLOCK_OPTIONAL
        + "import numpy, cunorm\n"
        + "try:\n"
        + "    cunorm.layer_norm(numpy.ones((2, 3), 'float32'), 3, target='cuda')\n"
        + "except Exception as error:\n"
        + "    print(type(error).__name__, error)\n"
    )
    assert extra in out


def test_a_misspelt_name_is_an_attribute_error():
    out = run(
        "import cunorm\n"
        "try:\n"
        "    cunorm.layernorm\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
    )
    assert "cunorm" in out and "layernorm" in out


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_fork_after_import_works():
    out = run(
        "import os, warnings, numpy, cunorm\n"
        # Python 3.12 warns of the threads of NumPy's BLAS.
        "warnings.simplefilter('ignore')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    y = cunorm.layer_norm(numpy.array([[1.0, 3.0]]), 2, eps=0.0)\n"
        "    os._exit(0 if y.tolist() == [[-1.0, 1.0]] else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert out.split() == ["0"]


def test_import_costs_little_beyond_numpy():
    # Processor time, not wall time: other work on the machine must not fail the test.
    code = (
        "import time, numpy\n"
        "start = time.process_time()\n"
        "import cunorm\n"
        "print(time.process_time() - start)\n"
    )
    assert min(float(run(code)) for _ in range(3)) < 0.25
