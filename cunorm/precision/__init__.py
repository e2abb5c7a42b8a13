"""How far from the true value a result may be: the one place for tolerances.

The rule: an output lies within one unit in the last place of its dtype beyond
``4 * eps * (|xhat * weight| + |bias|)`` of the value that exact arithmetic gives for the same
stored inputs, ``eps`` being that of the accumulation dtype. A sum, as gradients of parameters
are, lies within ``8 * eps * sqrt(count)`` times the root mean square of its terms, beyond its own
rounding. :func:`forward_bound` and :func:`backward_bound` turn this into numbers for the inputs
of an operator; :func:`forward_deviation` and :func:`backward_deviation` hold computed outputs
against them. The self-check, the tests and the benchmarks all ask here.

Kernels flush float32 subnormals to zero, which bounds allow for: below the smallest normal
float32 there is only zero, for values that enter as well as for values that leave. bfloat16 has
the exponents of float32 and passes through float32, so the same holds for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cunorm import reference
from cunorm.precision import channel, gradient, row
from cunorm.precision.units import (
    Array,
    Deviation,
    Expected,
    accumulation,
    error_bound,
    error_in_bounds,
    machine_eps,
    ulp,
)

__all__ = [
    "Deviation",
    "Expected",
    "accumulation",
    "backward_bound",
    "backward_deviation",
    "error_bound",
    "error_in_bounds",
    "forward_bound",
    "forward_deviation",
    "machine_eps",
    "ulp",
]


def forward_bound(op: str, inputs: Mapping[str, Any], **attributes: Any) -> dict[str, Expected]:
    """Expected outputs of a forward operator and the error allowed in each.

    Parameters
    ----------
    op : str
        Name of a function in :data:`cunorm.reference.FORWARD`.
    inputs : mapping
        The operator's arrays by parameter name (``x``, ``weight``, ...), as NumPy arrays;
        running statistics as they are before the call. Nothing is written to them.
    **attributes
        The operator's other parameters: ``normalized_shape``, ``num_groups``, ``training``,
        ``channel_axis``, ... By default, the operator's own.

    Returns
    -------
    dict
        :class:`Expected` for each output (``y``, ``residual_out``), for the statistics (``mean``,
        ``rstd``) if the operator has any, in the order in which it returns them, and for
        ``running_mean`` and ``running_var`` where it updates them.

    Notes
    -----
    ``residual_out`` is exact. ``mean`` lies within ``4 * eps * (|mean| + std)``: it is rounded
    once and comes from sums whose errors are proportional to the deviations from the mean. That
    of a row with an infinity may be NaN as well.
    ``rstd`` lies within ``8 * eps`` of itself: half the relative error of the variance, the
    reciprocal root (2 units) and its rounding.

    A running statistic lies within one unit in the last place of its dtype (instance norm: of
    that of x) beyond ``4 * eps`` of what is kept of the old value, and beyond its share of the
    error of the new one: that of the mean, and ``8 * eps`` of the variance. Where the new value
    is itself a mean over samples, that sum may add ``4 * eps``.
    """
    if op in reference.row.FORWARD:
        return row.forward_bound(op, inputs, **attributes)
    return channel.forward_bound(op, inputs, **attributes)


def forward_deviation(
    op: str,
    outputs: Sequence[Array] | Array,
    inputs: Mapping[str, Any],
    *,
    updated: Mapping[str, Array] | None = None,
    **attributes: Any,
) -> dict[str, Deviation]:
    """Hold computed outputs of a forward operator against :func:`forward_bound`.

    ``outputs`` are what the operator returned, with or without statistics; ``updated`` are the
    running statistics after the call, by name, if they are to be judged. The work is done in
    blocks: memory beyond inputs and outputs does not grow with the number of rows, of channels
    (batch and instance norm) or of samples (group norm).
    """
    if op in reference.row.FORWARD:
        return row.forward_deviation(op, outputs, inputs, **attributes)
    return channel.deviations(op, outputs, inputs, dict(updated or {}), attributes)


def backward_bound(op: str, inputs: Mapping[str, Any], **attributes: Any) -> dict[str, Expected]:
    """Expected gradients of a backward operator and the error allowed in each.

    Parameters are as for :func:`forward_bound`, ``op`` being in :data:`cunorm.reference.BACKWARD`.

    Notes
    -----
    The gradient of a parameter is a sum: one unit in the last place of its dtype beyond
    ``8 * eps * sqrt(count)`` times the root mean square of its terms. ``grad_x`` lies within one
    unit beyond ``4 * eps`` of the sizes of its terms, and of what the two sums may be wrong by
    where they enter it. `cunorm.precision.gradient` derives this.
    """
    if op in reference.batch.BACKWARD:
        return channel.backward_bound(op, inputs, **attributes)
    return gradient.backward_bound(op, inputs, **attributes)


def backward_deviation(
    op: str, outputs: Sequence[Array | None], inputs: Mapping[str, Any], **attributes: Any
) -> dict[str, Deviation]:
    """Hold computed gradients, None where there are none, against :func:`backward_bound`.

    The work is done in blocks, as in :func:`forward_deviation`.
    """
    if op in reference.batch.BACKWARD:
        return channel.deviations(op, outputs, inputs, {}, attributes)
    return gradient.backward_deviation(op, outputs, inputs, **attributes)
