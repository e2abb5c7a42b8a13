"""Standardize a table of measurements with cunorm: what scikit-learn's StandardScaler does.

Each column is a channel and each row a sample of a batch, so the mean and the standard deviation
of a column are what batch normalization takes. ``cunorm.batch_norm_stats`` finds them in the rows
that are known, and ``cunorm.batch_norm_normalize`` brings any rows to that scale, new ones too. It
runs on the GPU where there is one, on NumPy otherwise.

The table is scikit-learn's breast-cancer data (569 tumours, 30 measurements of their cells) or its
digits (1797 images of 64 pixels). The measurements have all sizes, from 1e-3 to 4e3: whoever
compares rows by their distance has to bring them to one scale first, and the example shows what
that does for a classifier that looks at the nearest neighbours. (The pixels of the digits have
one scale already; theirs is better left alone.)

A column that never changes, as the corners of the digits, has no standard deviation to divide by.
It comes out as zeros.

Besides cunorm, this needs ``pip install scikit-learn``. Then::

    python examples/standardize_table.py
    python examples/standardize_table.py --table digits
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

import cunorm

TABLES = {"breast-cancer": load_breast_cancer, "digits": load_digits}


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


class Standardizer:
    """The scale of a table: fit it on some rows, bring others to it."""

    def fit(self, table):
        """Take mean and reciprocal standard deviation of each column of ``(rows, columns)``."""
        # The columns lie across the rows: channels-last, read in place.
        self.mean, self.rstd = cunorm.batch_norm_stats(table, eps=0.0)
        return self

    def transform(self, table):
        """Bring rows to mean 0 and standard deviation 1, as far as they are like those known."""
        return cunorm.batch_norm_normalize(table, self.mean, self.rstd)


def standardize(table):
    """Bring all rows of a table to their own scale, in one call."""
    return cunorm.batch_norm(table, training=True, eps=0.0)


def load(name):
    """A table of scikit-learn and its labels, every third row kept back: known, new, labels."""
    table, labels = TABLES[name](return_X_y=True)
    new = np.arange(len(table)) % 3 == 0
    return table[~new], table[new], labels[~new], labels[new]


def accuracy(known, new, labels, new_labels):
    """Share of new rows that their five nearest known neighbours classify right."""
    return KNeighborsClassifier(5).fit(known, labels).score(new, new_labels)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Standardize the columns of a table.")
    parser.add_argument("--table", choices=TABLES, default="breast-cancer")
    args = parser.parse_args(argv)

    xp = array_module()
    known, new, labels, new_labels = load(args.table)
    print(f"{args.table}: {len(known)} rows known, {len(new)} new, {known.shape[1]} columns")

    standardizer = Standardizer().fit(xp.asarray(known))
    scaled = [to_host(standardizer.transform(xp.asarray(rows))) for rows in (known, new)]
    scaler = StandardScaler().fit(known)
    expected = [scaler.transform(rows) for rows in (known, new)]

    largest = max(abs(a - b).max() for a, b in zip(scaled, expected, strict=True))
    print(f"largest difference from StandardScaler  {largest:.1e}  ({xp.__name__})")
    print(f"accuracy, table as it is       {accuracy(known, new, labels, new_labels):.3f}")
    print(f"accuracy, table standardized   {accuracy(*scaled, labels, new_labels):.3f}")


if __name__ == "__main__":
    main()
