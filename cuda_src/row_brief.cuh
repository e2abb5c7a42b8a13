// Row norms of short rows, straight on: no branch between the loads and the output.
//
// A warp holds a row or several. Packs past the end of a row and rows past the last one are read
// all the same, from where there is something to read, and not written. A row is normalized before
// it is asked whether it may be: where it may not, its warp starts again with what row_norm does,
// as a function that stands aside. Arrays, precision and bits are those of row_norm.cuh.
//
// Launch: as row_norm, for at most a warp a row and fewer than 2^32 rows; rows of x, residual and
// outputs follow each other, and none has parameters of its own. FULL: THREADS * PACKS * VEC ==
// cols.
#pragma once

#include "row_norm.cuh"

template <class Shape, bool FULL>
struct Brief : Shape {
    static_assert(Shape::kWarps * Shape::kCluster == 1 && Shape::kShared == 0,
                  "a warp has the whole row in registers");
    static_assert(Shape::kDense, "one step for all arrays");
};

template <class Shape, bool FULL>
struct Place<Brief<Shape, FULL>> {
    unsigned row;
    bool live;
    unsigned cols;
    unsigned first;

    __device__ __forceinline__ explicit Place(const RowArgs& args)
        : row(blockIdx.x * Shape::kRows + threadIdx.x / Shape::kThreads),
          live(row < args.few_rows),
          cols(FULL ? Shape::kThreads * Shape::kPacks * Shape::kVec : args.cols),
          first(threadIdx.x % Shape::kThreads) {
        row = min(row, args.few_rows - 1);
    }

    // Something is, for every pack.
    __device__ __forceinline__ bool holds(int) const { return true; }
    __device__ __forceinline__ bool is_of_row(int pack) const {
        if (FULL || pack < Shape::kPacks - 1) return true;
        return first + pack * Shape::kThreads < cols / Shape::kVec;
    }
    __device__ __forceinline__ size_t column(int pack) const {
        const int stands_for_it = is_of_row(pack) ? pack : 0;
        return size_t(first) * Shape::kVec + size_t(stands_for_it) * Shape::kThreads * Shape::kVec;
    }
    template <typename T>
    __device__ __forceinline__ T* row_of(T* array) const {
        return array + size_t(row) * cols;
    }
};

template <typename T, class Shape, bool FULL>
struct RowTile<T, Brief<Shape, FULL>> {
    static constexpr int kVec = Shape::kVec;
    static constexpr int kExactSum = RowTile<T, Shape>::kExactSum;
    using A = Accumulator<T>;
    using P = Pack<T, kVec>;

    Place<Brief<Shape, FULL>> place;
    RowStart<T, Shape> start;
    A near;  // the row's mean
    P held[Shape::kPacks];

    __device__ __forceinline__ explicit RowTile(const Place<Brief<Shape, FULL>>& place)
        : place(place) {}

    __device__ __forceinline__ void set(int i, const P& pack) { held[i] = pack; }

    __device__ __forceinline__ void read(const T* row) {
        start = RowStart<T, Shape>(row);
        near = start.average();
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i)
            held[i] = load<Shape::kAccess, kVec>(row + place.column(i));
    }
    __device__ __forceinline__ void add(const T* other) {
        near = (start + RowStart<T, Shape>(other)).average();
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            A sum[kVec], addend[kVec];
            widen_pack(load<Shape::kAccess, kVec>(other + place.column(i)), addend);
            widened(i, sum);
#pragma unroll
            for (int e = 0; e < kVec; ++e) sum[e] += addend[e];
            held[i] = narrowed<T>(sum);
        }
    }
    __device__ __forceinline__ void write(T* row) const {
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i)
            if (place.live && place.is_of_row(i))
                store<Shape::kAccess, kVec>(row + place.column(i), held[i]);
    }

    __device__ __forceinline__ void widened(int i, A (&values)[kVec]) const {
        widen_pack(held[i], values);
    }
    // Zeros for what is not of the row.
    template <class F>
    __device__ __forceinline__ void for_each_pack(F f) const {
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            A values[kVec];
            widen_pack(place.is_of_row(i) ? held[i] : P{}, values);
            f(i, values);
        }
    }
};

template <typename T, class Shape, bool FULL, typename A>
__device__ __forceinline__ A centre_of(const RowTile<T, Brief<Shape, FULL>>& x, int pack,
                                       A centre) {
    return x.place.is_of_row(pack) ? centre : A(0);
}

// Whether the rows of this warp are sound. Rows whose centre lies far outside come by now and then:
// they are taken again about their mean here. The loop also keeps the compiler from putting off the
// loads of parameters, which stand before it, until the statistics are there.
template <class Statistics, typename T, class Short, typename A>
__device__ __forceinline__ bool examine_short_row(const RowTile<T, Short>& x,
                                                  const RowNumbers& numbers,
                                                  Conclusion<Statistics, A>& row) {
    const Team<Short> team;
    A centre = Statistics::kCentred ? x.near : A(0);
#pragma unroll 1
    for (int rest = 2;; --rest) {
        const auto record = team.lanes.combined(Statistics::of_values(x, centre), Plus());
        row.unit = A(1);
        row.statistics = Statistics::finish(record, numbers, centre, row.unit, row.verdict);
        const bool far = row.verdict == Verdict::kFarFromCentre;
        if (far) centre = row.statistics.centre();
        if (!Statistics::kCentred || !team.any(far) || rest == 0) break;
    }
    if (!NeedsRescue<T>::value && row.verdict == Verdict::kOutOfRange) return true;
    return row.verdict == Verdict::kSound;
}

template <class Norm, class Types, class Shape>
__device__ __noinline__ void start_again(const RowArgs& args) {
    using Row = typename Place<Shape>::Row;
    const Row row = Row(blockIdx.x) * Shape::kRows + threadIdx.x / Shape::kThreads;
    normalize_row<Norm, Types>(args, Place<Shape>(args, row, 0), Team<Shape>());
}

template <class Norm, class Types, class Shape, bool FULL>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    row_norm_brief(const __grid_constant__ RowArgs args) {
    ptx::take_turn();
    static_assert(!Norm::kRowParameters, "parameters start at the same place for every row");
    using T = typename Types::T;
    using A = typename Types::A;
    using Statistics = typename Norm::template Statistics<A>;
    using Short = Brief<Shape, FULL>;

    const Place<Short> place(args);
    RowTile<T, Short> x(place);
    x.read(place.row_of(static_cast<const T*>(args.x)));
    if constexpr (Norm::kAdds) x.add(place.row_of(static_cast<const T*>(args.residual)));
    const RowParameters<Norm, Types, Short> parameters(args, RowIndex<Short>(args, 0), place);

    Conclusion<Statistics, A> row;
    const bool sound = examine_short_row(x, args.numbers, row);
    RowTile<T, Short> y = x;
    parameters.normalize(y, row.statistics);
    if (Team<Short>().any(!sound)) {
        start_again<Norm, Types, Shape>(args);
        return;
    }
    if constexpr (Norm::kAdds) x.write(place.row_of(static_cast<T*>(args.residual_out)));
    y.write(place.row_of(static_cast<T*>(args.y)));
    if (place.live && place.first == 0)
        store_statistics(args, place.row, row.statistics, A(1), row.unit);
}
