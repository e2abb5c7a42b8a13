// How the rows of a backward pass are laid over threads, and what a launch is told.
//
//   row, `cols` elements  = vectors of VEC neighbours, VEC a divisor of cols
//   team                  = THREADS threads that share a row, or a segment of one
//   thread                = PACKS vectors of it, THREADS vectors apart
//   CTA                   = ROWS teams, one row each at a time, that walk a block of rows together
//
// Everything here follows from cols and the dtypes, so that the bits of a row of grad_x do not
// depend on its company. How many rows a block has depends on how many there are: gradients of
// parameters are added up in another order where there are more of them.
#pragma once

#include "pack.cuh"
#include "statistics.cuh"

template <int VEC, int ACCESS, int PACKS, int THREADS, int ROWS, int STAGES, bool HOLD, bool EARLY,
          bool COMBINE, bool DENSE, bool FULL, int CTAS>
struct GradientShape {
    static constexpr int kVec = VEC;          // elements a pack
    static constexpr int kAccess = ACCESS;    // elements a memory transaction
    static constexpr int kPacks = PACKS;      // packs a thread
    static constexpr int kThreads = THREADS;  // a power of two, or whole warps
    static constexpr int kRows = ROWS;
    static constexpr int kStages = STAGES;     // rows on their way to shared memory; 0: registers
    static constexpr bool kHold = HOLD;        // xhat and its gradient in registers, not made again
    static constexpr bool kEarly = EARLY;      // parameters of the block in registers
    static constexpr bool kCombine = COMBINE;  // sums over rows are gathered in shared memory
    static constexpr bool kDense = DENSE;      // row r of every array starts r * cols elements in
    static constexpr bool kFull = FULL;        // every thread has a vector in each of its packs
    static constexpr int kCtas = CTAS;         // CTAs that an SM's registers must have room for
    static constexpr int kLanes = THREADS < 32 ? THREADS : 32;
    static constexpr int kWarps = THREADS / kLanes;  // of a team
    static constexpr int kBlock = THREADS * ROWS;
    static constexpr int kUnit = THREADS < 32 ? 32 : THREADS;  // threads whose sums stay together
    static constexpr int kUnits = kBlock / kUnit;
    static_assert(kBlock % 32 == 0, "whole warps: shuffles name all their lanes");
    static_assert(kWarps == 1 || ROWS <= 15, "a barrier for each team");
};

// Rows are numbered group by group: rows of a group share those parameters whose gradients are
// summed. The place of row r in array i is r * step[i] elements in, if one step says it; else the
// sum over three leading dimensions: step[i] along the outer one, more[i] along the middle and the
// inner one. The elements of a row are neighbours.
//
// Constant memory comes in lines of 64 bytes, each of which a launch waits for: the first, of which
// this struct has 48 bytes, holds all that finds x.
struct RowGradientArgs {
    long long members;  // rows of a group
    unsigned cols;
    unsigned blocks;      // of rows, in a group
    unsigned reach;       // rows that every block has
    unsigned block_step;  // from the first row of a block to that of the next
    unsigned row_step;    // from the rows that a CTA takes to those that it takes next
    unsigned rest;  // of a group, beyond those that all blocks have: block_step each, in order
    const void* x;
    const void* grad_out;
    void* partial;  // records: of each group, of each summed gradient, of each block
    void* grad_parameter[3];
    void* grad_x;
    const void* mean;  // A; as many as rows
    const void* rstd;
    const void* parameter[3];
    const void* grad_residual_out;
    void* sums;      // segments only: two sums of each segment of each row, then of each row
    double inverse;  // 1 / cols
    float inverse32;
    unsigned segments;  // of a row
    unsigned words;     // rows of cols numbers in a record; 2: what one rounds off, too
    unsigned direct;    // a group is one block: its sums are the gradients
    long long rows;
    long long step[12];
    long long middle, inner;  // sizes of the leading dimensions; 0: one step says it
    long long more[12][2];
    unsigned wide[3];  // gradients of parameters that are stored in A, not in T
};

enum GradientArray {
    kOfX,
    kOfGradOut,
    kOfResidual,
    kOfParameter,
    kOfMean = kOfParameter + 3,
    kOfRstd,
    kOfGradX,
    kOfGradParameter
};

// Where a row is in every array: by its leading indices, the divisions done once for all arrays.
// `start`: elements to add; where rows follow each other, all of them.
template <bool DENSE>
struct LeadingIndex {
    const RowGradientArgs& args;
    long long row, start, outer, middle = 0, inner = 0;

    __device__ __forceinline__ LeadingIndex(const RowGradientArgs& args, long long row,
                                            long long start)
        : args(args), row(row), start(start), outer(row) {
        if (DENSE || args.inner == 0) return;
        const long long above = row / args.inner;
        inner = row - above * args.inner;
        outer = above / args.middle;
        middle = above - outer * args.middle;
    }

    __device__ __forceinline__ long long by_steps(int array) const {
        const long long along_outer = outer * args.step[array];
        if (args.inner == 0) return along_outer;
        return along_outer + middle * args.more[array][0] + inner * args.more[array][1];
    }
    // Of an array with the shape of x.
    __device__ __forceinline__ long long of_array(int array) const {
        return DENSE ? start : by_steps(array) + start;
    }
    __device__ __forceinline__ long long of_statistic(int array) const {
        return DENSE ? row : by_steps(array);
    }
};

// Which vectors of a row this thread works on, and which row of those that a CTA takes at a time.
template <class Shape>
struct TeamPlace {
    unsigned team, thread;
    unsigned vectors;  // in the row
    unsigned first;

    __device__ __forceinline__ TeamPlace(unsigned cols, unsigned segment)
        : team(Shape::kRows == 1 ? 0 : threadIdx.x / Shape::kThreads),
          thread(Shape::kRows == 1 ? threadIdx.x : threadIdx.x % Shape::kThreads),
          vectors(cols / Shape::kVec),
          first(segment * (Shape::kThreads * Shape::kPacks) + thread) {}

    // Of the first vector, and what others have more: the packs of an array need one address.
    __device__ __forceinline__ long long column() const { return (long long)(first)*Shape::kVec; }
    static __device__ __forceinline__ long long beyond(int pack) {
        return (long long)(pack) * (Shape::kThreads * Shape::kVec);
    }
    __device__ __forceinline__ bool holds(int pack) const {
        return Shape::kFull || first + pack * Shape::kThreads < vectors;
    }
};

// One row after another of those that a team takes.
template <class Shape>
struct RowCursor {
    const RowGradientArgs& args;
    long long row, start;

    __device__ __forceinline__ RowCursor(const RowGradientArgs& args, const TeamPlace<Shape>& place,
                                         long long row)
        : args(args),
          row(row),
          start(Shape::kDense ? row * args.cols + place.column() : place.column()) {}

    __device__ __forceinline__ LeadingIndex<Shape::kDense> here() const {
        return {args, row, start};
    }
    __device__ __forceinline__ void advance() {
        row += args.row_step;
        if (Shape::kDense) start += (long long)(args.row_step) * args.cols;
    }
};
