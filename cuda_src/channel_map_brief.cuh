// Inference straight on: as run_map, but that every thread reads what it needs of the channels of
// its packs, so that none waits for another.
//
// Launch: as run_map with BRIEF and without CROSSING; x and y have the same steps, small arrays are
// contiguous and of the types of Smalls: R those of running statistics.
#pragma once

#include "channel_brief.cuh"
#include "channel_map.cuh"

template <typename T, class Smalls, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtas)
    run_map_brief(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    using Running = BriefSmall<typename Smalls::R, false>;
    using Affine = BriefSmall<typename Smalls::P, false>;
    constexpr int kVec = Shape::kVec, kAccess = Shape::kAccess, kPacks = Shape::kPacks;
    const Brief& brief = args.brief;

    Pack<T, kVec> x[kPacks];
    Running mean[kPacks], variance[kPacks];
    Affine weight[kPacks], bias[kPacks];
    long long at[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
        const unsigned element =
            (blockIdx.x * kPacks + i) * (Shape::kThreads * kVec) + threadIdx.x * kVec;
        if (element >= brief.vectors) {
            at[i] = -1;
            continue;
        }
        const unsigned run = brief.length.quotient(element, brief.length_shift);
        const unsigned sample = brief.inner_sets.quotient(run, brief.inner_shift);
        const unsigned channel = run - sample * brief.inner_sets.size;
        const unsigned of_sample = brief.inner_sets.size * brief.length.size;
        at[i] = element + sample * (brief.x_step - of_sample);
        x[i] = begin_load<kAccess, kVec>(static_cast<const T*>(args.x) + at[i]);
        mean[i] = Running(args, kRunningMean, channel);
        variance[i] = Running(args, kRunningVar, channel);
        weight[i] = Affine(args, kWeight, channel);
        bias[i] = Affine(args, kBias, channel);
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
        if (at[i] < 0) continue;
        const auto by =
            Coefficients<A>::given(as_running<T>(args, mean[i].value(A(0))),
                                   GivenVariance<T>::rstd(args, variance[i].value(A(0))),
                                   weight[i].value(A(1)), bias[i].value(A(0)));
        A value[kVec];
        x[i] = finish_load<kAccess>(x[i], static_cast<const T*>(args.x) + at[i]);
        widen_pack(opaque(x[i]), value);
#pragma unroll
        for (int e = 0; e < kVec; ++e) value[e] = by.apply(value[e]);
        store<kAccess, kVec>(static_cast<T*>(args.y) + at[i], narrowed<T>(value));
    }
}
