// Large sets in one launch: every CTA keeps its segment of a set on chip from when it is read
// until the statistics of the set are known, and writes it from there.
//
// The CTA whose segment is the last of its set to be examined merges the records, in a fixed
// order; the others wait for it. CTAs start in the order of their numbers wherever that has been
// looked at, and an SM has room for several, so that while the CTAs of one set wait, those of
// other sets read and write. Nothing rests on that order, nor on how many CTAs fit the GPU
// together with whatever else it runs: a CTA that has waited for long leaves, and the last one of
// its set reads and writes that segment as well.
//
//   struct Work {  // KeptNorm, KeptGradient
//       static void merge(args, set);          // records to coefficients; all of the CTA
//       struct Held<Shape> {                   // a segment on chip
//           Held(args, place, set, segment);   // starts to read
//           void record(args);                 // examines, leaves a record
//           void restore(args);                // instead, as it was when its record was left
//           void write(args);
//       };
//   };
//
// Launch: clear_attendance first, a thread for each word; then run_kept, grid = sets * segments,
// block = kMergeBlock. `args.lag`: how often a CTA looks for what it waits for before it leaves.
#pragma once

#include "channel_merge.cuh"
#include "channel_runs.cuh"

// Who has done what, in words that are zero before the launch.
struct Attendance {
    static constexpr unsigned kReady = 1u << 31;
    enum Seat { kTaken, kLeft, kClaimed };

    unsigned* done;   // of a set: segments whose records are there
    unsigned* state;  // of a set: kReady when its coefficients are there, plus how many have left
    unsigned* seat;   // of a segment: a Seat

    __device__ __forceinline__ Attendance(const ChannelArgs& args, long long set)
        : done(static_cast<unsigned*>(args.progress) + set),
          state(done + args.sets),
          seat(static_cast<unsigned*>(args.progress) + 2 * args.sets + set * args.segments) {}

    static __device__ __forceinline__ long long words(const ChannelArgs& args) {
        return args.sets * (2 + args.segments);
    }

    // Waits for the coefficients; false where another CTA is to write the segment.
    __device__ __forceinline__ bool wait(unsigned segment, long long patience) const {
        if (order::wait_for(state, kReady, patience)) return true;
        order::replace(seat + segment, kTaken, kLeft);
        if (!(order::arrive(state) & kReady)) return false;
        return order::replace(seat + segment, kLeft, kTaken);  // ready after all
    }
    // Takes over a segment whose CTA has left.
    __device__ __forceinline__ bool claim(unsigned segment) const {
        return order::replace(seat + segment, kLeft, kClaimed);
    }
};

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    clear_attendance(const __grid_constant__ ChannelArgs args) {
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i < Attendance::words(args)) static_cast<unsigned*>(args.progress)[i] = 0;
}

template <class Work, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    run_kept(const __grid_constant__ ChannelArgs args) {
    static_assert(Shape::kBlock == kMergeBlock, "the CTA merges the records of its set");
    using Held = typename Work::template Held<Shape>;
    const unsigned segments = args.segments, set = blockIdx.x / segments;
    const unsigned segment = blockIdx.x - set * segments;
    __shared__ unsigned told[1];

    Place<Shape> place(args, set, (long long)segment);
    Held mine(args, place, set, segment);
    mine.record(args);
    const Attendance attendance(args, set);
    if (threadIdx.x == 0) told[0] = order::arrive(attendance.done);
    __syncthreads();
    unsigned left = 0;
    if (told[0] + 1 == segments) {
        Work::merge(args, set);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) told[0] = order::arrive(attendance.state, Attendance::kReady);
        __syncthreads();
        left = told[0];
    } else {
        __syncthreads();
        if (threadIdx.x == 0) told[0] = attendance.wait(segment, args.lag);
        __syncthreads();
        if (!told[0]) return;
    }
    mine.write(args);

#pragma unroll 1
    for (unsigned other = 0; left > 0 && other < segments; ++other) {
        __syncthreads();
        if (threadIdx.x == 0) told[0] = attendance.claim(other);
        __syncthreads();
        if (!told[0]) continue;
        Place<Shape> of_other(args, set, (long long)other);
        Held theirs(args, of_other, set, other);
        theirs.restore(args);
        theirs.write(args);
    }
}

template <class Norm, typename T>
struct KeptNorm {
    using A = Accumulator<T>;

    static __device__ __forceinline__ void merge(const ChannelArgs& args, long long set) {
        merge_set<Norm, T, kMergeBlock>(args, set, true);
    }

    template <class Shape>
    struct Held {
        Place<Shape>& place;
        RowTile<T, Shape> x;
        long long number;  // of the segment, among all
        A scale = 1;       // of what is held (numbers.cuh)

        __device__ __forceinline__ Held(const ChannelArgs& args, Place<Shape>& place, long long set,
                                        long long segment)
            : place(place), x(place), number(set * args.segments + segment) {
            place.walk(kChannelX);
            x.read(static_cast<const T*>(args.x) + place.index.base(args, kChannelX),
                   place.origin());
        }
        __device__ __forceinline__ void record(const ChannelArgs& args) {
            scale = record_tile(args, place, x, number);
        }
        __device__ __forceinline__ void restore(const ChannelArgs& args) {
            const auto* const records = static_cast<const SegmentRecord*>(args.partial);
            scale = A(order::load_fresh(records + number).scale);
            if (Shape::kShared > 0) ptx::copies_wait();
            if (scale != A(1)) x.multiply(scale);
        }
        __device__ __forceinline__ void write(const ChannelArgs& args) {
            if (!place.holds(0)) return;  // nor any other; its channel may be none
            const auto* const of_outer = static_cast<const Coefficients<A>*>(args.coefficients) +
                                         place.index.outer * args.channels;
            map_tile<Norm>(x, [&](long long channel) {
                auto by = order::load_fresh(of_outer + channel);
                by.scale *= inverse_scale(scale);
                return by;
            });
            place.walk(kChannelY);
            x.write(static_cast<T*>(args.y) + place.index.base(args, kChannelY));
        }
    };
};
