// Large sets in one launch: every CTA keeps its segment of a set on chip from when it is read
// until the statistics of the set are known, and writes it from there.
//
// When all records of a set are there, each of its CTAs merges them, in the same order: that is
// sooner done than one of them could tell the others. An SM has room for several CTAs; those of a
// set begin to read when the set `args.kept.lag` before has been read, so that some sets are read
// while others wait or are written, and memory is busy with both at all times.
//
// Who has waited for long leaves, and the last CTA of the set to arrive reads and writes that
// segment as well (channel_attendance.cuh).
//
// A CTA goes on with the same segment of another set, `args.kept.groups` further: what it has
// written makes room for what it reads.
//
//   struct Work {  // KeptNorm, KeptGradient
//       Outcome conclude(args, held, set, leaves);  // from records; `leaves`: statistics too
//       void rewrite<Shape>(args, place, set, number, outcome);  // a segment out of memory
//       struct Held<Shape> {                  // a segment on chip
//           void read(args, set);             // starts to
//           void record(args, set, number);   // examines, leaves a record: `number` of all
//           void write(args, outcome, set, next);  // and starts to read that of set `next`
//       };
//   };
//
// Launch: clear_attendance first, a thread for each word; then run_kept, grid = groups * segments,
// block = THREADS, segments < order::kLeave.
#pragma once

#include "channel_attendance.cuh"
#include "channel_merge.cuh"
#include "channel_runs.cuh"

// As RowShape; a CTA holds a segment of a set. ONE_RUN: sets are runs of neighbours.
template <int VEC, int PACKS, int SHARED, int THREADS, int CTAS, bool ONE_RUN>
struct KeptShape {
    static constexpr int kVec = VEC, kAccess = VEC;
    static constexpr int kPacks = PACKS;
    static constexpr int kShared = SHARED;
    static constexpr int kThreads = THREADS, kBlock = THREADS;
    static constexpr int kCtas = CTAS;
    static constexpr bool kOneRun = ONE_RUN;
    static constexpr int kCluster = 1, kRows = 1, kLanes = 32, kWarps = THREADS / 32;
    static constexpr int kRecords = 2;
    static constexpr bool kSegment = true, kRagged = false, kMasked = false;
};

// As Place in row_tile.cuh, in 32 bits: vectors of a set are numbered, gaps between its runs
// included, which follow each other upwards. `gap`: of the array that is being walked.
template <int VEC, int PACKS, int SHARED, int THREADS, int CTAS, bool ONE_RUN>
struct Place<KeptShape<VEC, PACKS, SHARED, THREADS, CTAS, ONE_RUN>> {
    static constexpr unsigned kVectors = THREADS * PACKS;

    const ChannelArgs& args;
    unsigned passed;   // vectors of the set before the segment
    unsigned vectors;  // of the segment
    unsigned first;    // of this thread
    unsigned gap = 0;
    bool live = true;

    __device__ __forceinline__ Place(const ChannelArgs& args, unsigned segment)
        : args(args),
          passed(segment * kVectors),
          vectors(min(unsigned(args.vectors) - passed, kVectors)),
          first(threadIdx.x) {}

    __device__ __forceinline__ unsigned vector(int pack) const { return first + pack * THREADS; }
    __device__ __forceinline__ bool holds(int pack) const { return vector(pack) < vectors; }

    __device__ __forceinline__ void walk(ChannelArray array) {
        if (!ONE_RUN) gap = unsigned(args.run_step[array] / VEC) - args.kept.length.size;
    }
    // Modulo 2^32, as every step on the way to it.
    __device__ __forceinline__ unsigned step_of(unsigned vector) const {
        if (ONE_RUN) return vector;
        const KeptBrief& by = args.kept;
        return vector + (__umulhi(vector, by.length.multiplier) >> by.length_shift) * gap;
    }
    __device__ __forceinline__ size_t column(int pack) const {
        return size_t(step_of(passed + vector(pack))) * VEC;
    }
    __device__ __forceinline__ size_t origin() const { return size_t(step_of(passed)) * VEC; }

