// Channels-last norms: tiles of columns, rows over threads.
//
//   column_norm         all rows of a tile in the registers of one CTA: read once, written once
//   column_statistics   a block of rows of a tile, streamed: a record per column, to be merged
//                       (channel_merge.cuh)
//
// A thread takes VEC neighbouring columns, TX threads a row of the tile, TY rows at a time.
//
// Launch: grid = planes * segments * tiles (column_norm: segments = 1 and TY * PACKS >= rows);
// block = TX * TY; dynamic shared memory for one record of each warp and column. VEC divides the
// number of columns.
// Arrays: channel_args.cuh. Precision: arithmetic in A, each output rounded once.
#pragma once

#include "channel_args.cuh"

template <int VEC, int ACCESS, int TX, int TY, int PACKS, int CTAS>
struct ColumnShape {
    static constexpr int kVec = VEC, kAccess = ACCESS, kTx = TX, kTy = TY;
    static constexpr int kPacks = PACKS;  // rows a thread holds, or reads at a time
    static constexpr int kCtas = CTAS;
    static constexpr int kBlock = TX * TY, kWarps = kBlock / 32, kTile = TX * VEC;
    static_assert(TX <= 32 && kTile <= kBlock, "a thread for each column of a tile");
};

template <class Shape>
struct ColumnPlace {
    static constexpr int kTy = Shape::kTy;

    long long plane, block, tile, column;
    bool active;
    long long begin, end;  // rows of the block; `begin` is that of this thread

    __device__ __forceinline__ ColumnPlace(const ChannelArgs& args, long long index) {
        const long long tiles = (args.vectors + Shape::kTile - 1) / Shape::kTile;
        const long long above = index / tiles;
        tile = index - above * tiles;
        plane = above / args.segments;
        block = above - plane * args.segments;
        column = tile * Shape::kTile + threadIdx.x % Shape::kTx * Shape::kVec;
        active = column < args.vectors;
        begin = block * args.segment_rows + threadIdx.x / Shape::kTx;
        end = min((block + 1) * args.segment_rows, args.runs);
        if (!active) end = begin;
    }

    __device__ __forceinline__ long long row(int pack) const { return begin + pack * kTy; }
    __device__ __forceinline__ bool holds(int pack) const { return row(pack) < end; }
    template <typename T>
    __device__ __forceinline__ T* address(const ChannelArgs& args, void* base,
                                          ChannelArray array) const {
        return static_cast<T*>(base) + plane * args.outer_step[array] + column;
    }
    template <typename T>
    __device__ __forceinline__ const T* address(const ChannelArgs& args, const void* base,
                                                ChannelArray array) const {
        return static_cast<const T*>(base) + plane * args.outer_step[array] + column;
    }
    // The column of the tile that this thread, one of the first kTile, looks after.
    __device__ __forceinline__ long long own_column() const {
        return tile * Shape::kTile + threadIdx.x;
    }
    __device__ __forceinline__ bool owns(const ChannelArgs& args) const {
        return threadIdx.x < Shape::kTile && own_column() < args.vectors;
    }
    __device__ __forceinline__ double rows_of_block(const ChannelArgs& args) const {
        return min((block + 1) * args.segment_rows, args.runs) - block * args.segment_rows;
    }
};

// The rows of one thread, in registers.
template <typename T, class Shape>
struct HeldRows {
    using A = Accumulator<T>;
    const ColumnPlace<Shape>& place;
    Pack<T, Shape::kVec> held[Shape::kPacks];

    __device__ __forceinline__ HeldRows(const ChannelArgs& args, const ColumnPlace<Shape>& place,
                                        ChannelArray array, bool wanted = true)
        : place(place) {
        if (!wanted) return;
        const T* const at =
            place.template address<T>(args, array == kGradOut ? args.grad_out : args.x, array);
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            held[i] = {};
            if (place.holds(i))
                held[i] =
                    load<Shape::kAccess, Shape::kVec>(at + place.row(i) * args.run_step[array]);
        }
    }

    // f(values) for every row, done() now and then: after no more than kPacks rows.
    template <class F, class D>
    __device__ __forceinline__ void for_each_row(F f, D done) const {
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            if (!place.holds(i)) continue;
            A values[Shape::kVec];
            widen_pack(opaque(held[i]), values);
            f(values);
        }
        done();
    }
};

// The same rows out of memory, kPacks of them on their way at a time.
template <typename T, class Shape>
struct StreamedRows {
    using A = Accumulator<T>;
    const ChannelArgs& args;
    const ColumnPlace<Shape>& place;

