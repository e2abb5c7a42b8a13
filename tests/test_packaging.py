"""The wheel, the sdist and an editable install each carry the kernels and find them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNEL_FILES = sorted(path.name for path in (ROOT / "cuda_src").iterdir() if path.is_file())
MODULES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "cunorm").rglob("*.py"))

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.cfg").is_file(), reason="the tests run away from a source tree"
)

REPORT = """
import cunorm
from cunorm.cuda.sources import source_dir
print(cunorm.__file__)
print(cunorm.__version__)
print(source_dir())
print(*sorted(path.name for path in source_dir().iterdir() if path.is_file()))
"""


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean_environment() | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def report(python: str | Path, cwd: Path, **env: str) -> tuple[Path, str, Path, list[str]]:
    """Where ``python`` imports cunorm from, its version, and the kernels that it finds."""
    package, version, sources, names = run(python, "-c", REPORT, cwd=cwd, **env).splitlines()
    return Path(package).parent, version, Path(sources), names.split()


def expected_version() -> str:
    text = (ROOT / "cunorm" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree: building leaves nothing behind in the real one."""
    copy = tmp_path_factory.mktemp("source") / "cunorm"
    ignored = shutil.ignore_patterns(
        ".git", "build", "dist", "site", "*.egg-info", "__pycache__", ".*_cache", ".venv", "venv"
    )
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from that sdist."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new virtual environment that sees this one's packages."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    (site,) = folder.glob("[Ll]ib/**/site-packages")
    # The packages of this environment, but not what their .pth files add: an editable install
    # of cunorm must not be seen.
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def test_there_are_kernels_to_ship():
    assert any(name.endswith(".cu") for name in KERNEL_FILES)
    assert any(name.endswith(".cuh") for name in KERNEL_FILES)


def test_wheel_is_pure_python_and_named_by_the_version(wheel: Path):
    assert wheel.name == f"cunorm-{expected_version()}-py3-none-any.whl"


def test_wheel_holds_exactly_the_package_and_the_kernels(wheel: Path):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    expected = {*MODULES, "cunorm/py.typed", *(f"cunorm/cuda_src/{name}" for name in KERNEL_FILES)}
    assert set(names) == expected


def test_wheel_depends_on_numpy_alone_and_carries_the_licence(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    lines = archive.read(metadata).decode().splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist:") and "extra" not in line]
    assert required == ["Requires-Dist: numpy>=2.0"]
    extras = {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra:")}
    assert {"cuda12x", "cuda13x", "test", "bench", "examples", "docs"} <= extras
    assert "License-Expression: MIT" in lines
    assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())


def test_sdist_holds_the_kernels_the_tests_and_the_rest_of_the_project(built: Path):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        *MODULES,
        *(f"cuda_src/{name}" for name in KERNEL_FILES),
        "tests/conftest.py",
        "tests/test_packaging.py",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "setup.cfg",
        "pyproject.toml",
    }
    assert expected <= names
    assert not [name for name in names if "__pycache__" in name]


def test_installed_wheel_finds_its_own_kernels(wheel: Path, tmp_path: Path):
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    package, version, sources, names = report(sys.executable, tmp_path, PYTHONPATH=str(unpacked))
    assert package == unpacked / "cunorm"
    assert version == expected_version()
    assert sources == unpacked / "cunorm" / "cuda_src"
    assert names == KERNEL_FILES


def test_checkout_finds_the_top_level_kernels(tmp_path: Path):
    package, _, sources, names = report(sys.executable, tmp_path, PYTHONPATH=str(ROOT))
    assert package == ROOT / "cunorm"
    assert sources == ROOT / "cuda_src"
    assert names == KERNEL_FILES


def test_editable_install_finds_the_kernels_of_the_tree(
    tree: Path, site_python: Path, tmp_path: Path
):
    # pip of this environment installs into the new one, which has none of its own.
    run(
        *(sys.executable, "-m", "pip", "--python", site_python, "install", "--quiet"),
        *("--disable-pip-version-check", "--no-deps", "--no-index", "--no-build-isolation"),
        *("--editable", tree),
        cwd=tmp_path,
    )
    package, version, sources, names = report(site_python, tmp_path)
    assert package == tree / "cunorm"
    assert version == expected_version()
    assert sources == tree / "cuda_src"
    assert names == KERNEL_FILES
