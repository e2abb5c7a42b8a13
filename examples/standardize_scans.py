"""Bring MRI scans to one intensity scale with instance normalization.

A scanner's grey values have no unit, and they drift from scan to scan. Before scans are compared,
or given to a network, each is brought to mean 0 and standard deviation 1: the z-score of a whole
volume, which is ``cunorm.instance_norm`` of an array ``(scan, channel, z, y, x)`` of one channel.
With the slices as channels, ``(scan, slice, y, x)``, the same call brings each slice of each scan
to that scale. It runs on the GPU where there is one, on NumPy otherwise.

The data are the two time points of the echo-planar series that nibabel ships. The file stores x
fastest, so that the axes of the array that nibabel gives are the other way round.

Besides cunorm, this needs ``pip install nibabel``. Then::

    python examples/standardize_scans.py
"""

from __future__ import annotations

import argparse
from importlib.resources import files

import nibabel
import numpy as np

import cunorm


def array_module():
    """Return CuPy where there is a GPU to use, NumPy elsewhere."""
    try:
        import cupy
    except ImportError:
        return np
    return cupy if cupy.cuda.is_available() else np


def to_host(array):
    """Return a NumPy array, copied from the GPU if need be."""
    return array if isinstance(array, np.ndarray) else array.get()


def load_scans(path):
    """Read a NIfTI series as a float32 array of shape ``(scan, z, y, x)``."""
    series = nibabel.load(path).get_fdata(dtype=np.float32)
    return series.T if series.ndim == 4 else series.T[None]


def standardize_scans(scans):
    """Bring each scan of ``(scan, z, y, x)`` to mean 0 and standard deviation 1."""
    return cunorm.instance_norm(scans[:, None])[:, 0]


def standardize_slices(scans):
    """Bring each slice of each scan to mean 0 and standard deviation 1."""
    return cunorm.instance_norm(scans)


def statistics(scans):
    """Mean and standard deviation of each scan, in float64."""
    flat = scans.reshape(len(scans), -1).astype(np.float64)
    return flat.mean(axis=1), flat.std(axis=1)


def main(argv=None):
    default = files("nibabel") / "tests" / "data" / "example4d.nii.gz"
    parser = argparse.ArgumentParser(description="Bring MRI scans to one intensity scale.")
    parser.add_argument("input", nargs="?", default=default, help="default: nibabel's example")
    args = parser.parse_args(argv)

    xp = array_module()
    scans = load_scans(args.input)
    shape = " x ".join(map(str, scans.shape[1:]))
    print(f"{len(scans)} scans of {shape}, {xp.__name__}")
    on_device = xp.asarray(scans)
    for name, values in (
        ("as they are", scans),
        ("standardized", to_host(standardize_scans(on_device))),
        ("slice by slice", to_host(standardize_slices(on_device))),
    ):
        print(f"\n{name}\nscan        mean    std. dev.")
        for k, (mean, std) in enumerate(zip(*statistics(values), strict=True)):
            print(f"{k:4}  {mean:10.3g}   {std:10.3g}")


if __name__ == "__main__":
    main()