    // Channel of a pack, among those of the set.
    __device__ __forceinline__ unsigned channel(int pack) const {
        const KeptBrief& by = args.kept;
        return __umulhi(passed + vector(pack), by.channel.multiplier) >> by.channel_shift;
    }
};

// Where set `set` starts.
template <typename T>
struct KeptSet {
    unsigned outer, inner;

    __device__ __forceinline__ KeptSet(const ChannelArgs& args, unsigned set)
        : outer(set / unsigned(args.inner_sets)), inner(set - outer * unsigned(args.inner_sets)) {}

    __device__ __forceinline__ long long base(const ChannelArgs& args, ChannelArray array) const {
        return outer * args.outer_step[array] + inner * args.inner_step;
    }
    __device__ __forceinline__ const T* x(const ChannelArgs& args) const {
        return static_cast<const T*>(args.x) + base(args, kChannelX);
    }
    __device__ __forceinline__ const T* grad_out(const ChannelArgs& args) const {
        return static_cast<const T*>(args.grad_out) + base(args, kGradOut);
    }
    __device__ __forceinline__ T* y(const ChannelArgs& args) const {
        return static_cast<T*>(args.y) + base(args, kChannelY);
    }
};

// By set, of its segments.
__device__ __forceinline__ Attendance attendance_of(const ChannelArgs& args, long long set) {
    return {static_cast<unsigned*>(args.progress), args.sets, unsigned(args.segments), set};
}

template <class Work, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    run_kept(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    const unsigned segments = args.segments, sets = args.sets, groups = args.kept.groups;
    const unsigned group = blockIdx.x / segments, segment = blockIdx.x - group * segments;
    __shared__ unsigned told[2];

    Place<Shape> place(args, segment);
    typename Work::template Held<Shape> mine(place);
    if (args.kept.lag > 0 && group >= args.kept.lag) {
        const Attendance before = attendance_of(args, group - args.kept.lag);
        if (threadIdx.x == 0) order::wait_for(before.arrived, segments, kPatience);
        __syncthreads();
    }
    bool held = false;
#pragma unroll 1
    for (unsigned set = group; set < sets; set += groups) {
        const Attendance attendance = attendance_of(args, set);
        // Else the addresses of all packs are worked out once, and kept in registers.
        place.first = opaque(place.first);
        if (!held) mine.read(args, set);
        mine.record(args, set, (long long)set * segments + segment);
        if (threadIdx.x == 0) told[0] = attendance.stays(segment, told[1]);
        __syncthreads();
        held = told[0];
        if (!held) continue;
        const auto outcome = Work::conclude(args, mine, set, told[1] > 0);
        place.first = opaque(place.first);
        mine.write(args, outcome, set, set + groups);

#pragma unroll 1
        for (unsigned other = 0; told[1] > 1 && other < segments; ++other) {
            __syncthreads();
            if (threadIdx.x == 0) told[0] = attendance.claim(other);
            __syncthreads();
            if (!told[0]) continue;
            Place<Shape> of_other(args, other);
            Work::rewrite(args, of_other, set, (long long)set * segments + other, outcome);
        }
    }
}

template <class Norm, typename T>
struct KeptNorm {
    using A = Accumulator<T>;
    static constexpr bool kOneChannel = Norm::kSetsAreOneChannel;

    template <class Shape>
    struct Held;

    template <class Shape>
    static __device__ __forceinline__ Merged<A> conclude(const ChannelArgs& args,
                                                         const Held<Shape>&, long long set,
                                                         bool leaves) {
        const Merged<A> merged = merged_set<T, Shape::kBlock, 1>(args, set, true);
        if (leaves && threadIdx.x == 0) store_merged<Norm, T>(args, set, merged);
        return merged;
    }

