// Backward of batch norm of short tables: every thread has a column (channel_table.cuh).
#pragma once

#include "channel_gradient.cuh"
#include "channel_table.cuh"

template <typename T, class Smalls, int ROWS, bool FULL>
__global__ void __launch_bounds__(kTableBlock)
    table_gradient(const __grid_constant__ ChannelArgs args) {
    using A = Accumulator<T>;
    constexpr int kTogether = 8;  // rows between two additions to a pair
    const unsigned column = blockIdx.x * kTableBlock + threadIdx.x;
    if (column >= args.brief.vectors) return;
    const TableColumn<T, ROWS, FULL> x(args, args.x, column, unsigned(args.brief.x_step));
    const TableColumn<T, ROWS, FULL> grad_out(args, args.grad_out, column,
                                              unsigned(args.brief.x_step));
    const BriefSmall<A, false> of_mean(args, kMean, column), of_rstd(args, kRstd, column);
    const BriefSmall<typename Smalls::P, false> weight(args, kWeight, column);

    const A mean = of_mean.value(A(0)), rstd = of_rstd.value(A(0));
    Pair<A> sum{0, 0}, product{0, 0};
    A part = 0, part_product = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        part += grad_out[i];
        part_product = fma(grad_out[i], (x[i] - mean) * rstd, part_product);
        if (i % kTogether < kTogether - 1) continue;
        sum.add(part);
        product.add(part_product);
        part = part_product = 0;
    }
    const GradientSums<A> sums{wide(sum), wide(product)};
    const auto by = gradient_coefficients(args.numbers, mean, rstd, weight.value(A(1)), sums);
    const bool frozen = args.frozen();
    x.write(args.y, column, unsigned(args.brief.x_step), [&](int i, A value) {
        return frozen ? grad_out[i] * by.factor : by.apply(value, grad_out[i]);
    });
    store_sums<T>(args, column, sums);
}
