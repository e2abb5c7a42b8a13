// Backward of batch norm of short tables (channel_table.cuh).
#pragma once

#include "channel_gradient.cuh"
#include "channel_table.cuh"

template <typename T, class Smalls, int ROWS, bool FULL, int LANES>
__global__ void __launch_bounds__(kTableBlock, kTableCtas<LANES>)
    table_gradient(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    using Column = TableColumn<T, ROWS, FULL, LANES>;
    constexpr int kTogether = 8;  // rows between two additions to a pair
    const TablePlace<LANES> place(args);
    const unsigned step = unsigned(args.brief.x_step);
    const Column x(args, place, args.x, step), grad_out(args, place, args.grad_out, step);
    const BriefSmall<A, false> of_mean(args, kMean, place.column),
        of_rstd(args, kRstd, place.column);
    const BriefSmall<typename Smalls::P, false> weight(args, kWeight, place.column);

    const A mean = of_mean.value(A(0)), rstd = of_rstd.value(A(0));
    // Now: the weight would be asked for after the exchange.
    const A factor = opaque(rstd * weight.value(A(1)));
    Pair<A> sum{0, 0}, product{0, 0};
    A part = 0, part_product = 0;
#pragma unroll
    for (int i = 0; i < Column::kHeld; ++i) {
        part += grad_out[i];
        part_product = fma(grad_out[i], (x[i] - mean) * rstd, part_product);
        if (i % kTogether < kTogether - 1 && i < Column::kHeld - 1) continue;
        sum.add(part);
        product.add(part_product);
        part = part_product = 0;
    }
    const auto sums = sum_of_column<LANES>(GradientSums<A>{wide(sum), wide(product)});
    auto by = gradient_coefficients(args.numbers, mean, rstd, A(1), sums);
    by.factor = factor;
    const bool frozen = args.frozen();
    x.write(args.y, step, [&](int i, A value) {
        return frozen ? grad_out[i] * by.factor : by.apply(value, grad_out[i]);
    });
    if (place.speaks()) store_sums<T>(args, place.column, sums);
}
