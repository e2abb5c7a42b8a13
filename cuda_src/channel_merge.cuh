// From the records of segments to what a set is normalized with.
//
//   channel_merge     the records of a set in double, in a fixed order; coefficients of its
//                     channels, statistics and running statistics leave
//   average_running   running statistics from those of every sample (instance norm)
//
// Launch: THREADS threads a set (a channel), a warp or a CTA of 256; block = 256. HELD * THREADS
// records a set at most, or HELD = 0.
#pragma once

#include "channel_args.cuh"

constexpr int kMergeBlock = 256;

template <int THREADS>
struct MergeShape {
    static constexpr int kThreads = THREADS;
    static constexpr int kLanes = 32;
    static constexpr int kWarps = THREADS / 32;
    static constexpr int kCluster = 1;
    static constexpr int kRecords = 8;
};

// Where the records of a set lie: rows of segments, each a run of neighbours. Channels first: one
// row.
struct RecordIndex {
    long long base, step;
    unsigned width, count;

    __device__ __forceinline__ RecordIndex(const ChannelArgs& args, long long set, bool live) {
        if (args.set_columns == 0) {
            base = set * args.segments;
            step = 0;
            width = args.segments;
            count = args.segments;
        } else {
            const SetIndex index(args, set);
            base = index.outer * args.segments * args.vectors + index.inner * args.set_columns;
            step = args.vectors;
            width = args.set_columns;
            count = args.set_columns * args.segments;
        }
        if (!live) count = 0;
    }
    __device__ __forceinline__ long long operator()(unsigned i) const {
        const unsigned row = i / width;
        return base + row * step + (i - row * width);
    }
};

// All threads have the record itself.
struct Itself {
    template <class R>
    __device__ __forceinline__ R operator()(const R& record) const {
        return record;
    }
};

// 1 / count without the call that a division of doubles takes; within an ulp.
__device__ __forceinline__ double reciprocal(double count) {
    double near = 1.0f / float(count);
    near = fma(fma(-count, near, 1.0), near, near);
    return fma(fma(-count, near, 1.0), near, near);
}

// The records of a set that one of THREADS threads merges: up to HELD, which are asked for one
// time, not three; or any number of them, where HELD is 0.
template <int THREADS, int HELD, int TOGETHER>
struct RecordsOfThread {
    const RecordIndex& at;
    const SegmentRecord* records;
    unsigned me;
    SegmentRecord held[HELD > 0 ? HELD : 1];

    __device__ __forceinline__ RecordsOfThread(const ChannelArgs& args, const RecordIndex& at)
        : at(at),
          records(static_cast<const SegmentRecord*>(args.partial)),
          me(threadIdx.x % THREADS) {
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (me + i * THREADS < at.count) held[i] = fetch(me + i * THREADS);
    }
    __device__ __forceinline__ SegmentRecord fetch(unsigned i) const {
        return order::load_fresh(records + at(i));
    }
    template <class F>
    __device__ __forceinline__ void for_each(F f) const {
        if constexpr (HELD > 0) {
#pragma unroll
            for (int i = 0; i < HELD; ++i)
                if (me + i * THREADS < at.count) f(held[i]);
        } else {
#pragma unroll TOGETHER
            for (unsigned i = me; i < at.count; i += THREADS) f(fetch(i));
        }
    }
};

// What the records of a set say together.
template <typename A>
struct Merged {
    Centred<A> statistics;
    A scale, unit;  // as in Findings
    SetMoments moments;

    // `mean` and the sum of squares about it are in units in which `inverse` is one.
    __device__ __forceinline__ Merged(const ChannelArgs& args, Pair<double> mean, double squares,
                                      double inverse) {
        Pair<A> in_two = split<A>(mean.hi);
        in_two.lo += A(mean.lo);
        scale = unit = A(inverse_scale(inverse));
        statistics = Centred<A>::of_moments(in_two, squares, args.numbers, unit);
        moments = {mean.hi * inverse, squares * inverse * inverse * args.unbiased};
    }
};

