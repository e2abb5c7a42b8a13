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

// Divides numbers below 2^31 by a multiplication and a shift.
struct Divisor {
    unsigned size, multiplier;  // ceil(2^shift / size), where 2^shift < 2^32 * size

    __device__ __forceinline__ unsigned quotient(unsigned value, unsigned shift) const {
        return value * (unsigned long long)multiplier >> shift;
    }
};

// Divides numbers below size + kReach, by a multiplication where size is small.
struct Cycle {
    static constexpr int kShift = 37;
    static constexpr long long kReach = 1 << 18;

    long long size;
    unsigned long long multiplier;  // ceil(2^kShift / size); 0 for a size above kReach

    __device__ __forceinline__ long long quotient(long long value) const {
        if (multiplier == 0) return value >= size;
        return quotient_near(value);
    }
    // Of a number that no size above kReach goes into.
    __device__ __forceinline__ unsigned quotient_near(unsigned value) const {
        return value * multiplier >> kShift;
    }
};

// What is kept on chip: by which numbers a walk over sets divides, and how it goes on
// (channel_kept.cuh); of blocks of rows (channel_columns_kept.cuh), how much.
struct KeptBrief {
    Divisor length, channel;  // vectors of a run; vectors that share a channel: two or more
    unsigned length_shift, channel_shift;  // less 32
    unsigned groups;                       // sets that are on chip at a time
    unsigned lag;       // a set is begun when the one so many before has been read
    unsigned batches;   // of a block of rows, that are kept
    unsigned together;  // blocks whose records are joined first
    unsigned words;     // of `progress`
};

enum ChannelArray { kChannelX, kGradOut, kChannelY };
enum Small { kWeight, kBias, kRunningMean, kRunningVar, kMean, kRstd };

// What finds x in a launch over runs, in 32 bits; numbers that do not fit are 0.
struct Brief {
    unsigned vectors, sets;
    Divisor length, inner_sets;
    unsigned short length_shift, inner_shift;
    unsigned flags;    // bits by Small: of type A; then, see ChannelArgs, frozen, running_as_x
    long long x_step;  // run_step of x
};

// Constant memory arrives in lines of 64 bytes, each of which a cold launch waits for, and of the
// first this has 48: short launches read the first two, and a little of the third at their end.
struct ChannelArgs {
    RowNumbers numbers;  // of a set
    Brief brief;
    const void* x;
    void* y;         // or grad_x; null where only statistics are wanted
    void* small[6];  // by Small; null where absent
    const void* grad_out;
    void* mean_out;             // or grad_weight; one value per set, or null
    void* rstd_out;             // or grad_bias
    void* moments;              // mean and unbiased variance of every set, or null
    void* partial;              // general path: what each segment adds up to
    void* coefficients;         // general path: of every channel of every outer index
    void* progress;             // what is kept on chip: who has done what
    unsigned long long number;  // of the launch: no other has it
    double momentum, unbiased;  // unbiased: 1 / (count - 1)
    long long small_step[6];
    Cycle channel;          // vectors that share a channel; channels last: columns that do
    long long run_step[3];  // by ChannelArray: from sample to sample; channels last: row to row
    long long sets, inner_sets, channels, set_channels;
    long long outer_step[3];     // channels first: run_step of sets that are of one sample
    long long inner_step;        // from set to set
    long long coefficient_step;  // from one outer index to the next; 0 where all share them
    Cycle length;                // vectors of a run; of a map, elements
    long long vectors;           // of a set; channels last: columns of a plane
    long long runs;              // channels last: rows of a plane
    long long segments;          // of a set, or blocks of rows of a plane
    long long segment_rows;      // channels last: rows from a batch of such a block to its next
    long long set_columns;
    int out_is_wide[2];  // grad_weight, grad_bias
    KeptBrief kept;

    // Backward: the statistics do not depend on x.
    __device__ __forceinline__ bool frozen() const { return brief.flags >> 6 & 1; }
    // Running statistics count as values of T, whatever they are kept in.
    __device__ __forceinline__ bool running_as_x() const { return brief.flags >> 7 & 1; }
};

// Element i of a small array, on its way: several are asked for before the first is waited for.
template <typename T>
struct Fetched {
    using A = Accumulator<T>;
    static constexpr bool kTwoTypes = sizeof(T) < sizeof(A);

    Pack<A, 1> pack = {};

    Fetched() = default;
    __device__ __forceinline__ Fetched(const ChannelArgs& args, Small which, long long i) {
        const void* const base = args.small[which];
        if (base == nullptr) return;
        i *= args.small_step[which];
        if (is_wide(args, which))
            pack = load<1, 1>(static_cast<const A*>(base) + i);
        else
            pack.raw[0] = static_cast<const unsigned short*>(base)[i];
    }
    // As far as L2, which takes no register.
    static __device__ __forceinline__ void prefetch(const ChannelArgs& args, Small which,
                                                    long long i) {
        const void* const base = args.small[which];
        i *= args.small_step[which];
        ptx::prefetch(is_wide(args, which)
                          ? static_cast<const void*>(static_cast<const A*>(base) + i)
                          : static_cast<const T*>(base) + i);
    }

    static __device__ __forceinline__ bool is_wide(const ChannelArgs& args, Small which) {
        return !kTwoTypes || (args.brief.flags >> which & 1);
    }
    __device__ __forceinline__ A value(const ChannelArgs& args, Small which, A absent) const {
        if (args.small[which] == nullptr) return absent;
        const Pack<A, 1> here = opaque(pack);
        return is_wide(args, which) ? part_of<A>(here, 0) : widen<A>(part_of<T>(here, 0));
    }
};

