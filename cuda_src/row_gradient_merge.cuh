// Gradients of parameters from the records that blocks of rows have left, always in the same order.
//
// A CTA takes 32 columns of one row of one gradient, VEC of them a thread: 32 / VEC lanes read of
// one record, the lanes of a warp VEC records at a time, and the warps share all that there are.
// Launch: grid = over the gradients: rows of the gradient * ceil(cols / 32); block = whole warps,
// at most kMergeBlock threads.
#pragma once

#include "row_gradient.cuh"

constexpr int kMergeBlock = 512;
constexpr int kMergeColumns = 32;

// Where the records of one gradient are, and where it goes.
struct MergeMap {
    unsigned sums;  // groups whose records are added to one row of it
    unsigned unused;
    // Rows of the gradient, then those groups, by three indices each: sizes of the second and the
    // third, steps in groups; and steps in elements of the gradient.
    unsigned size[2][2];
    long long group_step[2][3], step[3];
};

// What the first load waits for comes first, as in RowGradientArgs.
struct RowGradientMergeArgs {
    unsigned cols;
    unsigned tiles;     // of kMergeColumns
    unsigned records;   // rows of cols numbers that a group has left of one sum
    unsigned first[2];  // CTA of the second and of the third gradient
    unsigned plain;     // every gradient is one row from one group: no map is looked at
    unsigned wide;      // a bit for each gradient: stored in A, not in T
    unsigned together;  // records that a CTA reads at a time
    const void* read_before[2];
    const void* partial;
    void* grad_parameter[3];
    const void* not_read[8];
    MergeMap map[3];
};

// Of three indices, the first of any size: what a number stands for, times steps.
struct MergeIndex {
    unsigned outer, middle, inner;

    __device__ __forceinline__ MergeIndex(unsigned number, const unsigned (&size)[2]) {
        const unsigned above = number / size[1];
        inner = number - above * size[1];
        outer = above / size[0];
        middle = above - outer * size[0];
    }
    __device__ __forceinline__ long long at(const long long (&step)[3]) const {
        return outer * step[0] + middle * step[1] + inner * step[2];
    }
};

// Elements from the first group to one of those whose records are added to a row, and from the
// start of the gradient to the row. Functions that stand aside: a gradient that is one row from one
// group needs neither, and its code comes in one piece.
__device__ __noinline__ long long group_of_row(const RowGradientMergeArgs& args,
                                               const MergeMap& map, unsigned slots, unsigned row,
                                               unsigned group) {
    const long long number = MergeIndex(row, map.size[0]).at(map.group_step[0]) +
                             MergeIndex(group, map.size[1]).at(map.group_step[1]);
    return number * slots * args.records * args.cols;
}
__device__ __noinline__ long long start_of_row(const MergeMap& map, unsigned row) {
    return MergeIndex(row, map.size[0]).at(map.step);
}

// VEC neighbouring columns, added up.
template <typename A, int VEC>
struct RecordSums {
    static constexpr int kLanes = kMergeColumns / VEC;  // that read of one record

    Wide<A> sum[VEC];

    // Of records `cols` apart, `left` from the first that this thread takes, those `stride` apart.
    __device__ __forceinline__ void add(const A* from, unsigned cols, unsigned left,
                                        unsigned stride) {
        constexpr int kBatch = 4;  // so many on their way at once
        const long long step = (long long)(stride)*cols;
#pragma unroll 1
        while (left > 0) {
            Pack<A, VEC> record[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i, from += step)
                if (i * stride < left) record[i] = load<VEC, VEC, FetchConstant>(from);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (i * stride >= left) continue;
#pragma unroll
                for (int e = 0; e < VEC; ++e) sum[e] = sum[e] + wide(part_of<A>(record[i], e));
            }
            left = left > kBatch * stride ? left - kBatch * stride : 0;
        }
    }

    // Over the lanes with the same columns, which go on with half of them after each exchange: the
    // last with one.
    __device__ __forceinline__ Wide<A> of_lane() {
#pragma unroll
        for (int half = VEC / 2; half > 0; half /= 2) {
            const bool upper = threadIdx.x & (half * kLanes);
#pragma unroll
            for (int e = 0; e < half; ++e) {
                const Wide<A> given = upper ? sum[e] : sum[e + half];
                const Wide<A> kept = upper ? sum[e + half] : sum[e];
                sum[e] = kept + Lanes<32>().partner(given, half * kLanes);
            }
        }
        return sum[0];
    }
};

