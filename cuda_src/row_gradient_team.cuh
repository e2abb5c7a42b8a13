// Backward of the row norms: the rows of a CTA, and the two sums of a row over its team.
#pragma once

#include "row_gradient_shape.cuh"

template <typename A>
__device__ __forceinline__ A inverse_count(const RowGradientArgs& args) {
    if constexpr (sizeof(A) == sizeof(float))
        return args.inverse32;
    else
        return args.inverse;
}

// What a launch does with rows that are cut into segments.
enum class Part { kWholeRow, kSumsOfSegment, kSegmentGivenSums };

// A segment of a block of rows of one group.
template <bool CUT>
struct RowBlock {
    unsigned group, index, segment;
    unsigned begin, rows;  // first row of the block in its group, and how many it has

    __device__ __forceinline__ explicit RowBlock(const RowGradientArgs& args) : segment(0) {
        index = blockIdx.x;
        if constexpr (CUT) {
            index = blockIdx.x / args.segments;
            segment = blockIdx.x - index * args.segments;
        }
        group = index / args.blocks;
        index -= group * args.blocks;
        begin = index * args.block_step;
        rows = args.reach + (args.rest > begin ? min(args.rest - begin, args.block_step) : 0);
    }
};

// Of any number of warps, in a fixed order.
template <int COUNT, class R>
__device__ __forceinline__ R sum_of_records(const R* records) {
    if constexpr ((COUNT & (COUNT - 1)) == 0) {
        return combined_records<COUNT>(records, Plus());
    } else {
        constexpr int kFirst = COUNT > 8 ? 8 : COUNT > 4 ? 4 : 2;
        R sum[kFirst];
#pragma unroll
        for (int i = 0; i < kFirst; ++i)
            sum[i] = i + kFirst < COUNT ? records[i] + records[i + kFirst] : records[i];
#pragma unroll
        for (int half = kFirst / 2; half > 0; half /= 2) {
#pragma unroll
            for (int i = 0; i < half; ++i) sum[i] = sum[i] + sum[i + half];
        }
        return sum[0];
    }
}

// The two sums of a row over its team; without a mean the first is not taken.
template <class Shape, typename A, bool CENTRED>
struct RowSums {
    using Record = Moments<A>;

    // `turn`: how many times before. A warp is at most one barrier ahead of others.
    static __device__ __forceinline__ Record over_team(const Record& mine, unsigned team,
                                                       unsigned turn) {
        const Lanes<Shape::kLanes> lanes;
        if constexpr (Shape::kWarps == 1) {
            if constexpr (CENTRED)
                return lanes.combined(mine, Plus());
            else
                return {A(0), lanes.combined(mine.squares, Plus())};
        } else {
            __shared__ Record of_warp[2 * Shape::kRows * Shape::kWarps];
            Record* const of_team = of_warp + (turn % 2 * Shape::kRows + team) * Shape::kWarps;
            const unsigned warp = threadIdx.x % Shape::kThreads / 32;
            if constexpr (CENTRED) {
                lanes.deposit(mine, Plus(), of_team[warp]);
            } else {
                const A all = lanes.combined(mine.squares, Plus());
                if (threadIdx.x % 32 == 0) of_team[warp] = {A(0), all};
            }
            if constexpr (Shape::kRows == 1)
                __syncthreads();
            else
                ptx::barrier(int(team) + 1, Shape::kThreads);
            return sum_of_records<Shape::kWarps>(of_team);
        }
    }
};
