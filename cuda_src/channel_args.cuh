// Batch, group and instance norms: where the elements lie, and what a launch is told.
//
// Arrays are (N, C, S). The elements that share a mean are a set: a channel, a group of channels
// of a sample, or a channel of a sample. In memory:
//
//   channels first   a set is `runs` runs of neighbours, each `length` vectors long
//   channels last    planes of rows x columns, a row being neighbours; a set is `set_columns`
//                    columns of one plane
//
// Sets are numbered outer * inner_sets + inner. Small arrays (weight, bias, statistics) are read
// one by one, with any stride, as T or as A: which of the two is known at run time, since so few
// are read.
#pragma once

#include "order.cuh"
#include "row_segments.cuh"

// Divides numbers below size + kReach, by a multiplication where size is small.
struct Cycle {
    static constexpr int kShift = 37;
    static constexpr long long kReach = 1 << 18;

    long long size;
    unsigned long long multiplier;  // ceil(2^kShift / size); 0 for a size above kReach

    __device__ __forceinline__ long long quotient(long long value) const {
        if (multiplier == 0) return value >= size;
        return (unsigned(value) * multiplier) >> kShift;
    }
};

enum ChannelArray { kChannelX, kGradOut, kChannelY };
enum Small { kWeight, kBias, kMean, kRstd, kRunningMean, kRunningVar };

struct ChannelArgs {
    const void* x;
    const void* grad_out;
    void* small[6];  // by Small; null where absent. Inference: kMean, kRstd hold mean and variance
    void* y;         // or grad_x; null where only statistics are wanted
    void* mean_out;  // or grad_weight; one value per set, or null
    void* rstd_out;  // or grad_bias
    void* partial;   // general path: what each segment adds up to
    void* coefficients;  // general path: of every channel of every outer index
    void* moments;       // mean and unbiased variance of every set, or null
    void* progress;      // streams: places taken, and for every set segments done and sets done
    long long sets, inner_sets, channels;
    long long outer_step[3], run_step[3];  // by ChannelArray; channels last: of a plane, of a row
    long long inner_step;                  // from set to set
    Cycle length;                          // vectors of a run
    Cycle channel;           // vectors that share a channel; channels last: columns that do
    long long runs;          // channels last: rows of a plane
    long long vectors;       // of a set; channels last: columns of a plane
    long long segments;      // of a set, or blocks of rows of a plane
    long long segment_rows;  // channels last: rows from a batch of such a block to its next
    long long set_columns, set_channels;
    long long coefficient_step;  // from one outer index to the next; 0 where all share them
    RowNumbers numbers;          // of a set
    double momentum, unbiased;   // unbiased: 1 / (count - 1)
    long long small_step[6];
    int small_is_wide[6];
    int out_is_wide[2];  // grad_weight, grad_bias
    long long lag;       // streams: segments that statistics are ahead of the output
    int frozen;          // backward: the statistics do not depend on x
    int running_as_x;    // running statistics count as values of T, whatever they are kept in
};

// Element i of a small array, `absent` where there is none.
template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ A small(const ChannelArgs& args, Small which, long long i, A absent) {
    const void* const base = args.small[which];
    if (base == nullptr) return absent;
    i *= args.small_step[which];
    if (args.small_is_wide[which]) return static_cast<const A*>(base)[i];
    return widen<A>(static_cast<const T*>(base)[i]);
}
template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ void set_small(const ChannelArgs& args, Small which, long long i,
                                          A value) {
    i *= args.small_step[which];
    if (args.small_is_wide[which])
        static_cast<A*>(args.small[which])[i] = value;
    else
        static_cast<T*>(args.small[which])[i] = narrow<T>(value);
}

// A running statistic as it counts.
template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ A running(const ChannelArgs& args, Small which, long long i) {
    const A value = small<T>(args, which, i, A(0));
    return args.running_as_x ? widen<A>(narrow<T>(value)) : value;
}
template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ void move_running(const ChannelArgs& args, Small which, long long i,
                                             double value) {
    const double old = running<T>(args, which, i);
    const A moved = A((1.0 - args.momentum) * old + args.momentum * value);
    set_small<T>(args, which, i, args.running_as_x ? widen<A>(narrow<T>(moved)) : moved);
}

// A set by its two indices: the division is done once.
struct SetIndex {
    long long set, outer, inner;

    __device__ __forceinline__ SetIndex(const ChannelArgs& args, long long set)
        : set(set), outer(set / args.inner_sets), inner(set - outer * args.inner_sets) {}

    // Where the set starts in an array that is channels first.
    __device__ __forceinline__ long long base(const ChannelArgs& args, ChannelArray array) const {
        return outer * args.outer_step[array] + inner * args.inner_step;
    }
};

// What makes an element of y: one multiplication after the mean is off, one addition.
template <typename A>
struct alignas(4 * sizeof(A) < 16 ? 4 * sizeof(A) : 16) Coefficients {
    A scale, centre, slope, intercept;

    // `scale`: what values are still to be multiplied by to be in the units of the statistics.
    __device__ __forceinline__ static Coefficients of(const Centred<A>& set, A scale, A weight,
                                                      A bias) {
        return {scale, set.mean.hi, set.rstd * weight, fma(set.offset, weight, bias)};
    }
    __device__ __forceinline__ static Coefficients given(A mean, A rstd, A weight, A bias) {
        return {A(1), mean, rstd * weight, bias};
    }
    __device__ __forceinline__ A apply(A value) const {
        return fma(fma(value, scale, -centre), slope, intercept);
    }
};

template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ Coefficients<A> coefficients(const ChannelArgs& args,
                                                        const Centred<A>& set, A scale,
                                                        long long channel) {
    return Coefficients<A>::of(set, scale, small<T>(args, kWeight, channel, A(1)),
                               small<T>(args, kBias, channel, A(0)));
}

// Mean and unbiased variance of a set, in plain units.
struct SetMoments {
    double mean, variance;
};

// What is known of a set leaves: statistics for the caller, running ones, moments for those that
// are averaged over samples first. `scale`, `unit`: those of the mean and of rstd (statistics.cuh).
template <class Norm, typename T, typename A = Accumulator<T>>
__device__ void store_set(const ChannelArgs& args, long long set, const Centred<A>& statistics,
                          A scale, A unit, const SetMoments& moments) {
    if (args.mean_out)
        static_cast<A*>(args.mean_out)[set] =
            (statistics.mean.hi + statistics.mean.lo) * inverse_scale(scale);
    if (args.rstd_out) static_cast<A*>(args.rstd_out)[set] = statistics.rstd * unit;
    if (args.moments) static_cast<SetMoments*>(args.moments)[set] = moments;
    if (Norm::kSetsAreChannels && args.small[kRunningMean]) {
        move_running<T>(args, kRunningMean, set, moments.mean);
        move_running<T>(args, kRunningVar, set, moments.variance);
    }
}

// The same from a set that one CTA, or one cluster, has examined.
template <class Norm, typename T, typename A = Accumulator<T>>
__device__ void store_found(const ChannelArgs& args, long long set,
                            const Findings<Centred<A>, A>& found) {
    const Wide<A> mean =
        Centred<A>::mean_of(found.record, args.numbers.count, args.numbers.inverse);
    const double squares = Centred<A>::spread(found.record, mean, found.centre, args.numbers.count);
    const double inverse = inverse_scale(double(found.scale));
    store_set<Norm, T>(args, set, found.statistics, found.scale, found.unit,
                       {leading(mean) * inverse, squares * inverse * inverse * args.unbiased});
}
