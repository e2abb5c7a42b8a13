// Backward of rows that no CTA can hold: three launches over segments of THREADS * PACKS vectors.
//
//   row_gradient_sums       a CTA per segment of a row: its two sums
//   row_gradient_row_merge  a warp per row: those of the row, divided by cols
//   row_gradient_segment    as row_gradient, a block of rows of a segment, given the sums
//
// Launch: grid = rows * segments, block = THREADS; grid = ceil(rows / 8), block = 256.
#pragma once

#include "row_gradient_merge.cuh"

constexpr int kRowMergeBlock = 256;

// The sums of rows come first, those of segments behind them.
template <typename A>
__device__ __forceinline__ Moments<A>* sums_of_segments(const RowGradientArgs& args,
                                                        long long row) {
    return static_cast<Moments<A>*>(args.sums) + args.rows + row * args.segments;
}

template <class Norm, class Types, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    row_gradient_sums(const __grid_constant__ RowGradientArgs args) {
    ptx::take_turn();
    using T = typename Types::T;
    using A = typename Types::A;
    using Bare = GradientTypes<T, Constant<0>, typename Types::P0, typename Types::P1,
                               typename Types::P2, Absent, Absent, Absent>;
    BlockGradient<Norm, Bare, Shape, Part::kSumsOfSegment> of_segment(args);
    const Moments<A> sums = of_segment.sums_of_segment();
    if (threadIdx.x > 0) return;
    sums_of_segments<A>(args, of_segment.first_row().row)[of_segment.block.segment] = sums;
}

template <typename T>
__global__ void __launch_bounds__(kRowMergeBlock)
    row_gradient_row_merge(const __grid_constant__ RowGradientArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    const long long row = blockIdx.x * (long long)(kRowMergeBlock / 32) + threadIdx.x / 32;
    if (row >= args.rows) return;
    const Moments<A>* const of_segment = sums_of_segments<A>(args, row);
    Moments<double> mine{0.0, 0.0};
    for (unsigned s = threadIdx.x % 32; s < args.segments; s += 32)
        mine = mine + Moments<double>{of_segment[s].sum, of_segment[s].squares};
    const Moments<double> all = Lanes<32>().combined(mine, Plus());
    if (threadIdx.x % 32 > 0) return;
    static_cast<Moments<A>*>(args.sums)[row] = {A(all.sum * args.inverse),
                                                A(all.squares * args.inverse)};
}

template <class Norm, class Types, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    row_gradient_segment(const __grid_constant__ RowGradientArgs args) {
    ptx::take_turn();
    BlockGradient<Norm, Types, Shape, Part::kSegmentGivenSums>(args).run();
}
