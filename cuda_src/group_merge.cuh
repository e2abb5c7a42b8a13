// Backward of group and instance norm, after the sums of units (group_gradient.cuh): what sets and
// channels add up to, and what makes an element of grad_x.
//
// Records lie in rows (a sample, or several, or a block of positions of one), in a row channel
// after channel, `channel` records each.
//
//   group_gradient_fold    many rows to fewer
//   group_gradient_merge   gradients of parameters, and coefficients of sets where grad_x is still
//                          to be made
//
// Each adds in a fixed order. A gradient may be written over the weight while others need it: the
// launch before has kept it, before the coefficients.
//
// Launch: fold: grid = ceil(runs / segment_rows) * ceil(channels / (32 / LANES)); merge: grid =
// ceil(channels / (32 / LANES)), with coefficients after ceil(sets * THREADS / 256) CTAs for them;
// block = 256.
#pragma once

#include "channel_gradient.cuh"

// Statistics of a set always come in A.
template <typename A>
__device__ __forceinline__ A statistic(const ChannelArgs& args, Small which, long long set) {
    return static_cast<const A*>(args.small[which])[set * args.small_step[which]];
}

template <typename A>
struct alignas(4 * sizeof(A) < 16 ? 4 * sizeof(A) : 16) GroupCoefficients {
    A mean, through_mean, through_rstd, rstd;

    __device__ __forceinline__ static GroupCoefficients of(const ChannelArgs& args, A mean, A rstd,
                                                           const GradientSums<A>& sums) {
        const double inverse = args.numbers.inverse;
        return {mean, A(leading(sums.sum) * inverse),
                A(leading(sums.squares) * inverse * double(rstd)), rstd};
    }
    __device__ __forceinline__ A apply(A x, A grad_out, A weight) const {
        return fma(mean - x, through_rstd, fma(grad_out, weight, -through_mean)) * rstd;
    }
};

__device__ __forceinline__ double weighted(double sum, float weight) { return sum * weight; }
__device__ __forceinline__ Pair<double> weighted(Pair<double> sum, double weight) {
    return sum * Pair<double>{weight, 0.0};
}

template <typename A>
__device__ __forceinline__ GradientSums<A> weighted(const GradientSums<A>& sums, A weight) {
    return {weighted(sums.sum, weight), weighted(sums.squares, weight)};
}

// The weight of a channel, as it was.
template <typename T>
__device__ __forceinline__ void keep_weight(const ChannelArgs& args, long long channel) {
    using A = Accumulator<T>;
    if (args.small[kWeight] == nullptr) return;
    static_cast<A*>(args.coefficients)[channel] = small<T>(args, kWeight, channel, A(1));
}
template <typename A>
__device__ __forceinline__ A kept_weight(const ChannelArgs& args, long long channel) {
    if (args.small[kWeight] == nullptr) return A(1);
    return static_cast<const A*>(args.coefficients)[channel];
}
template <typename A>
__device__ __forceinline__ GroupCoefficients<A>* group_coefficients(const ChannelArgs& args) {
    constexpr int kNumbers = sizeof(GroupCoefficients<A>) / sizeof(A);
    return static_cast<GroupCoefficients<A>*>(args.coefficients) +
           (args.channels + kNumbers - 1) / kNumbers;
}

template <typename T>
struct StoredGroupGradient {
    using A = Accumulator<T>;
    static constexpr bool kTakesGradient = true, kFromEnd = true;
    struct Values {
        GroupCoefficients<A> of_set;
        A weight;
    };
    static __device__ __forceinline__ Values at(const ChannelArgs& args, long long sample,
                                                long long channel) {
        const long long set = (sample * args.channels + channel) / args.set_channels;
        return {group_coefficients<A>(args)[set], kept_weight<A>(args, channel)};
    }
    static __device__ __forceinline__ A apply(const Values& by, A x, A grad_out) {
        return by.of_set.apply(x, grad_out, by.weight);
    }
};

