"""Measures cunorm on a GPU: ``python -m bench`` from the repository root."""
