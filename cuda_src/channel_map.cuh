// One streaming pass: every element by the coefficients of its channel.
//
// A map says where coefficients come from and what they make of an element:
//
//   struct Map {
//       static constexpr bool kTakesGradient;  // reads grad_out besides x
//       static constexpr bool kFromEnd;        // last elements first: they are still in L2
//       static Values at(args, outer, channel);
//       static A apply(Values, A x, A grad_out);
//   };
//
// Launch: run_map: grid = ceil(elements / (THREADS * PACKS * VEC)), all of the array counted;
// dynamic shared memory for the coefficients of all channels that so many elements can touch. VEC
// divides the elements of a sample, or samples follow each other; and those of a channel unless
// CROSSING, where a channel has at least VEC; and all of them unless RAGGED. BRIEF: all numbers are
// in Brief. column_map: as channel_tiles.cuh has it, with a segment for every batch.
#pragma once

#include "channel_columns.cuh"

template <int VEC, int ACCESS, int PACKS, int THREADS, int CTAS, bool CROSSING, bool RAGGED,
          bool BRIEF>
struct MapShape {
    static constexpr int kVec = VEC, kAccess = ACCESS, kPacks = PACKS, kThreads = THREADS,
                         kCtas = CTAS;
    static constexpr bool kCrossing = CROSSING;          // packs may go on into the next channel
    static constexpr bool kRagged = RAGGED;              // the last pack has fewer elements
    static constexpr bool kBrief = BRIEF;                // 32 bits number all elements
    static constexpr int kWork = THREADS * PACKS * VEC;  // elements a CTA
    static constexpr int kMostRuns = 2 * THREADS;        // that they may touch
};

// Coefficients that another launch made.
template <typename T>
struct Stored {
    using A = Accumulator<T>;
    static constexpr bool kTakesGradient = false, kFromEnd = true;
    static __device__ __forceinline__ Coefficients<A> at(const ChannelArgs& args, long long outer,
                                                         long long channel) {
        return static_cast<const Coefficients<A>*>(
            args.coefficients)[outer * args.coefficient_step + channel];
    }
    static __device__ __forceinline__ A apply(const Coefficients<A>& by, A x, A) {
        return by.apply(x);
    }
};

// What inference takes of a channel, on its way.
template <typename T, Small MEAN, Small DEVIATION>
struct FetchedGiven {
    Fetched<T> mean, deviation, weight, bias;

    __device__ __forceinline__ FetchedGiven(const ChannelArgs& args, long long channel)
        : mean(args, MEAN, channel),
          deviation(args, DEVIATION, channel),
          weight(args, kWeight, channel),
          bias(args, kBias, channel) {}
};

// Mean and reciprocal deviation are given.
template <typename T>
struct Given {
    using A = Accumulator<T>;
    static constexpr bool kTakesGradient = false, kFromEnd = false;
    static __device__ __forceinline__ Coefficients<A> at(const ChannelArgs& args, long long,
                                                         long long channel) {
        const FetchedGiven<T, kMean, kRstd> given(args, channel);
        return Coefficients<A>::given(
            given.mean.value(args, kMean, A(0)), given.deviation.value(args, kRstd, A(0)),
            given.weight.value(args, kWeight, A(1)), given.bias.value(args, kBias, A(0)));
    }
    static __device__ __forceinline__ A apply(const Coefficients<A>& by, A x, A) {
        return by.apply(x);
    }
};

// Mean and variance are given.
template <typename T>
struct GivenVariance : Given<T> {
    using A = Accumulator<T>;
    static __device__ __forceinline__ A rstd(const ChannelArgs& args, A variance) {
        const A inside = as_running<T>(args, variance) + eps_of<A>(args.numbers);
        return inside == A(0) ? A(rsqrtf(inside)) : reciprocal_sqrt(inside);
    }
    static __device__ __forceinline__ Coefficients<A> at(const ChannelArgs& args, long long,
                                                         long long channel) {
        const FetchedGiven<T, kRunningMean, kRunningVar> given(args, channel);
        return Coefficients<A>::given(
            as_running<T>(args, given.mean.value(args, kRunningMean, A(0))),
            rstd(args, given.deviation.value(args, kRunningVar, A(0))),
            given.weight.value(args, kWeight, A(1)), given.bias.value(args, kBias, A(0)));
    }
};

