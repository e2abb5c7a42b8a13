// Channels-last norms: tiles of columns, rows over threads.
//
//   column_norm         all rows of a tile in the registers of one CTA: read once, written once
//   column_statistics   a block of rows of a tile, streamed: a record per column, to be merged
//                       (channel_merge.cuh)
//
// Launch: as channel_tiles.cuh has it (column_norm: segments = 1 and TY * PACKS >= rows); dynamic
// shared memory for one record of each warp and column.
// Arrays: channel_args.cuh. Precision: arithmetic in A, each output rounded once.
#pragma once

#include "channel_tiles.cuh"

// Sums of VEC columns, and of the squares of their distances from their centres.
template <typename T, int VEC, typename A = Accumulator<T>>
struct ColumnSums {
    using Record = typename Centred<A>::Record;
    // Of values in 16 bits, which are not told closer, the distances are added up: their sums lose
    // no more than the squares', and need to be looked after as seldom.
    static constexpr bool kDistances = sizeof(T) == 2;
    Pair<A> sum[VEC] = {}, squares[VEC] = {};
    A part[VEC] = {}, part_squares[VEC] = {};

    __device__ __forceinline__ void add(const A (&x)[VEC], const A (&centre)[VEC]) {
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            const A distance = x[e] - centre[e];
            if constexpr (kDistances)
                part[e] += distance;
            else
                sum[e].add(x[e]);
            part_squares[e] = fma(distance, distance, part_squares[e]);
        }
    }
    __device__ __forceinline__ void settle() {
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            if constexpr (kDistances) sum[e].add(part[e]);
            squares[e].add(part_squares[e]);
            part[e] = part_squares[e] = 0;
        }
    }
    __device__ __forceinline__ void to(Record (&records)[VEC]) const {
#pragma unroll
        for (int e = 0; e < VEC; ++e) records[e] = Record{wide(sum[e]), wide(squares[e])};
    }
    // Of a column with so many values.
    static __device__ __forceinline__ Record finished(Record all, double count, A centre) {
        if constexpr (kDistances) all.sum = fma(count, double(centre), all.sum);
        return all;
    }
};

// Values near the columns' means: of one, two or four of the block's rows, far from each other,
// since neighbours are often alike. On their way until they are asked for.
template <typename T, class Shape>
struct NearMeans {
    using A = Accumulator<T>;
    static constexpr int kVec = Shape::kVec, kBatch = Shape::kBatch;
    Pack<T, kVec> pack[4];
    int count;

    __device__ __forceinline__ NearMeans(const ChannelArgs& args, const ColumnPlace<Shape>& place,
                                         unsigned rows)
        : count(rows >= 4   ? 4
                : rows >= 2 ? 2
                            : 1) {
        const T* const at = place.template address<T>(args, args.x, kChannelX) -
                            int(threadIdx.x / Shape::kTx) * args.run_step[kChannelX];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned row = rows >= 4 ? rows / 4 * i + rows % 4 * i / 4 : i;
            const long long away = row / kBatch * args.segment_rows + row % kBatch;
            if (i < count)
                pack[i] = load<Shape::kAccess, kVec>(at + away * args.run_step[kChannelX]);
        }
    }
    __device__ __forceinline__ void to(A (&near)[kVec]) const {
        const A inverse = count == 4 ? A(0.25) : count == 2 ? A(0.5) : A(1);
#pragma unroll
        for (int e = 0; e < kVec; ++e) near[e] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i >= count) continue;
            A value[kVec];
            widen_pack(opaque(pack[i]), value);
#pragma unroll
            for (int e = 0; e < kVec; ++e) near[e] = fma(value[e], inverse, near[e]);
        }
    }
};

// What the threads that look after a column find: as examine_row, but that rows are not multiplied,
// since they may be read again: `scale` goes with them. `count`: how many the block has.
template <typename T, class Shape, class Rows, typename A = Accumulator<T>>
__device__ __forceinline__ Findings<Centred<A>, A> examine_columns(const ChannelArgs& args,
                                                                   const ColumnPlace<Shape>& place,
                                                                   Rows& rows, long long count,
                                                                   const RowNumbers& numbers) {
    using Record = typename Centred<A>::Record;
    using Bits = typename Range<A>::Bits;
    constexpr int kVec = Shape::kVec;
    __shared__ A centres[Shape::kTile];
    __shared__ A scales[Shape::kTile];
    const unsigned column = threadIdx.x % Shape::kTx * kVec;
    const bool owns = place.owns(args);
    Findings<Centred<A>, A> found;
    Record mine[kVec];
    const auto conclude = [&] {
        gather_columns<Shape>(mine, Plus());
        __syncthreads();
        found.verdict = Verdict::kSound;
        found.unit = found.scale;
        if (owns) {
            found.record = ColumnSums<T, kVec>::finished(
                total_of_column<Shape, Record>(threadIdx.x, Plus()), numbers.count, found.centre);
            found.statistics =
                Centred<A>::finish(found.record, numbers, found.centre, found.unit, found.verdict);
        }
        if (!NeedsRescue<T>::value && found.verdict == Verdict::kOutOfRange)
            found.verdict = Verdict::kSound;
    };

    A centre[kVec], scale[kVec];
    {
        const NearMeans<T, Shape> near(args, place, count);
        rows.begin();
        near.to(centre);
    }
    if (threadIdx.x < Shape::kTx) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) centres[column + e] = centre[e];
    }
    {
        ColumnSums<T, kVec> sums;
        rows.for_each_row([&](const A(&x)[kVec]) { sums.add(x, centre); }, [&] { sums.settle(); });
        sums.to(mine);
    }
    __syncthreads();
    const A near = owns ? centres[threadIdx.x] : A(0);
    found.centre = near;
    found.scale = A(1);
    conclude();