// The records of a set, weighted, by THREADS threads.
template <typename T, int THREADS>
__device__ __forceinline__ void merge_units(const ChannelArgs& args, long long set, bool live) {
    using A = Accumulator<T>;
    const Team<MergeShape<THREADS>> team;
    const SetIndex index(args, live ? set : 0);
    const unsigned units = args.channel.size, row = args.set_channels * units;
    const unsigned count = live ? row * unsigned(args.segments) : 0;
    const long long width = args.channels * units;
    const auto* const records = static_cast<const GradientSums<A>*>(args.partial) +
                                index.outer * args.segments * width + index.inner * row;
    GradientSums<A> sums{wide(A(0)), wide(A(0))};
#pragma unroll 4
    for (unsigned i = threadIdx.x % THREADS; i < count; i += THREADS) {
        const unsigned above = i / row, column = i - above * row;
        const A weight = kept_weight<A>(args, index.inner * args.set_channels + column / units);
        sums = sums + weighted(records[above * width + column], weight);
    }
    sums = team.agree(sums, Plus(), Itself());
    if (!live || threadIdx.x % THREADS) return;
    group_coefficients<A>(args)[set] = GroupCoefficients<A>::of(
        args, statistic<A>(args, kMean, set), statistic<A>(args, kRstd, set), sums);
}

// The records of a channel in rows [begin, end), `units` of them in each: LANES threads of each
// warp; a CTA has 32 / LANES channels. store(channel, sums) by one thread.
template <typename T, int LANES, class F>
__device__ __forceinline__ void add_rows(const ChannelArgs& args, const void* from, long long tile,
                                         unsigned units, long long begin, long long end, F store) {
    using A = Accumulator<T>;
    using Sums = GradientSums<A>;
    constexpr unsigned kChannels = 32 / LANES, kWarps = kMergeBlock / 32;
    __shared__ Sums of_warp[kWarps * kChannels];
    const unsigned lane = threadIdx.x % LANES, warp = threadIdx.x / 32;
    const unsigned here = threadIdx.x % 32 / LANES;
    const long long channel = tile * kChannels + here, width = args.channels * units;
    const unsigned turns = (units + LANES - 1) / LANES;
    const unsigned count = channel < args.channels ? unsigned(end - begin) * turns : 0;
    const auto* const records =
        static_cast<const Sums*>(from) + begin * width + channel * units + lane;
    Sums sums{wide(A(0)), wide(A(0))};
#pragma unroll 4
    for (unsigned i = warp; i < count; i += kWarps) {
        const unsigned row = i / turns, turn = i - row * turns;
        if (turn * LANES + lane < units) sums = sums + records[row * width + turn * LANES];
    }
    sums = Lanes<LANES>().combined(sums, Plus());
    if (lane == 0) of_warp[warp * kChannels + here] = sums;
    __syncthreads();
    if (warp > 0 || lane > 0 || channel >= args.channels) return;
#pragma unroll
    for (unsigned other = 1; other < kWarps; ++other)
        sums = sums + of_warp[other * kChannels + here];
    store(channel, sums);
}

// Many rows of records become few, one record a channel in each: `segment_rows` to one.
template <typename T, int LANES>
__global__ void __launch_bounds__(kMergeBlock)
    group_gradient_fold(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    constexpr unsigned kChannels = 32 / LANES;
    const long long tiles = (args.channels + kChannels - 1) / kChannels;
    const long long row = blockIdx.x / tiles, begin = row * args.segment_rows;
    using Sums = GradientSums<Accumulator<T>>;
    add_rows<T, LANES>(args, args.partial, blockIdx.x - row * tiles, args.channel.size, begin,
                       min(begin + args.segment_rows, args.runs),
                       [&](long long channel, const Sums& sums) {
                           static_cast<Sums*>(args.moments)[row * args.channels + channel] = sums;
                       });
}

// Sets first, THREADS threads each; then channels, from folded rows where there are any.
template <typename T, int THREADS, int LANES>
__global__ void __launch_bounds__(kMergeBlock)
    group_gradient_merge(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    constexpr int kSets = kMergeBlock / THREADS;
    const long long of_sets = args.coefficients ? (args.sets + kSets - 1) / kSets : 0;
    if (blockIdx.x < of_sets) {
        const long long set = (long long)blockIdx.x * kSets + threadIdx.x / THREADS;
        merge_units<T, THREADS>(args, set, kSets == 1 || set < args.sets);
        return;
    }
    const bool folded = args.moments != nullptr;
    const long long rows =
        folded ? (args.runs + args.segment_rows - 1) / args.segment_rows : args.runs;
    add_rows<T, LANES>(args, folded ? args.moments : args.partial, blockIdx.x - of_sets,
                       folded ? 1 : args.channel.size, 0, rows,
                       [&](long long channel, const GradientSums<Accumulator<T>>& sums) {
                           store_sums<T>(args, channel, sums);
                       });
}
