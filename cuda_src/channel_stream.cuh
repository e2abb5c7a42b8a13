// Large sets in one launch: statistics run ahead of the output by a few sets, so that what was
// read for the ones is still in L2 when it is read again for the other, and memory is read and
// written at all times.
//
// A work item is a segment of a set (channel_runs.cuh), for statistics or for output. CTAs take
// items in this order: statistics of the first `lag` segments; then, in turns, statistics of the
// next segment and output of the first one without; output of the rest. The CTA whose segment is
// the last of its set to be done merges the records, in a fixed order. Output waits for its set:
// for CTAs with places before its own that do not wait (order.cuh).
//
//   struct Work {  // StreamNorm, StreamGradient
//       record<Shape>(args, set, segment);  // reads, leaves a record
//       merge(args, set);                   // records to coefficients; all of the CTA
//       write<Shape>(args, set, segment);   // reads again, writes
//   };
//
// Launch: clear_progress first, grid = ceil((1 + 2 * sets) / THREADS), block = THREADS; then
// run_stream, grid = 2 * sets * segments, block = kMergeBlock.
#pragma once

#include "channel_merge.cuh"
#include "channel_runs.cuh"

struct Progress {
    unsigned* taken;
    unsigned* segments_done;  // of every set
    unsigned* sets_done;      // 1 for every set whose coefficients are there

    __device__ __forceinline__ explicit Progress(const ChannelArgs& args)
        : taken(static_cast<unsigned*>(args.progress)),
          segments_done(taken + 1),
          sets_done(segments_done + args.sets) {}
};

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    clear_progress(const __grid_constant__ ChannelArgs args) {
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i < 1 + 2 * args.sets) static_cast<unsigned*>(args.progress)[i] = 0;
}

// What the CTA with place `place` does.
struct StreamItem {
    bool writes;
    long long set, segment;

    __device__ __forceinline__ StreamItem(const ChannelArgs& args, long long place) {
        const long long all = args.sets * args.segments;
        const long long ahead = min(args.lag, all), in_turns = all - ahead;
        long long item = place;
        writes = false;
        if (place >= ahead + 2 * in_turns) {
            writes = true;
            item = place - all;
        } else if (place >= ahead) {
            const long long turn = (place - ahead) / 2;
            writes = (place - ahead) % 2 != 0;
            item = writes ? turn : ahead + turn;
        }
        set = item / args.segments;
        segment = item - set * args.segments;
    }
};

template <class Work, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    run_stream(const __grid_constant__ ChannelArgs args) {
    static_assert(Shape::kBlock == kMergeBlock, "the CTA merges the records of its set");
    const Progress progress(args);
    __shared__ unsigned told[2];
    if (threadIdx.x == 0) told[0] = order::take(progress.taken);
    __syncthreads();
    const StreamItem item(args, told[0]);
    if (item.writes) {
        if (threadIdx.x == 0) order::wait_for(progress.sets_done + item.set, 1);
        __syncthreads();
        Work::template write<Shape>(args, item.set, item.segment);
        return;
    }
    Work::template record<Shape>(args, item.set, item.segment);
    if (threadIdx.x == 0) told[1] = order::arrive(progress.segments_done + item.set);
    __syncthreads();
    if (told[1] + 1 < args.segments) return;
    Work::merge(args, item.set);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) order::arrive(progress.sets_done + item.set);
}

template <class Norm, typename T>
struct StreamNorm {
    template <class Shape>
    static __device__ __forceinline__ void record(const ChannelArgs& args, long long set,
                                                  long long segment) {
        record_segment<T, Shape>(args, set, segment);
    }
    static __device__ __forceinline__ void merge(const ChannelArgs& args, long long set) {
        merge_set<Norm, T, kMergeBlock>(args, set, true);
    }
    template <class Shape>
    static __device__ __forceinline__ void write(const ChannelArgs& args, long long set,
                                                 long long segment) {
        using A = Accumulator<T>;
        Place<Shape> place(args, set, segment);
        RowTile<T, Shape> x(place);
        place.walk(kChannelX);
        x.read(static_cast<const T*>(args.x) + place.index.base(args, kChannelX), place.origin());
        if (!place.holds(0)) return;  // nor any other; its channel may be none
        const auto* const of_outer = static_cast<const Coefficients<A>*>(args.coefficients) +
                                     place.index.outer * args.channels;
        const PackChannel<Norm, Place<Shape>> channel(place);
        map_tile<Norm>(x, [&](int i) { return order::load_fresh(of_outer + channel.of_pack(i)); });
        place.walk(kChannelY);
        x.write(static_cast<T*>(args.y) + place.index.base(args, kChannelY));
    }
};