#pragma unroll 1
    for (int rest = 2; rest > 0; --rest) {
        if (!any_of_block<Shape::kWarps>(found.verdict != Verdict::kSound)) break;
        if constexpr (NeedsRescue<T>::value) {
            Bits largest[kVec] = {};
            auto&& again = rows.again();
            again.for_each_row(
                [&](const A(&x)[kVec]) {
#pragma unroll
                    for (int e = 0; e < kVec; ++e)
                        largest[e] = max(largest[e], Range<A>::magnitude_bits(x[e]));
                },
                [] {});
            gather_columns<Shape>(largest, Largest());
            __syncthreads();
            if (found.verdict == Verdict::kOutOfRange) {
                const Bits bits = total_of_column<Shape, Bits>(threadIdx.x, Largest());
                found.scale = range_scale<A>(bits);
                found.centre = near * found.scale;
            }
        }
        if (found.verdict == Verdict::kFarFromCentre) found.centre = found.statistics.centre();
        if (owns) {
            centres[threadIdx.x] = found.centre;
            scales[threadIdx.x] = found.scale;
        }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
            centre[e] = place.active ? centres[column + e] : A(0);
            scale[e] = place.active ? scales[column + e] : A(1);
        }
        ColumnSums<T, kVec> sums;
        auto&& again = rows.again();
        again.for_each_row(
            [&](const A(&x)[kVec]) {
                A scaled[kVec];
#pragma unroll
                for (int e = 0; e < kVec; ++e) scaled[e] = x[e] * scale[e];
                sums.add(scaled, centre);
            },
            [&] { sums.settle(); });
        sums.to(mine);
        conclude();
    }
    return found;
}

template <class Norm, typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    column_norm(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    constexpr int kVec = Shape::kVec;
    const ColumnPlace<Shape> place(args, blockIdx.x);
    HeldRows<T, Shape> x;
    x.read(args, place, kChannelX);
    const auto found = examine_columns<T>(args, place, x, args.runs, args.numbers);
    Coefficients<A> by[kVec];
    share_columns<Shape>(place.owns(args), by, [&] {
        const long long channel = place.own_column();
        store_found<Norm, T>(args, place.plane * args.inner_sets + channel, found);
        return coefficients<T>(args, found.statistics, found.scale, channel);
    });
    if (args.y == nullptr || !place.active) return;
    x.write(place.template address<T>(args, args.y, kChannelY),
            Shape::kTy * args.run_step[kChannelY], [&](int, A(&value)[kVec]) {
#pragma unroll
                for (int e = 0; e < kVec; ++e) value[e] = by[e].apply(value[e]);
            });
}

// The same for a block of `count` rows.
template <typename T, class Shape, class Rows, typename A = Accumulator<T>>
__device__ __forceinline__ Findings<Centred<A>, A> examined_block(const ChannelArgs& args,
                                                                  const ColumnPlace<Shape>& place,
                                                                  Rows& rows, double count) {
    RowNumbers numbers = args.numbers;
    numbers.count = count;
    numbers.inverse = 1.0 / count;
    numbers.inverse32 = 1.0f / float(count);
    return examine_columns<T>(args, place, rows, (long long)count, numbers);
}

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    column_statistics(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    const ColumnPlace<Shape> place(args, blockIdx.x);
    const BlockRows<Shape> rows(args, place.block);
    StreamedRows<T, Shape> x(args, place, rows);
    const double count = rows.count();
    const auto found = examined_block<T>(args, place, x, count);
    if (!place.owns(args)) return;
    const long long record =
        (place.plane * args.segments + place.block) * args.vectors + place.own_column();
    static_cast<SegmentRecord*>(args.partial)[record] =
        segment_record<Accumulator<T>>(found.record, count, found.centre, found.scale);
}
