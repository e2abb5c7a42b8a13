// Gradients of parameters from the records that blocks of rows have left, added in the order of
// the rows.
//
// A CTA takes 32 columns of one row of one gradient; its warps share the records.
// Launch: grid = over the gradients: rows of the gradient * ceil(cols / 32); block = 32 times a
// power of two, at most kMergeBlock.
#pragma once

#include "row_gradient.cuh"

constexpr int kMergeBlock = 512;

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

// `slots`: sums in a record.
template <typename T>
__device__ __forceinline__ Wide<Accumulator<T>> sum_of_records(const RowGradientArgs& args,
                                                               const MergeMap& map, int slots,
                                                               int slot, unsigned row,
                                                               unsigned column) {
    using A = Accumulator<T>;
    const unsigned warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const unsigned of_group = args.blocks * args.chunks;
    const long long record = (long long)slots * args.words * args.cols;
    const long long first = MergeIndex(row, map.size[0]).at(map.group_step[0]);
    const A* const records =
        static_cast<const A*>(args.partial) + (long long)slot * args.words * args.cols + column;
    constexpr int kBatch = 8;  // so many on their way at once
    Wide<A> sum = wide(A(0));
    for (unsigned group = 0; group < map.sums; ++group) {
        const long long of_sum = MergeIndex(group, map.size[1]).at(map.group_step[1]);
        const A* const from = records + (first + of_sum) * of_group * record;
#pragma unroll 1
        for (unsigned r = warp; r < of_group; r += kBatch * warps) {
            A value[kBatch] = {}, rest[kBatch] = {};
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const unsigned n = r + i * warps;
                if (n >= of_group) continue;
                value[i] = __ldg(from + n * record);
                if (args.words > 1) rest[i] = __ldg(from + n * record + args.cols);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) sum = sum + wide(value[i]) + wide(rest[i]);
        }
    }
    return sum;
}

template <typename T, int SLOT0, int SLOT1, int SLOT2>
__global__ void __launch_bounds__(kMergeBlock)
    row_gradient_merge(const __grid_constant__ RowGradientArgs args) {
    using A = Accumulator<T>;
    using Sum = Wide<A>;
    __shared__ Sum of_warp[kMergeBlock];
    constexpr int kSlots = SLOT0 + SLOT1 + SLOT2;
    const int slot = blockIdx.x >= args.merge[2].first ? 2 : blockIdx.x >= args.merge[1].first;
    const MergeMap& map = args.merge[slot];
    const int in_record = (slot > 0 ? SLOT0 : 0) + (slot > 1 ? SLOT1 : 0);
    const unsigned tiles = (args.cols + 31) / 32;
    const unsigned index = blockIdx.x - map.first;
    const unsigned row = index / tiles;
    const unsigned column = (index - row * tiles) * 32 + threadIdx.x % 32;

    of_warp[threadIdx.x] = column < args.cols
                               ? sum_of_records<T>(args, map, kSlots, in_record, row, column)
                               : wide(A(0));
    for (unsigned half = blockDim.x / 2; half >= 32; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            of_warp[threadIdx.x] = of_warp[threadIdx.x] + of_warp[threadIdx.x + half];
    }
    if (threadIdx.x >= 32 || column >= args.cols) return;
    const A sum = A(leading(of_warp[threadIdx.x]));
    const long long at = MergeIndex(row, map.size[0]).at(map.step) + column;
    if (map.wide)
        static_cast<A*>(args.grad_parameter[slot])[at] = sum;
    else
        static_cast<T*>(args.grad_parameter[slot])[at] = narrow<T>(sum);
}