    // What elements of a channel are normalized with, where they are held multiplied by `scale`.
    static __device__ __forceinline__ Coefficients<A> of_channel(const ChannelArgs& args,
                                                                 const KeptSet<T>& at,
                                                                 const Merged<A>& merged, A scale,
                                                                 unsigned channel) {
        if (!kOneChannel) channel += at.inner * unsigned(args.set_channels);
        return coefficients<T>(args, merged.statistics, merged.scale * inverse_scale(scale),
                               (long long)channel);
    }

    template <class Shape>
    static __device__ void rewrite(const ChannelArgs& args, Place<Shape>& place, unsigned set,
                                   long long number, const Merged<A>& merged) {
        const KeptSet<T> at(args, set);
        const A scale =
            order::load_fresh(static_cast<const SegmentRecord*>(args.partial) + number).scale;
#pragma unroll 1
        for (int i = 0; i < Shape::kPacks && place.holds(i); ++i) {
            A value[Shape::kVec];
            place.walk(kChannelX);
            widen_pack(load<Shape::kAccess, Shape::kVec>(at.x(args) + place.column(i)), value);
            const unsigned channel = kOneChannel ? at.inner : place.channel(i);
            const auto by = of_channel(args, at, merged, scale, channel);
#pragma unroll
            for (int e = 0; e < Shape::kVec; ++e)  // rounded as where they were kept
                value[e] = by.apply(widen<A>(narrow<T>(value[e] * scale)));
            place.walk(kChannelY);
            store<Shape::kAccess, Shape::kVec>(at.y(args) + place.column(i), narrowed<T>(value));
        }
    }

    template <class Shape>
    struct Held {
        Place<Shape>& place;
        RowTile<T, Shape> x;
        A scale;  // of what is held (numbers.cuh)

        __device__ __forceinline__ explicit Held(Place<Shape>& place) : place(place), x(place) {}

        __device__ __forceinline__ void read(const ChannelArgs& args, unsigned set) {
            place.walk(kChannelX);
            const T* const from = KeptSet<T>(args, set).x(args);
            // The same one element for the first set of a CTA as for those that follow. Asked for
            // first and awaited last: it must not hold back the packs.
            const Pack<T, 1> centre = load<1, 1>(from + place.origin());
            x.read_packs(from);
            x.near = widen<A>(part_of<T>(awaited(centre), 0));
        }
        __device__ __forceinline__ void record(const ChannelArgs& args, unsigned,
                                               long long number) {
            scale = record_tile(args, x, double(place.vectors) * Shape::kVec, number);
        }
        __device__ __forceinline__ void write(const ChannelArgs& args, const Merged<A>& merged,
                                              unsigned set, unsigned next) {
            const KeptSet<T> at(args, set);
            unsigned channel = kOneChannel ? at.inner : place.channel(0);
            auto by = of_channel(args, at, merged, scale, channel);
            T* const y = at.y(args);
            const bool more = next < args.sets;
            const T* const from = KeptSet<T>(args, more ? next : set).x(args);
            place.walk(kChannelX);
            const Pack<T, 1> centre = load<1, 1>(from + place.origin());
#pragma unroll
            for (int i = 0; i < Shape::kPacks; ++i) {
                if (place.holds(i)) {
                    if (!kOneChannel && place.channel(i) != channel) {
                        channel = place.channel(i);
                        by = of_channel(args, at, merged, scale, channel);
                    }
                    A value[Shape::kVec];
                    x.widened(i, value);
#pragma unroll
                    for (int e = 0; e < Shape::kVec; ++e) value[e] = by.apply(value[e]);
                    place.walk(kChannelY);
                    store<Shape::kAccess, Shape::kVec>(y + place.column(i), narrowed<T>(value));
                    place.walk(kChannelX);
                    if (more) x.read_pack(i, from);
                }
                x.begun(i);
            }
            x.near = widen<A>(part_of<T>(awaited(centre), 0));
        }
    };
};