// Element i of a small array, `absent` where there is none.
template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ A small(const ChannelArgs& args, Small which, long long i, A absent) {
    return Fetched<T>(args, which, i).value(args, which, absent);
}
template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ void set_small(const ChannelArgs& args, Small which, long long i,
                                          A value) {
    i *= args.small_step[which];
    if (Fetched<T>::is_wide(args, which))
        static_cast<A*>(args.small[which])[i] = value;
    else
        static_cast<T*>(args.small[which])[i] = narrow<T>(value);
}

// Of a running statistic, as it counts.
template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ A as_running(const ChannelArgs& args, A value) {
    return args.running_as_x() ? widen<A>(narrow<T>(value)) : value;
}
template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ A running(const ChannelArgs& args, Small which, long long i) {
    return as_running<T>(args, small<T>(args, which, i, A(0)));
}

// `old`: the one that is moved.
template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ void move_running(const ChannelArgs& args, Small which, long long i,
                                             const Fetched<T>& old, double value) {
    const double before = as_running<T>(args, old.value(args, which, A(0)));
    const A moved = A((1.0 - args.momentum) * before + args.momentum * value);
    set_small<T>(args, which, i, as_running<T>(args, moved));
}

// The running statistics of channel i, on their way.
template <typename T>
struct FetchedRunning {
    Fetched<T> mean, variance;

    FetchedRunning() = default;
    __device__ __forceinline__ FetchedRunning(const ChannelArgs& args, long long i)
        : mean(args, kRunningMean, i), variance(args, kRunningVar, i) {}

    __device__ __forceinline__ void move(const ChannelArgs& args, long long i, double new_mean,
                                         double new_variance) const {
        move_running<T>(args, kRunningMean, i, mean, new_mean);
        move_running<T>(args, kRunningVar, i, variance, new_variance);
    }
};

// A set by its two indices: the division is done once.
struct SetIndex {
    long long set, outer, inner;
    bool live = true;  // there is such a set

    __device__ __forceinline__ SetIndex(long long outer, long long inner, long long inner_sets)
        : set(outer * inner_sets + inner), outer(outer), inner(inner) {}
    // Of the sets of a launch that has a CTA for each.
    __device__ __forceinline__ SetIndex(const ChannelArgs& args, unsigned set) : set(set) {
        const unsigned above = args.brief.inner_sets.quotient(set, args.brief.inner_shift);
        outer = above;
        inner = set - above * args.brief.inner_sets.size;
    }
    __device__ __forceinline__ SetIndex(const ChannelArgs& args, long long set) : set(set) {
        if (args.brief.inner_sets.size) {
            *this = SetIndex(args, unsigned(set));
            live = unsigned(set) < args.brief.sets;
        } else {
            live = set < args.sets;
            outer = set / args.inner_sets;
            inner = set - outer * args.inner_sets;
        }
    }

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

// What is known of a set leaves: statistics for the caller, running ones (`old` are those of its
// channel), moments for those that are averaged over samples first. `scale`, `unit`: those of the
// mean and of rstd (statistics.cuh).
template <class Norm, typename T, typename A = Accumulator<T>>
__device__ void store_set(const ChannelArgs& args, long long set, const Centred<A>& statistics,
                          A scale, A unit, const SetMoments& moments,
                          const FetchedRunning<T>& old) {
    if (args.mean_out)
        static_cast<A*>(args.mean_out)[set] =
            (statistics.mean.hi + statistics.mean.lo) * inverse_scale(scale);
    if (args.rstd_out) static_cast<A*>(args.rstd_out)[set] = statistics.rstd * unit;
    if (args.moments) static_cast<SetMoments*>(args.moments)[set] = moments;
    if (Norm::kSetsAreChannels && args.small[kRunningMean])
        old.move(args, set, moments.mean, moments.variance);
}

// Before anything of the set is stored.
template <class Norm, typename T>
__device__ __forceinline__ FetchedRunning<T> fetch_running(const ChannelArgs& args, long long set) {
    if constexpr (Norm::kSetsAreChannels) return FetchedRunning<T>(args, set);
    return {};
}
// Where there are no registers for them.
template <class Norm, typename T>
__device__ __forceinline__ void prefetch_running(const ChannelArgs& args, long long set) {
    if (!Norm::kSetsAreChannels || args.small[kRunningMean] == nullptr) return;
    Fetched<T>::prefetch(args, kRunningMean, set);
    Fetched<T>::prefetch(args, kRunningVar, set);
}

// The same from a set that one CTA, or one cluster, has examined.
template <class Norm, typename T, typename A = Accumulator<T>>
__device__ void store_found(const ChannelArgs& args, long long set,
                            const Findings<Centred<A>, A>& found, const FetchedRunning<T>& old) {
    const Wide<A> mean =
        Centred<A>::mean_of(found.record, args.numbers.count, args.numbers.inverse);
    const double squares = Centred<A>::spread(found.record, mean, found.centre, args.numbers.count);
    const double inverse = inverse_scale(double(found.scale));
    store_set<Norm, T>(args, set, found.statistics, found.scale, found.unit,
                       {leading(mean) * inverse, squares * inverse * inverse * args.unbiased}, old);
}
template <class Norm, typename T, typename A = Accumulator<T>>
__device__ void store_found(const ChannelArgs& args, long long set,
                            const Findings<Centred<A>, A>& found) {
    store_found<Norm, T>(args, set, found, fetch_running<Norm, T>(args, set));
}
