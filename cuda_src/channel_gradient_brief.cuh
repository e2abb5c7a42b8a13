// Backward of the norms whose sets are channels, for channels that a CTA has in registers, straight
// on: run_gradient for arrays and small arrays as channel_brief.cuh takes them.
#pragma once

#include "channel_brief.cuh"
#include "channel_gradient.cuh"

// Two sums of the channel. What is not of it counts as nothing, whatever mean and rstd are.
template <typename T, class Shape, typename A = Accumulator<T>>
__device__ __forceinline__ GradientSums<A> sums_of_brief(const BriefTile<T, Shape>& x,
                                                         const BriefTile<T, Shape>& grad_out,
                                                         A mean, A rstd, const Team<Shape>& team) {
    constexpr int kVec = Shape::kVec;
    Pair<A> sum{0, 0}, product{0, 0};
    x.for_each_pack([&](int i, const A(&value)[kVec]) {
        const A about = x.place.holds(i) ? mean : A(0), factor = x.place.holds(i) ? rstd : A(0);
        A gradient[kVec], part[2] = {}, part_product[2] = {};
        grad_out.widened(i, gradient);
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
            part[e % 2] += gradient[e];
            part_product[e % 2] =
                fma(gradient[e], (value[e] - about) * factor, part_product[e % 2]);
        }
        sum.add(part[0] + part[1]);
        product.add(part_product[0] + part_product[1]);
    });
    return team.agree(GradientSums<A>{wide(sum), wide(product)}, Plus(), Itself());
}

template <typename T, class Smalls, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    run_gradient_brief(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    const BriefPlace<Shape> place(args);
    const unsigned base = place.base(args);
    const BriefSmall<A, false> of_mean(args, kMean, place.set), of_rstd(args, kRstd, place.set);
    const BriefSmall<typename Smalls::P, false> weight(args, kWeight, place.set);
    const T* const of_x = static_cast<const T*>(args.x) + base;
    const T* const of_grad_out = static_cast<const T*>(args.grad_out) + base;
    BriefTile<T, Shape> x(args, place, of_x), grad_out(args, place, of_grad_out);
    x.finish_packs(of_x);
    grad_out.finish_packs(of_grad_out);

    const A mean = of_mean.value(A(0)), rstd = of_rstd.value(A(0));
    const auto sums = sums_of_brief(x, grad_out, mean, rstd, Team<Shape>());
    const auto by = gradient_coefficients(args.numbers, mean, rstd, weight.value(A(1)), sums);
    const bool frozen = args.frozen();
    x.map([&](int i, A(&value)[Shape::kVec]) {
        A gradient[Shape::kVec];
        grad_out.widened(i, gradient);
#pragma unroll
        for (int e = 0; e < Shape::kVec; ++e)
            value[e] = frozen ? gradient[e] * by.factor : by.apply(value[e], gradient[e]);
    });
    x.write(static_cast<T*>(args.y) + base);
    if (place.live && place.first == 0) store_sums<T>(args, place.set, sums);
}