// The first element of a CTA, and where others lie from there.
template <bool BRIEF>
struct MapPlace {
    using Number = typename RowNumberOf<BRIEF>::type;

    const ChannelArgs& args;
    Number start, run, rest;  // of all elements; its run, and the elements of that before it
    Number sample, channel;

    __device__ __forceinline__ MapPlace(const ChannelArgs& args, unsigned block, unsigned work)
        : args(args), start(Number(block) * work) {
        if constexpr (BRIEF) {
            run = args.brief.length.quotient(start, args.brief.length_shift);
            sample = args.brief.inner_sets.quotient(run, args.brief.inner_shift);
        } else {
            run = start / args.length.size;
            sample = run / args.channels;
        }
        rest = start - run * length();
        channel = run - sample * channels();
    }

    __device__ __forceinline__ Number length() const {
        return BRIEF ? args.brief.length.size : args.length.size;
    }
    __device__ __forceinline__ Number channels() const {
        return BRIEF ? args.brief.inner_sets.size : args.channels;
    }
    // From an element on, at most `most`.
    __device__ __forceinline__ unsigned elements(unsigned element, unsigned most) const {
        const Number end = BRIEF ? args.brief.vectors : args.vectors, at = start + element;
        return at < end ? unsigned(min(end - at, Number(most))) : 0;
    }
    __device__ __forceinline__ bool has_run(unsigned further) const {
        return run + further < (BRIEF ? args.brief.sets : args.sets);
    }
    // Runs from the first one to that of an element, and samples to that of a run.
    __device__ __forceinline__ unsigned runs_to(unsigned element) const {
        if constexpr (BRIEF)
            return args.brief.length.quotient(rest + element, args.brief.length_shift);
        return args.length.quotient(rest + element);
    }
    __device__ __forceinline__ unsigned samples_to(unsigned runs) const {
        if constexpr (BRIEF)
            return args.brief.inner_sets.quotient(channel + runs, args.brief.inner_shift);
        return args.channel.quotient(channel + runs);
    }
    // Of an element in an array with so much from sample to sample.
    __device__ __forceinline__ long long offset(unsigned element, unsigned samples,
                                                long long step) const {
        const Number of_sample = channels() * length();
        return start + element + (sample + samples) * (step - of_sample);
    }
    // Of the run that `runs` are before an element: its elements from that one on.
    __device__ __forceinline__ Number left(unsigned element, unsigned runs) const {
        return (runs + 1) * length() - (rest + element);
    }
};

template <class Map, typename T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtas)
    run_map(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    using Values = decltype(Map::at(args, 0ll, 0ll));
    constexpr int kVec = Shape::kVec, kAccess = Shape::kAccess, kPacks = Shape::kPacks;
    const unsigned block = Map::kFromEnd ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const MapPlace<Shape::kBrief> place(args, block, Shape::kWork);

    Pack<T, kVec> x[kPacks], gradient[Map::kTakesGradient ? kPacks : 1];
    unsigned runs[kPacks], samples[kPacks];
    const auto elements = [&](unsigned element) {
        const unsigned count = place.elements(element, kVec);
        return Shape::kRagged || count == 0 ? count : kVec;
    };
    const auto of_x = [&](unsigned element, unsigned sample) {
        return static_cast<const T*>(args.x) + place.offset(element, sample, args.brief.x_step);
    };
    const auto of_grad_out = [&](unsigned element, unsigned sample) {
        return static_cast<const T*>(args.grad_out) +
               place.offset(element, sample, args.run_step[kGradOut]);
    };
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
        const unsigned mine = (threadIdx.x + i * Shape::kThreads) * kVec;
        runs[i] = place.runs_to(mine);
        samples[i] = place.samples_to(runs[i]);
        const unsigned count = elements(mine);
        if (count == 0) continue;
        x[i] = begin_load<kAccess, kVec>(of_x(mine, samples[i]), count);
        if constexpr (Map::kTakesGradient)
            gradient[i] = begin_load<kAccess, kVec>(of_grad_out(mine, samples[i]), count);
    }

    Values* const by = column_records<Values>();
    const unsigned touched = place.runs_to(Shape::kWork - 1) + 1;
    // Not a loop: what one reads of the arguments, the compiler reads before x.
