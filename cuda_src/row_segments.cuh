// Row norms of rows that no group of CTAs can hold on chip: three launches over segments.
//
//   row_segment_statistics   a CTA per segment: its record and scale (and the stored sum)
//   row_segment_merge        a CTA per row: the records of the row in double, to its statistics
//   row_segment_normalize    a CTA per segment, last segments first: they are still in L2
//
// A segment is what one CTA holds in registers: THREADS * PACKS vectors. Arrays and precision as
// in row_norm.cuh.
// Launch: grid = rows * segments (merge: rows), block = THREADS (merge: kMergeThreads).
#pragma once

#include "row_norm.cuh"

constexpr int kMergeThreads = 256;

// Sum and mean sum of squares of a segment; squares about its own mean where the norm has one.
struct SegmentRecord {
    Pair<double> sum;
    double squares, count, scale;
};

template <typename A>
__device__ __forceinline__ SegmentRecord segment_record(const typename Centred<A>::Record& record,
                                                        double count, A centre, A scale) {
    const Wide<A> mean = Centred<A>::mean_of(record, count, 1.0 / count);
    const double squares = Centred<A>::spread(record, mean, centre, count);
    return {split<double>(record.sum), squares, count, scale};
}
template <typename A>
__device__ __forceinline__ SegmentRecord segment_record(typename MeanSquare<A>::Record squares,
                                                        double count, A, A scale) {
    return {{0.0, 0.0}, squares, count, scale};
}

template <class Statistics, typename A>
struct RowSummary {
    Statistics statistics;
    A scale;
};

template <class Shape>
__device__ __forceinline__ Place<Shape> place_of_segment(const RowArgs& args, unsigned index) {
    const unsigned segments = args.segments, segment = index % segments;
    return Place<Shape>(args, index / segments, segment * Shape::kThreads * Shape::kPacks);
}

template <class Norm, class Types, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    row_segment_statistics(const __grid_constant__ RowArgs args) {
    ptx::take_turn();
    using T = typename Types::T;
    using A = typename Types::A;
    using Statistics = typename Norm::template Statistics<A>;

    const Place<Shape> place = place_of_segment<Shape>(args, blockIdx.x);
    const Team<Shape> team;
    const unsigned start = (place.first - threadIdx.x) * Shape::kVec;
    RowTile<T, Shape> x(place);
    const RowIndex<Shape> index(args, place.row);
    read_row<Norm>(args, index, x, min(start, args.cols - 4));  // it starts with four at least

    const double count = min(args.cols - start, Shape::kBlock * Shape::kPacks * Shape::kVec);
    RowNumbers numbers = args.numbers;
    numbers.count = count;
    numbers.inverse = 1.0 / count;
    numbers.inverse32 = 1.0f / float(count);
    const auto keep_sum = [&] {
        if constexpr (Norm::kAdds)
            x.write(static_cast<T*>(args.residual_out) + index.of_array(args, kResidualOut));
    };
    const auto found = examine_row<Statistics>(x, team, numbers, keep_sum);
    if (found.scale == A(1)) keep_sum();
    if (threadIdx.x == 0)
        static_cast<SegmentRecord*>(args.partial)[blockIdx.x] =
            segment_record<A>(found.record, count, found.centre, found.scale);
}

// One value per thread, added over the CTA in a fixed order.
template <typename V>
__device__ V sum_of_block(V value) {
    __shared__ V of_warp[kMergeThreads / 32];
    __syncthreads();
    Lanes<32>().deposit(value, Plus(), of_warp[threadIdx.x / 32]);
    __syncthreads();
    return combined_records<kMergeThreads / 32>(of_warp, Plus());
}

template <typename A>
__device__ A smallest_of_block(A value) {
    __shared__ A of_warp[kMergeThreads / 32];
    Lanes<32>().deposit(-value, Largest(), of_warp[threadIdx.x / 32]);
    __syncthreads();
    return -combined_records<kMergeThreads / 32>(of_warp, Largest());
}

