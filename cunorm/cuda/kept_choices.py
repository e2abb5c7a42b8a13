"""How large sets are kept on chip by CTAs that wait for each other (channel_kept.cuh).

A set of one array must fit the GPU twice at least: one is written while another is read. Where each
set fits once, group norm of 33.5 MB a group (2 x 32 x 128 x 128 x 128 float32) takes 435 us for 389
of three passes over memory; but batch norm backward of 33.5 MB for both arrays, which writes half
of what it reads, 543 for 614 (copy 376). What was measured on an H200, in fractions of a copy:
batch norm of 8.4 MB a channel 0.81 (three passes over memory 0.60), of 16.8 MB 0.69 (0.59); group
norm of 2.1 MB a group 0.73 (a cluster of 16 CTAs 0.55); instance norm of 2.1 MB a channel 0.81
(0.67); batch norm backward of 16.8 MB for both arrays 0.68 (0.57). That is with 128 KiB and more a
CTA, two CTAs an SM; four CTAs with 64 KiB each, as many sets at a time, do worse by a quarter: each
wait costs the same, whatever is kept meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from cunorm.cuda.channel_choices import MOST_SHARED_OUT
from cunorm.cuda.choices import ROOMY, TRANSACTION

_CTAS = 2  # an SM
_START = 132  # segments that are read at a time when a launch starts: with all, 5 % slower


_SMALL_CLUSTER = 8  # CTAs: of 16, instance norm of 2.1 MB a channel takes 192 us, kept 159
_FEW_SETS = 1 << 27  # bytes of x: 64 channels of 1.6 MB take 77 us in clusters of 16, kept 80


@dataclass(frozen=True)
class KeptTile:
    """The numbers of ``KeptShape`` in channel_kept.cuh, and the segments of a set."""

    vec: int
    packs: int  # of an array
    shared: int
    threads: int
    ctas: int
    one_run: bool
    tensors: int
    segments: int

    @property
    def expression(self) -> str:
        return (
            f"KeptShape<{self.vec}, {self.packs}, {self.shared}, {self.threads}, {self.ctas}, "
            f"{str(self.one_run).lower()}>"
        )

    def shared_memory(self, itemsize: int) -> int:
        return self.tensors * self.shared * self.threads * self.vec * itemsize

    def groups(self, sets: int, multiprocessors: int) -> int:
        """How many sets are on chip at a time: as many as fit, and as many in every round."""
        fit = max(multiprocessors * self.ctas // self.segments, 1)
        rounds = -(-sets // fit)
        return -(-sets // rounds)

    def lag(self, sets: int, groups: int) -> int:
        """How many sets before must have been read when one is begun; 0: none.

        Where all are on chip at a time none waits: group norm 1 x 8 x 1000000 float32 with 4 groups
        takes 29.0 us for 34.7, instance norm 28.5 for 30.1.
        """
        return 0 if groups == sets else -(-_START // self.segments)


@dataclass(frozen=True)
class _Hold:
    """What a CTA holds: packs of a thread, of all arrays, so many of them in registers."""

    threads: int
    packs: int
    in_registers: int


_ONE_ARRAY = _Hold(256, 32, 11)
# Of float32 the output of one pack after the other takes more registers: with 11, and of one run
# with 10 as well, the compiler spills.
_ONE_OF_FLOATS = _Hold(256, 32, 9)
# Where one more set fits for it: 618 us for 630. Values that may have to be scaled leave no
# register for it. Where the channel changes within a segment, what is written waits for its weight:
# group norm 4 x 128 x 1024 x 1024 takes 736 us for 619, and instance norm is as fast without.
_LARGEST = _Hold(256, 40, 12)
_TWO_ARRAYS = _Hold(512, 16, 4)  # more arithmetic: 1112 us for 1196


def better_kept(vectors: int, cluster: int, tensors: int, nbytes: int | None) -> bool:
    """Whether sets are kept by CTAs that wait, where another launch has them in clusters.

    Parameters
    ----------
    vectors : int
        Of a set.
    cluster : int
        CTAs that share a set there; 0 where it would be read twice.
    tensors : int
        Arrays that are held: 2 in backward.
    nbytes : int or None
        Bytes of x, where it may matter how many sets there are.
    """
    if 0 < cluster <= _SMALL_CLUSTER or (cluster and vectors <= MOST_SHARED_OUT):
        return False
    few = tensors == 1 and nbytes is not None and nbytes <= _FEW_SETS
    return cluster == 0 or not few


def kept_tile(
    vectors: int,
    vec: int,
    access: int,
    itemsize: int,
    arch: int,
    tensors: int,
    one_run: bool,
    scaled: bool,
    multiprocessors: int,
) -> KeptTile | None:
    """The launch that keeps sets of so many vectors on chip; None where they are too large.

    Parameters
    ----------
    vectors, vec, access, itemsize : int
        Vectors of a set, elements of a vector and of a memory transaction, bytes of an element.
    arch, multiprocessors : int
        Of the device; 90 for compute capability 9.0.
    tensors : int
        Arrays that are held: 2 in backward.
    one_run : bool
        Whether a set is one run of neighbours.
    scaled : bool
        Whether values may leave the range of the accumulation dtype when they are squared.
    """
    if arch not in ROOMY or vec * itemsize != TRANSACTION or access < vec:
        return None
    room = multiprocessors * _CTAS
    hold = _hold(tensors, itemsize)
    segments = _segments(vectors, hold, tensors)
    if tensors == 1 and not (scaled or one_run) and segments >= room // 6:
        largest = _segments(vectors, _LARGEST, tensors)
        if room // largest > room // segments:
            hold, segments = _LARGEST, largest
    if segments * (1 if tensors == 2 else 2) > room:
        return None
    packs = hold.packs // tensors
    shared = packs - hold.in_registers // tensors
    return KeptTile(vec, packs, shared, hold.threads, _CTAS, one_run, tensors, segments)


def _hold(tensors: int, itemsize: int) -> _Hold:
    if tensors == 2:
        return _TWO_ARRAYS
    return _ONE_OF_FLOATS if itemsize == 4 else _ONE_ARRAY


def _segments(vectors: int, hold: _Hold, tensors: int) -> int:
    return -(-vectors // (hold.threads * (hold.packs // tensors)))
