// How a row is laid over threads, as compile-time numbers, and what a launch is told at run time.
//
//   row, `cols` elements   = vectors of VEC neighbours; of ragged rows the last one has fewer
//   thread                 = PACKS vectors, THREADS * CLUSTER vectors apart
//   CTA                    = ROWS rows of THREADS threads (ROWS > 1 only up to one warp a row)
//   cluster                = CLUSTER CTAs that share one row
//
// Everything here follows from cols and the dtypes, never from the number of rows, so that the
// bits of a row do not depend on its company.
#pragma once

#include "statistics.cuh"

// When a thread reads its part of the parameters: after the reduction, or before it, to registers
// or to shared memory.
enum Reading { kLate, kEarly, kStaged };

template <int VEC, int ACCESS, int PACKS, int SHARED, int THREADS, int ROWS, int CLUSTER,
          Reading READING, int CTAS, bool DENSE, bool SEGMENT, int OF_PARAMETERS>
struct RowShape {
    static constexpr int kVec = VEC;          // elements a pack
    static constexpr int kAccess = ACCESS;    // elements a memory transaction
    static constexpr int kPacks = PACKS;      // packs a thread
    static constexpr int kShared = SHARED;    // of them in shared memory, not in registers
    static constexpr int kThreads = THREADS;  // threads a row in one CTA, a power of two
    static constexpr int kRows = ROWS;        // rows a CTA
    static constexpr int kCluster = CLUSTER;  // CTAs a row
    static constexpr Reading kReading = READING;
    static constexpr int kCtas = CTAS;         // CTAs that an SM's registers must have room for
    static constexpr bool kDense = DENSE;      // rows of x, residual and outputs follow each other
    static constexpr bool kSegment = SEGMENT;  // holds a segment of a row, the last one in part
    static constexpr bool kAssigns = true;     // how outputs are written (pack.cuh)
    static constexpr int kOfParameters = OF_PARAMETERS;  // as kAccess, of parameters
    // Rows start anywhere, and VEC need not divide cols.
    static constexpr bool kRagged = ACCESS == 1 && VEC >= 4;
    static constexpr bool kMasked = false;  // channel_runs.cuh
    // Records of others that a thread reads at a time; beside shifting there is room for four.
    static constexpr int kRecords = kRagged ? 4 : 8;
    static constexpr int kLanes = THREADS < 32 ? THREADS : 32;
    static constexpr int kWarps = THREADS / kLanes;
    static constexpr int kBlock = THREADS * ROWS;
    static_assert(ROWS == 1 || kWarps == 1, "rows that share a CTA have no barrier");
    static_assert(CLUSTER == 1 || ROWS == 1, "a cluster serves one row");
    static_assert(READING == kLate || SHARED == 0,
                  "shared memory is for packs of x or for parameters, not for both");
};

// Arrays of a launch. Where the shape is not dense, the place of row r in array i is r * step[i]
// elements in, if one step says it; else the sum over three leading dimensions: step[i] along the
// outer one, more[i] along the middle and the inner one. So are rows of parameters in any case.
// The elements of a row are neighbours.
//
// What every launch reads comes first: constant memory arrives in lines of 64 bytes, each of which
// a cold launch waits for.
struct RowArgs {
    unsigned cols;
    unsigned few_rows;  // how many rows, where 32 bits hold it
    RowNumbers numbers;
    const void* x;
    const void* residual;
    const void* parameter[3];
    void* y;
    void* residual_out;
    void* mean;     // or null; one value per row, packed
    void* rstd;     // or null
    void* partial;  // segments only: what each segment of each row adds up to
    void* summary;  // segments only: the statistics of each row
    long long rows;
    long long segments;       // per row
    long long step[7];        // x, residual, parameters, y, residual_out
    long long middle, inner;  // sizes of the leading dimensions; 0: one step says it
    long long more[7][2];
};

enum Operand { kX, kResidual, kParameter, kY = kParameter + 3, kResidualOut };

// A row by its number; 32 bits hold the number of a row that has a CTA of its own.
template <bool ONE_ROW>
struct RowNumberOf {
    using type = long long;
};
template <>
struct RowNumberOf<true> {
    using type = unsigned;
};

// A row by its leading indices: the divisions are done once for all arrays.
template <class Shape>
struct RowIndex {
    using Row = typename RowNumberOf<Shape::kRows == 1>::type;

    Row row;
    long long outer, middle = 0, inner = 0;

    __device__ __forceinline__ RowIndex(const RowArgs& args, Row row) : row(row), outer(row) {
        if (args.inner == 0) return;
        const long long above = row / args.inner;
        inner = row - above * args.inner;
        outer = above / args.middle;
        middle = above - outer * args.middle;
    }

    __device__ __forceinline__ long long offset(const RowArgs& args, int operand) const {
        const long long along_outer = outer * args.step[operand];
        if (args.inner == 0) return along_outer;
        return along_outer + middle * args.more[operand][0] + inner * args.more[operand][1];
    }

    // Of x, residual, y, residual_out.
    __device__ __forceinline__ long long of_array(const RowArgs& args, int operand) const {
        if constexpr (Shape::kDense) return (long long)row * args.cols;
        return offset(args, operand);
    }
};