// Chan, Golub & LeVeque (1979): every term of the sum of squares is positive.
template <typename A>
__device__ void merge(const SegmentRecord* of_segment, const RowArgs& args, A& unit,
                      Centred<A>& row) {
    const double scale = unit;
    const RowNumbers numbers = args.numbers;
    Pair<double> sum{0, 0};
    for (unsigned s = threadIdx.x; s < args.segments; s += kMergeThreads) {
        const double unit = scale / of_segment[s].scale;
        sum.add(of_segment[s].sum.hi * unit);
        sum.add(of_segment[s].sum.lo * unit);
    }
    const Pair<double> mean = quotient(sum_of_block(wide(sum)), numbers.count, numbers.inverse);
    double squares = 0;
    for (unsigned s = threadIdx.x; s < args.segments; s += kMergeThreads) {
        const SegmentRecord mine = of_segment[s];
        const double unit = scale / mine.scale;
        const Pair<double> own = quotient(Pair<double>{mine.sum.hi * unit, mine.sum.lo * unit},
                                          mine.count, 1.0 / mine.count);
        const double moved = (own.hi - mean.hi) + (own.lo - mean.lo);
        squares += mine.squares * unit * unit + mine.count * moved * moved;
    }
    Pair<A> in_two = split<A>(mean.hi);
    in_two.lo += A(mean.lo);
    row = Centred<A>::of_moments(in_two, sum_of_block(squares), numbers, unit);
}

template <typename A>
__device__ void merge(const SegmentRecord* of_segment, const RowArgs& args, A& unit,
                      MeanSquare<A>& row) {
    const double scale = unit;
    double squares = 0;
    for (unsigned s = threadIdx.x; s < args.segments; s += kMergeThreads) {
        const double unit = scale / of_segment[s].scale;
        squares += of_segment[s].squares * unit * unit;
    }
    row.rstd = A(inverse_deviation(sum_of_block(squares), args.numbers, scale));
}

template <class Norm, class Types>
__global__ void __launch_bounds__(kMergeThreads)
    row_segment_merge(const __grid_constant__ RowArgs args) {
    ptx::take_turn();
    using A = typename Types::A;
    using Statistics = typename Norm::template Statistics<A>;

    const long long row = blockIdx.x;
    const auto* of_segment = static_cast<const SegmentRecord*>(args.partial) + row * args.segments;
    double scale = of_segment[0].scale;
    for (unsigned s = threadIdx.x; s < args.segments; s += kMergeThreads)
        scale = min(scale, of_segment[s].scale);
    scale = smallest_of_block(scale);

    RowSummary<Statistics, A> summary;
    A unit = summary.scale = A(scale);
    merge(of_segment, args, unit, summary.statistics);
    if (threadIdx.x == 0) {
        static_cast<RowSummary<Statistics, A>*>(args.summary)[row] = summary;
        store_statistics(args, row, summary.statistics, summary.scale, unit);
    }
}

template <class Norm, class Types, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    row_segment_normalize(const __grid_constant__ RowArgs args) {
    ptx::take_turn();
    using T = typename Types::T;
    using A = typename Types::A;
    using Statistics = typename Norm::template Statistics<A>;

    const Place<Shape> place = place_of_segment<Shape>(args, gridDim.x - 1 - blockIdx.x);
    const RowIndex<Shape> index(args, place.row);
    RowTile<T, Shape> x(place);
    if constexpr (Norm::kAdds)
        x.read(static_cast<const T*>(args.residual_out) + index.of_array(args, kResidualOut));
    else
        x.read(static_cast<const T*>(args.x) + index.of_array(args, kX));
    const RowParameters<Norm, Types, Shape> parameters(args, index, place);
    const auto summary = static_cast<const RowSummary<Statistics, A>*>(args.summary)[place.row];
    x.finish_packs();
    if (summary.scale != A(1)) x.multiply(summary.scale);
    parameters.normalize(x, summary.statistics);
    x.write(static_cast<T*>(args.y) + index.of_array(args, kY));
}