#pragma unroll
    for (int i = 0; i < Shape::kMostRuns; i += Shape::kThreads) {
        const unsigned j = threadIdx.x + i;
        if (j >= touched || !place.has_run(j)) continue;
        const unsigned above = place.samples_to(j);
        by[j] = Map::at(args, place.sample + above, place.channel + j - above * place.channels());
    }
    __syncthreads();

#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
        const unsigned mine = (threadIdx.x + i * Shape::kThreads) * kVec;
        const unsigned count = elements(mine);
        if (count == 0) continue;
        const auto left = place.left(mine, runs[i]);
        const Values now = by[runs[i]];
        A value[kVec], of_gradient[kVec] = {};
        x[i] = finish_load<kAccess>(x[i], of_x(mine, samples[i]), count);
        widen_pack(opaque(x[i]), value);
        if constexpr (Map::kTakesGradient) {
            gradient[i] = finish_load<kAccess>(gradient[i], of_grad_out(mine, samples[i]), count);
            widen_pack(opaque(gradient[i]), of_gradient);
        }
        if (Shape::kCrossing && left < kVec) {
            const Values next = by[runs[i] + 1];
#pragma unroll
            for (int e = 0; e < kVec; ++e)
                value[e] = Map::apply(e < left ? now : next, value[e], of_gradient[e]);
        } else {
#pragma unroll
            for (int e = 0; e < kVec; ++e) value[e] = Map::apply(now, value[e], of_gradient[e]);
        }
        T* const to =
            static_cast<T*>(args.y) + place.offset(mine, samples[i], args.run_step[kChannelY]);
        const Pack<T, kVec> y = narrowed<T>(value);
        if constexpr (Shape::kRagged) {
            if (count < kVec) {
                write_elements(to, y.raw, count);
                continue;
            }
        }
        store<kAccess, kVec>(to, y);
    }
}

template <class Map, typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    column_map(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    constexpr int kVec = Shape::kVec;
    using Values = decltype(Map::at(args, 0ll, 0ll));
    const ColumnPlace<Shape> place(args, Map::kFromEnd ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    HeldRows<T, Shape> x, gradient;
    x.read(args, place, kChannelX);
    if constexpr (Map::kTakesGradient) gradient.read(args, place, kGradOut);
    Values by[kVec];
    share_columns<Shape>(place.owns(args), by, [&] {
        return Map::at(args, place.plane, channel_of(args, place.own_column()));
    });
    if (!place.active) return;
    x.template write<Map::kFromEnd>(place.template address<T>(args, args.y, kChannelY),
                                    Shape::kTy * args.run_step[kChannelY],
                                    [&](int i, A(&value)[kVec]) {
                                        A of_gradient[kVec] = {};
                                        if constexpr (Map::kTakesGradient)
                                            gradient.widened(i, of_gradient);
#pragma unroll
                                        for (int e = 0; e < kVec; ++e)
                                            value[e] = Map::apply(by[e], value[e], of_gradient[e]);
                                    });
}

// The statistics that inference normalizes with, for the caller: those of a channel for all that
// share it. A thread a set.
template <typename T>
__global__ void __launch_bounds__(256) given_statistics(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    const long long set = (long long)blockIdx.x * 256 + threadIdx.x;
    if (set >= args.sets) return;
    const long long channel = set % args.channels;
    const A variance = small<T>(args, kRunningVar, channel, A(0));
    static_cast<A*>(args.mean_out)[set] = running<T>(args, kRunningMean, channel);
    static_cast<A*>(args.rstd_out)[set] = GivenVariance<T>::rstd(args, variance);
}
