"""Skips the tests whose hardware or library is missing, and says which; compiles for the others."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import compiling
import pytest
from rehearsal import pretend_on, rehearse


@functools.cache
def missing_gpu() -> str | None:
    """Why the tests marked ``gpu`` cannot run here, or None where they can."""
    if importlib.util.find_spec("cupy") is None:
        return "needs a GPU: CuPy is not installed"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import cupy

            if cupy.cuda.runtime.getDeviceCount() == 0:
                return "needs a GPU: CUDA sees no device"
            cupy.zeros(1).get()
    except Exception as error:  # whatever a broken driver or CuPy raises
        return f"needs a GPU: {type(error).__name__}: {error}"
    return None


@functools.cache
def missing_torch() -> str | None:
    """Why the tests marked ``torch`` cannot run here, or None where they can."""
    if importlib.util.find_spec("torch") is None:
        return "needs PyTorch, which is not installed"
    return None


REQUIREMENTS = {"gpu": missing_gpu, "torch": missing_torch}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in REQUIREMENTS.items():
        if item.get_closest_marker(marker) is not None and (reason := missing()):
            pytest.skip(reason)


@pytest.fixture
def check_kernels():
    """Fails where one of some kernels, compiled for an architecture, uses local memory."""
    return compiling.check_kernels


@pytest.fixture
def pretend(monkeypatch):
    """Makes plans as for a GPU of that compute capability."""
    return functools.partial(pretend_on, monkeypatch)


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The kernels on the host, with all that the tests of this run launch."""
    from host_kernels import HostKernels

    built = HostKernels(tmp_path_factory.mktemp("kernels"))
    tests = [item for item in request.session.items if "kernels" in item.fixturenames]
    with built.noting():
        for test in tests:
            rehearse(test, kernels=built)
    return built


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=compiling.compiles)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        compiling.begin_ahead(session.items)


def pytest_sessionfinish() -> None:
    compiling.stop()