    template <class F, class D>
    __device__ __forceinline__ void for_each_row(F f, D done) const {
        ColumnPlace<Shape> part = place;
#pragma unroll 1
        for (; part.begin < part.end; part.begin += Shape::kTy * Shape::kPacks)
            HeldRows<T, Shape>(args, part, kChannelX).for_each_row(f, done);
    }
};

template <typename R>
__device__ __forceinline__ R* column_records() {
    extern __shared__ uint4 slots[];
    return reinterpret_cast<R*>(slots);
}

// Every thread's records of its columns, added over the warp: kTile a warp, to shared memory.
template <class Shape, class R, class Combine>
__device__ __forceinline__ void gather_columns(R (&mine)[Shape::kVec], Combine combine) {
    R* const of_warp = column_records<R>() + threadIdx.x / 32 * Shape::kTile;
#pragma unroll
    for (int e = 0; e < Shape::kVec; ++e) {
#pragma unroll
        for (int distance = 16; distance >= Shape::kTx; distance /= 2)
            mine[e] = combine(mine[e], Lanes<32>().partner(mine[e], distance));
        if (threadIdx.x % 32 < Shape::kTx)
            of_warp[threadIdx.x % Shape::kTx * Shape::kVec + e] = mine[e];
    }
}
// What all warps have of column `column` of the tile.
template <class Shape, class R, class Combine>
__device__ __forceinline__ R total_of_column(unsigned column, Combine combine) {
    const R* const of_warp = column_records<R>() + column;
    R total = of_warp[0];
#pragma unroll
    for (int warp = 1; warp < Shape::kWarps; ++warp)
        total = combine(total, of_warp[warp * Shape::kTile]);
    return total;
}

template <int WARPS>
__device__ __forceinline__ bool any_of_block(bool mine) {
    __shared__ int says[WARPS];
    const bool any_of_warp = __any_sync(0xffffffffu, mine);
    if (threadIdx.x % 32 == 0) says[threadIdx.x / 32] = any_of_warp;
    __syncthreads();
    bool any = false;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) any |= says[warp] != 0;
    __syncthreads();
    return any;
}

// Sums of VEC columns about their centres, as Centred::of_values takes them.
template <typename T, int VEC, typename A = Accumulator<T>>
struct ColumnSums {
    // A plain sum holds the 16-bit values of one batch of rows (RowTile::kExactSum).
    static constexpr bool kExact = sizeof(T) == 2;
    Pair<A> sum[VEC] = {}, squares[VEC] = {};
    A part[VEC] = {}, part_squares[VEC] = {};

    __device__ __forceinline__ void add(const A (&x)[VEC], const A (&centre)[VEC],
                                        const A (&scale)[VEC]) {
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            if constexpr (kExact)
                part[e] = fma(x[e], scale[e], part[e]);
            else
                sum[e].add(x[e] * scale[e]);
            const A distance = fma(x[e], scale[e], -centre[e]);
            part_squares[e] = fma(distance, distance, part_squares[e]);
        }
    }
    __device__ __forceinline__ void batch_is_done() {
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            if constexpr (kExact) sum[e].add(part[e]);
            squares[e].add(part_squares[e]);
            part[e] = part_squares[e] = 0;
        }
    }
};

// A value near the columns' means: of the first rows of the block, one, two or four of them.
template <typename T, class Shape, typename A = Accumulator<T>>
__device__ __forceinline__ void near_means(const ChannelArgs& args, const ColumnPlace<Shape>& place,
                                           A (&near)[Shape::kVec]) {
    constexpr int kVec = Shape::kVec;
    const long long begin = place.block * args.segment_rows;
    const double rows = place.rows_of_block(args);
    const int count = rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
    const T* const at = place.template address<T>(args, args.x, kChannelX);
    Pack<T, kVec> pack[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < count && place.active)
            pack[i] = load<Shape::kAccess, kVec>(at + (begin + i) * args.run_step[kChannelX]);
#pragma unroll
    for (int e = 0; e < kVec; ++e) near[e] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i >= count) continue;
        A value[kVec];
        widen_pack(pack[i], value);
#pragma unroll
        for (int e = 0; e < kVec; ++e) near[e] = fma(value[e], A(1) / count, near[e]);
    }
}

