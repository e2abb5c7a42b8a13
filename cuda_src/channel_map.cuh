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
// Launch: run_map: grid = ceil(vectors / (THREADS * PACKS)), all vectors of the array counted;
// column_map: as channel_tiles.cuh has it, with a segment for every batch.
#pragma once

#include "channel_columns.cuh"

template <int VEC, int ACCESS, int PACKS, int THREADS, int CTAS>
struct MapShape {
    static constexpr int kVec = VEC, kAccess = ACCESS, kPacks = PACKS, kThreads = THREADS,
                         kCtas = CTAS;
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

// Mean and reciprocal deviation are given.
template <typename T>
struct Given {
    using A = Accumulator<T>;
    static constexpr bool kTakesGradient = false, kFromEnd = false;
    static __device__ __forceinline__ Coefficients<A> at(const ChannelArgs& args, long long,
                                                         long long channel) {
        return Coefficients<A>::given(
            small<T>(args, kMean, channel, A(0)), small<T>(args, kRstd, channel, A(0)),
            small<T>(args, kWeight, channel, A(1)), small<T>(args, kBias, channel, A(0)));
    }
    static __device__ __forceinline__ A apply(const Coefficients<A>& by, A x, A) {
        return by.apply(x);
    }
};

// Mean and variance are given.
template <typename T>
struct GivenVariance : Given<T> {
    using A = Accumulator<T>;
    static __device__ __forceinline__ A rstd(const ChannelArgs& args, long long channel) {
        const A inside = running<T>(args, kRstd, channel) + eps_of<A>(args.numbers);
        return inside == A(0) ? A(1) / inside : reciprocal_sqrt(inside);
    }
    static __device__ __forceinline__ Coefficients<A> at(const ChannelArgs& args, long long,
                                                         long long channel) {
        return Coefficients<A>::given(running<T>(args, kMean, channel), rstd(args, channel),
                                      small<T>(args, kWeight, channel, A(1)),
                                      small<T>(args, kBias, channel, A(0)));
    }
};

template <class Map, typename T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtas)
    run_map(const __grid_constant__ ChannelArgs args) {
    using A = Accumulator<T>;
    constexpr int kVec = Shape::kVec, kAccess = Shape::kAccess;
    const long long block = Map::kFromEnd ? gridDim.x - 1 - (long long)blockIdx.x : blockIdx.x;
    const long long start = block * (Shape::kThreads * Shape::kPacks);
    const long long run = start / args.length.size;
    const long long rest = start - run * args.length.size;
    const long long outer = run / args.channels;
    const long long inner = run - outer * args.channels;

    Pack<T, kVec> x[Shape::kPacks], gradient[Map::kTakesGradient ? Shape::kPacks : 1];
    long long n[Shape::kPacks], c[Shape::kPacks], within[Shape::kPacks];
    bool held[Shape::kPacks];
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
        const unsigned mine = threadIdx.x + i * Shape::kThreads;
        const long long local = rest + mine;
        const long long runs = args.length.quotient(local);
        const long long samples = args.channel.quotient(inner + runs);
        held[i] = start + mine < args.vectors;
        n[i] = outer + samples;
        c[i] = inner + runs - samples * args.channels;
        within[i] = c[i] * args.inner_step + (local - runs * args.length.size) * kVec;
        if (!held[i]) continue;
        x[i] = load<kAccess, kVec>(static_cast<const T*>(args.x) +
                                   n[i] * args.outer_step[kChannelX] + within[i]);
        if constexpr (Map::kTakesGradient)
            gradient[i] = load<kAccess, kVec>(static_cast<const T*>(args.grad_out) +
                                              n[i] * args.outer_step[kGradOut] + within[i]);
    }
    if (!held[0]) return;  // nor any other
    auto now = Map::at(args, n[0], c[0]);
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
        if (!held[i]) continue;
        if (i > 0 && (c[i] != c[i - 1] || n[i] != n[i - 1])) now = Map::at(args, n[i], c[i]);
        A value[kVec], of_gradient[kVec] = {};
        widen_pack(opaque(x[i]), value);
        if constexpr (Map::kTakesGradient) widen_pack(opaque(gradient[i]), of_gradient);
#pragma unroll
        for (int e = 0; e < kVec; ++e) value[e] = Map::apply(now, value[e], of_gradient[e]);
        store<kAccess, kVec>(
            static_cast<T*>(args.y) + n[i] * args.outer_step[kChannelY] + within[i],
            narrowed<T>(value));
    }
}

template <class Map, typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    column_map(const __grid_constant__ ChannelArgs args) {
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
    using A = Accumulator<T>;
    const long long set = (long long)blockIdx.x * 256 + threadIdx.x;
    if (set >= args.sets) return;
    const long long channel = set % args.channels;
    static_cast<A*>(args.mean_out)[set] = running<T>(args, kMean, channel);
    static_cast<A*>(args.rstd_out)[set] = GivenVariance<T>::rstd(args, channel);
}