// `in_record`: which of the `slots` sums that a group has left.
template <typename A, int VEC>
__device__ __forceinline__ Wide<A> sum_of_group_records(const RowGradientMergeArgs& args,
                                                        const MergeMap& map, unsigned slots,
                                                        unsigned in_record, unsigned row,
                                                        unsigned tile) {
    constexpr unsigned kLanes = RecordSums<A, VEC>::kLanes;
    const unsigned column = tile * kMergeColumns + threadIdx.x % kLanes * VEC;
    const unsigned first = threadIdx.x / kLanes;
    RecordSums<A, VEC> sums;
#pragma unroll
    for (int e = 0; e < VEC; ++e) sums.sum[e] = wide(A(0));
    if (column < args.cols && first < args.records) {
        const A* const from = static_cast<const A*>(args.partial) + column +
                              (long long)(in_record * args.records + first) * args.cols;
        const unsigned groups = args.plain ? 1 : map.sums;
#pragma unroll 1
        for (unsigned group = 0; group < groups; ++group) {
            const A* at = from;
            if (!args.plain) at += group_of_row(args, map, slots, row, group);
            sums.add(at, args.cols, args.records - first, args.together);
        }
    }
    return sums.of_lane();
}

template <typename T, int SLOT0, int SLOT1, int SLOT2, int VEC>
__global__ void __launch_bounds__(kMergeBlock, sizeof(T) == 8 ? 1 : 2)
    row_gradient_merge(const __grid_constant__ RowGradientMergeArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    using Sum = Wide<A>;
    constexpr int kSlots = SLOT0 + SLOT1 + SLOT2;
    constexpr unsigned kWarps = kMergeBlock / 32, kLanes = RecordSums<A, VEC>::kLanes;
    __shared__ Sum of_warp[kMergeBlock];
    const int slot = blockIdx.x >= args.first[1] ? 2 : blockIdx.x >= args.first[0];
    const unsigned in_record = (slot > 0 ? SLOT0 : 0) + (slot > 1 ? SLOT1 : 0);
    const MergeMap& map = args.map[slot];
    unsigned row = 0, tile = blockIdx.x;
    if (in_record > 0) tile -= slot == 1 ? args.first[0] : args.first[1];
    if (tile >= args.tiles) {
        row = tile / args.tiles;
        tile -= row * args.tiles;
    }

    of_warp[threadIdx.x] = sum_of_group_records<A, VEC>(args, map, kSlots, in_record, row, tile);
    __syncthreads();
    const unsigned lane = threadIdx.x;
    const unsigned column = tile * kMergeColumns + lane % kLanes * VEC + lane / kLanes;
    if (lane >= 32 || column >= args.cols) return;
    Sum sum[2] = {of_warp[lane], wide(A(0))};
#pragma unroll
    for (unsigned warp = 1; warp < kWarps; ++warp)
        if (warp < blockDim.x / 32) sum[warp % 2] = sum[warp % 2] + of_warp[warp * 32 + lane];
    const A total = A(leading(sum[0] + sum[1]));
    const long long at = column + (args.plain ? 0 : start_of_row(map, row));
    if (args.wide >> slot & 1)
        static_cast<A*>(args.grad_parameter[slot])[at] = total;
    else
        static_cast<T*>(args.grad_parameter[slot])[at] = narrow<T>(total);
}