// What the threads that look after a column find: as examine_row, but that rows are not multiplied,
// since they may be read again: `scale` goes with them.
template <typename T, class Shape, class Rows, typename A = Accumulator<T>>
__device__ __forceinline__ Findings<Centred<A>, A> examine_columns(const ChannelArgs& args,
                                                                   const ColumnPlace<Shape>& place,
                                                                   const Rows& rows,
                                                                   const RowNumbers& numbers) {
    using Record = typename Centred<A>::Record;
    using Bits = typename Range<A>::Bits;
    constexpr int kVec = Shape::kVec;
    __shared__ A centres[Shape::kTile];
    __shared__ A scales[Shape::kTile];
    const unsigned column = threadIdx.x % Shape::kTx * kVec;
    const bool owns = place.owns(args);

    A centre[kVec], scale[kVec];
    near_means<T>(args, place, centre);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
        scale[e] = A(1);
        if (threadIdx.x < Shape::kTx) centres[column + e] = centre[e];
    }
    __syncthreads();
    const A near = owns ? centres[threadIdx.x] : A(0);
    Findings<Centred<A>, A> found;
    found.centre = near;
    found.scale = A(1);
#pragma unroll 1
    for (int rest = 2;; --rest) {
        ColumnSums<T, kVec> sums;
        rows.for_each_row([&](const A(&x)[kVec]) { sums.add(x, centre, scale); },
                          [&] { sums.batch_is_done(); });
        Record mine[kVec];
#pragma unroll
        for (int e = 0; e < kVec; ++e) mine[e] = Record{wide(sums.sum[e]), wide(sums.squares[e])};
        gather_columns<Shape>(mine, Plus());
        __syncthreads();
        found.verdict = Verdict::kSound;
        found.unit = found.scale;
        if (owns) {
            found.record = total_of_column<Shape, Record>(threadIdx.x, Plus());
            found.statistics =
                Centred<A>::finish(found.record, numbers, found.centre, found.unit, found.verdict);
        }
        if (!NeedsRescue<T>::value && found.verdict == Verdict::kOutOfRange)
            found.verdict = Verdict::kSound;
        if (rest == 0 || !any_of_block<Shape::kWarps>(found.verdict != Verdict::kSound))
            return found;
        if constexpr (NeedsRescue<T>::value) {
            Bits largest[kVec] = {};
            rows.for_each_row(
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
    }
}

template <class Norm, typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    column_norm(const __grid_constant__ ChannelArgs args) {
    using A = Accumulator<T>;
    constexpr int kVec = Shape::kVec;
    const ColumnPlace<Shape> place(args, blockIdx.x);
    HeldRows<T, Shape> x(args, place, kChannelX);
    const auto found = examine_columns<T>(args, place, x, args.numbers);
    __syncthreads();  // the records have been read: their place is free
    auto* const of_column = column_records<Coefficients<A>>();
    if (place.owns(args)) {
        const long long channel = place.own_column();
        store_found<Norm, T>(args, place.plane * args.inner_sets + channel, found);
        of_column[threadIdx.x] = coefficients<T>(args, found.statistics, found.scale, channel);
    }
    if (args.y == nullptr) return;
    __syncthreads();
    if (!place.active) return;
    Coefficients<A> by[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) by[e] = of_column[threadIdx.x % Shape::kTx * kVec + e];
    T* const y = place.template address<T>(args, args.y, kChannelY);
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
        if (!place.holds(i)) continue;
        A value[kVec];
        widen_pack(opaque(x.held[i]), value);
#pragma unroll
        for (int e = 0; e < kVec; ++e) value[e] = by[e].apply(value[e]);
        store<Shape::kAccess, kVec>(y + place.row(i) * args.run_step[kChannelY],
                                    narrowed<T>(value));
    }
}

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    column_statistics(const __grid_constant__ ChannelArgs args) {
    using A = Accumulator<T>;
    const ColumnPlace<Shape> place(args, blockIdx.x);
    const double count = place.rows_of_block(args);
    RowNumbers numbers = args.numbers;
    numbers.count = count;
    numbers.inverse = 1.0 / count;
    numbers.inverse32 = 1.0f / float(count);
    const auto found =
        examine_columns<T>(args, place, StreamedRows<T, Shape>{args, place}, numbers);
    if (!place.owns(args)) return;
    const long long record =
        (place.plane * args.segments + place.block) * args.vectors + place.own_column();
    static_cast<SegmentRecord*>(args.partial)[record] =
        segment_record<A>(found.record, count, found.centre, found.scale);
}
