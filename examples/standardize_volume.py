"""Standardize every slice of an MRI volume with one call of cunorm.

The echo-planar volumes that nibabel ships (2 time points, 24 slices of 96 x 128 pixels) have
slices of different brightness and contrast. ``cunorm.layer_norm`` over the two image axes brings
each slice to mean 0 and standard deviation 1: the z-score of the slice, background included. It
runs on the GPU where there is one, on NumPy otherwise.

A blank slice has no standard deviation to divide by. The small ``eps`` under the square root
makes it come out as zeros, where a plain z-score gives NaN; against the variance of a real slice
it is nothing.

Besides cunorm, this needs ``pip install nibabel matplotlib``. Then::

    python examples/standardize_volume.py --output standardized.png
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

import nibabel
import numpy as np
from matplotlib.figure import Figure

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


def load_slices(path):
    """Read a NIfTI file as a float32 array of shape ``(..., slice, y, x)``."""
    # NIfTI stores x fastest: transposed, each slice is one contiguous stretch of memory.
    return nibabel.load(path).get_fdata(dtype=np.float32).T


def standardize(slices):
    """Bring each image of ``(..., y, x)`` to mean 0 and standard deviation 1."""
    return cunorm.layer_norm(slices, slices.shape[-2:])


def slice_statistics(slices):
    """Mean and standard deviation of each slice, in float64."""
    slices = slices.astype(np.float64)
    return slices.mean(axis=(-2, -1)), slices.std(axis=(-2, -1))


def draw(before, after, path):
    """Picture a few slices of a volume before and after, and the statistics of all of them."""
    shown = np.unique(np.linspace(0, len(before) - 1, 6).astype(int))
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    widths = [1] * len(shown) + [2]
    panels = figure.subplots(2, len(widths), squeeze=False, width_ratios=widths)

    for (*images, plot), label, slices in zip(
        panels, ("before", "after"), (before, after), strict=True
    ):
        # One grey scale for the whole row: differences between its slices are real.
        low, high = np.percentile(slices, (1, 99.8))
        for axes, k in zip(images, shown, strict=True):
            image = axes.imshow(slices[k], cmap="gray", origin="lower", vmin=low, vmax=high)
            axes.set(title=f"slice {k}", xticks=[], yticks=[])
        images[0].set_ylabel(label, fontsize="large")
        figure.colorbar(image, ax=images[-1], shrink=0.7)

        mean, std = slice_statistics(slices)
        plot.plot(std, "s-", color="#d55e00", markersize=4, label="standard deviation")
        plot.plot(mean, "o-", color="#0072b2", markersize=4, label="mean")
        plot.set(title=f"all slices, {label}", xlabel="slice")
        plot.margins(y=0.15)
        plot.grid(alpha=0.3)
    plot.legend(loc="center")

    figure.savefig(path, dpi=120)


def main(argv=None):
    default = files("nibabel") / "tests" / "data" / "example4d.nii.gz"
    parser = argparse.ArgumentParser(description="Standardize each slice of an MRI volume.")
    parser.add_argument("input", nargs="?", default=default, help="default: nibabel's example")
    parser.add_argument("--output", type=Path, default="standardized.png", help="the picture")
    args = parser.parse_args(argv)

    xp = array_module()
    slices = load_slices(args.input)
    standardized = to_host(standardize(xp.asarray(slices)))

    mean, std = slice_statistics(standardized)
    print(f"{mean.size} slices of {slices.shape[-2]} x {slices.shape[-1]}, {xp.__name__}")
    print(f"largest |mean|    {abs(mean).max():.1e}")
    print(f"largest |std - 1| {abs(std - 1).max():.1e}")

    volume = (0,) * (slices.ndim - 3)  # the first time point of a series
    draw(slices[volume], standardized[volume], args.output)
    print(f"picture: {args.output}")


if __name__ == "__main__":
    main()