// By THREADS threads; all of the CTA take part.
// Chan, Golub & LeVeque (1979): every term of the sum of squares is positive.
template <typename T, int THREADS, int HELD = 0>
__device__ __forceinline__ Merged<Accumulator<T>> merged_set(const ChannelArgs& args, long long set,
                                                             bool live) {
    using A = Accumulator<T>;
    const Team<MergeShape<THREADS>> team;
    // Of the many registers of doubles a call spills some: no more records at a time than one.
    constexpr int kTogether = sizeof(A) < sizeof(double) ? 4 : 1;
    const RecordIndex at(args, set, live);
    const RecordsOfThread<THREADS, HELD, kTogether> records(args, at);

    double inverse = 0;  // of the scale of the largest values
    records.for_each(
        [&](const SegmentRecord& mine) { inverse = max(inverse, inverse_scale(mine.scale)); });
    inverse = team.agree(inverse, Largest(), Itself());
    team.settle();
    const double scale = inverse_scale(inverse);

    Pair<double> sum{0, 0};
    records.for_each([&](const SegmentRecord& mine) {
        const double unit = scale * inverse_scale(mine.scale);
        sum.add(mine.sum.hi * unit);
        sum.add(mine.sum.lo * unit);
    });
    const Pair<double> mean =
        quotient(team.agree(wide(sum), Plus(), Itself()), args.numbers.count, args.numbers.inverse);
    team.settle();
    double squares = 0;
    records.for_each([&](const SegmentRecord& mine) {
        const double unit = scale * inverse_scale(mine.scale);
        const Pair<double> own = quotient(Pair<double>{mine.sum.hi * unit, mine.sum.lo * unit},
                                          mine.count, reciprocal(max(mine.count, 1.0)));
        const double moved = (own.hi - mean.hi) + (own.lo - mean.lo);
        squares += mine.squares * unit * unit + mine.count * moved * moved;
    });
    squares = team.agree(squares, Plus(), Itself());
    return {args, mean, squares, inverse};
}

template <class Norm, typename T, typename A = Accumulator<T>>
__device__ __forceinline__ void store_merged(const ChannelArgs& args, long long set,
                                             const Merged<A>& of) {
    store_set<Norm, T>(args, set, of.statistics, of.scale, of.unit, of.moments,
                       fetch_running<Norm, T>(args, set));
}

template <class Norm, typename T, int THREADS, int HELD = 0>
__device__ __forceinline__ void merge_set(const ChannelArgs& args, long long set, bool live) {
    using A = Accumulator<T>;
    const unsigned me = threadIdx.x % THREADS;
    const Merged<A> merged = merged_set<T, THREADS, HELD>(args, set, live);
    if (!live) return;
    if (me == 0) store_merged<Norm, T>(args, set, merged);
    if (args.coefficients == nullptr) return;
    const SetIndex index(args, set);
    for (long long i = me; i < args.set_channels; i += THREADS) {
        const long long channel = index.inner * args.set_channels + i;
        static_cast<Coefficients<A>*>(args.coefficients)[index.outer * args.channels + channel] =
            coefficients<T>(args, merged.statistics, merged.scale, channel);
    }
}

template <class Norm, typename T, int THREADS, int HELD>
__global__ void __launch_bounds__(kMergeBlock)
    channel_merge(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    constexpr int kSets = kMergeBlock / THREADS;
    const long long set = (long long)blockIdx.x * kSets + threadIdx.x / THREADS;
    merge_set<Norm, T, THREADS, HELD>(args, set, kSets == 1 || set < args.sets);
}

// A warp a channel: its moments over all samples, averaged.
template <typename T>
__global__ void __launch_bounds__(kMergeBlock)
    average_running(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    const long long channel = (long long)blockIdx.x * (kMergeBlock / 32) + threadIdx.x / 32;
    const bool live = channel < args.channels;
    const long long samples = args.sets / args.channels;
    double mean = 0, variance = 0;
    for (long long n = threadIdx.x % 32; live && n < samples; n += 32) {
        const SetMoments of_sample =
            static_cast<const SetMoments*>(args.moments)[n * args.channels + channel];
        mean += of_sample.mean;
        variance += of_sample.variance;
    }
    mean = Lanes<32>().combined(mean, Plus()) / samples;
    variance = Lanes<32>().combined(variance, Plus()) / samples;
    if (!live || threadIdx.x % 32) return;
    FetchedRunning<T>(args, channel).move(args, channel, mean, variance);
}
