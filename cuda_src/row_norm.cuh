// Row norms: every row of x is read once, kept in registers while its statistics settle, and
// written once.
//
//   x, residual, y, residual_out  (rows, cols)    T
//   parameters                    (cols,) or (rows, cols), by strides; each T, A, or absent
//   mean, rstd                    (rows,)         A, or null
//
// A norm brings its mathematics:
//
//   struct LayerNorm {
//       static constexpr bool kAdds;               // normalizes x + residual and stores the sum
//       static constexpr bool kRowParameters;      // parameters may differ from row to row
//       template <typename A> using Statistics;    // statistics.cuh
//       static A apply(A xhat, A p0, A p1, A p2);  // an element of y
//   };
//
// Launch: grid = ceil(rows / ROWS) CTAs, or rows * CLUSTER; block = THREADS * ROWS; dynamic shared
// memory for SHARED * block packs of x, or, where parameters are staged, for PACKS * block packs of
// each. PACKS is the least that makes THREADS * CLUSTER * PACKS * VEC >=
// cols; VEC divides cols; every address is a multiple of ACCESS elements (at most 16 bytes).
//
// Precision: arithmetic in A; each output is rounded once to its stored type.
#pragma once

#include "row_tile.cuh"

// The stored type of x and the types of the parameters.
template <typename T_, typename P0_, typename P1_, typename P2_>
struct Types {
    using T = T_;
    using A = Accumulator<T>;
    using P0 = P0_;
    using P1 = P1_;
    using P2 = P2_;
};

template <class Norm, class Types, class Shape>
struct RowParameters {
    using A = typename Types::A;
    using First = Parameter<typename Types::P0, A, Shape, 0>;
    using Second = Parameter<typename Types::P1, A, Shape, First::kEnd>;
    using Third = Parameter<typename Types::P2, A, Shape, Second::kEnd>;
    First p0;
    Second p1;
    Third p2;

    __device__ __forceinline__ RowParameters(const RowArgs& args, const RowIndex<Shape>& index,
                                             const Place<Shape>& place)
        : p0(place, args.parameter[0], offset(args, index, 0)),
          p1(place, args.parameter[1], offset(args, index, 1)),
          p2(place, args.parameter[2], offset(args, index, 2)) {}

    static __device__ __forceinline__ long long offset(const RowArgs& args,
                                                       const RowIndex<Shape>& index, int i) {
        return Norm::kRowParameters ? index.offset(args, kParameter + i) : 0;
    }

    // x becomes y. Nothing is stored before everything is loaded.
    template <class Statistics>
    __device__ __forceinline__ void normalize(RowTile<typename Types::T, Shape>& x,
                                              const Statistics& statistics) const {
        constexpr int kVec = Shape::kVec;
        if constexpr (Shape::kReading == kStaged) ptx::copies_wait();
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            if (!x.place.holds(i)) continue;
            A value[kVec], a[kVec], b[kVec], c[kVec];
            x.widened(i, value);
            p0.widened(i, a);
            p1.widened(i, b);
            p2.widened(i, c);
#pragma unroll
            for (int e = 0; e < kVec; ++e) {
                const A xhat = statistics.normalized(value[e]);
                value[e] = Norm::apply(xhat, a[e], b[e], c[e]);
            }
            x.set(i, narrowed<typename Types::T>(value));
        }
    }
};

// What the threads of a row agree on.
template <class Statistics, typename A>
struct Conclusion {
    Statistics statistics;
    A unit;
    Verdict verdict;
};

// And what else was found of it: that it was multiplied by `scale`, and, known to the first thread
// alone, the record, taken about `centre`.
template <class Statistics, typename A>
struct Findings : Conclusion<Statistics, A> {
    A scale, centre;
    typename Statistics::Record record;
};

// One exchange, unless squares leave the range of A or the first elements lie far outside the
// row: such rows are taken again, and with them, to the same bits, those that share their warp.
// `keep` is called before x is multiplied.
template <class Statistics, typename T, class Shape, class Keep, typename A = Accumulator<T>>
__device__ __forceinline__ Findings<Statistics, A> examine_row(RowTile<T, Shape>& x,
                                                               const Team<Shape>& team,
                                                               const RowNumbers& numbers,
                                                               Keep keep) {
    x.finish_packs();
    Findings<Statistics, A> found;
    found.scale = A(1);
    found.centre = Statistics::kCentred ? x.near : A(0);
    const auto conclude = [&](const typename Statistics::Record& record) {
        Conclusion<Statistics, A> row;
        row.unit = found.scale;
        row.statistics = Statistics::finish(record, numbers, found.centre, row.unit, row.verdict);
        if (!NeedsRescue<T>::value && row.verdict == Verdict::kOutOfRange)
            row.verdict = Verdict::kSound;
        found.record = record;
        return row;
    };
#pragma unroll 1
    for (int rest = 2;; --rest) {
        static_cast<Conclusion<Statistics, A>&>(found) =
            team.agree(Statistics::of_values(x, found.centre), Plus(), conclude);
        if (!team.any(found.verdict != Verdict::kSound) || rest == 0) return found;
        team.settle();
        if (found.verdict == Verdict::kFarFromCentre) found.centre = found.statistics.centre();
        if constexpr (NeedsRescue<T>::value) {
            if (!team.any(found.verdict == Verdict::kOutOfRange)) continue;
            const A scale = team.agree(x.largest_magnitude(), Largest(), range_scale<A>);
            if (found.verdict == Verdict::kOutOfRange && scale != A(1) && found.scale == A(1)) {
                keep();
                x.multiply(scale);
                found.scale = scale;
                found.centre = Statistics::kCentred ? x.near : A(0);
            }
            team.settle();
        }
    }
}

template <typename A>
__device__ __forceinline__ void store_statistics(const RowArgs& args, long long row,
                                                 const Centred<A>& statistics, A scale, A unit) {
    if (args.mean)
        static_cast<A*>(args.mean)[row] =
            (statistics.mean.hi + statistics.mean.lo) * inverse_scale(scale);
    if (args.rstd) static_cast<A*>(args.rstd)[row] = statistics.rstd * unit;
}
template <typename A>
__device__ __forceinline__ void store_statistics(const RowArgs& args, long long row,
                                                 const MeanSquare<A>& statistics, A, A unit) {
    if (args.rstd) static_cast<A*>(args.rstd)[row] = statistics.rstd * unit;
}

// The tile of x, or of x + residual.
template <class Norm, typename T, class Shape>
__device__ __forceinline__ void read_row(const RowArgs& args, const RowIndex<Shape>& index,
                                         RowTile<T, Shape>& x, size_t start = 0) {
    x.read(static_cast<const T*>(args.x) + index.of_array(args, kX), start);
    if constexpr (Norm::kAdds)
        x.add(static_cast<const T*>(args.residual) + index.of_array(args, kResidual), start);
}

template <class Norm, class Types, class Shape>
__device__ __forceinline__ void normalize_row(const RowArgs& args, const Place<Shape>& place,
                                              const Team<Shape>& team) {
    using T = typename Types::T;
    using A = typename Types::A;
    using Statistics = typename Norm::template Statistics<A>;

    const RowIndex<Shape> index(args, place.row);
    RowTile<T, Shape> x(place);
    read_row<Norm>(args, index, x);
    const RowParameters<Norm, Types, Shape> parameters(args, index, place);
    T* const y = static_cast<T*>(args.y) + index.of_array(args, kY);
    T* const sum = static_cast<T*>(args.residual_out) + index.of_array(args, kResidualOut);
    const auto keep_sum = [&] {
        if constexpr (Norm::kAdds) x.write_by_elements(sum);
    };

    const auto found = examine_row<Statistics>(x, team, args.numbers, keep_sum);

    if (Norm::kAdds && found.scale == A(1)) x.write(sum);
    parameters.normalize(x, found.statistics);
    x.write(y);
    if (place.live && place.first == 0)
        store_statistics(args, place.row, found.statistics, found.scale, found.unit);
}

// ROWS rows a CTA.
template <class Norm, class Types, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    row_norm(const __grid_constant__ RowArgs args) {
    ptx::take_turn();
    using Row = typename Place<Shape>::Row;
    const Row row = Shape::kRows == 1
                        ? blockIdx.x
                        : Row(blockIdx.x) * Shape::kRows + threadIdx.x / Shape::kThreads;
    normalize_row<Norm, Types>(args, Place<Shape>(args, row, 0), Team<Shape>());
}

// One row a cluster: for rows that a CTA's registers cannot hold.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <class Norm, class Types, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    __cluster_dims__(Shape::kCluster, 1, 1) row_norm_cluster(const __grid_constant__ RowArgs args) {
    ptx::take_turn();
    const Team<Shape> team;
    const Place<Shape> place(args, blockIdx.x / Shape::kCluster, team.rank * Shape::kThreads);
    normalize_row<Norm, Types>(args, place, team);
}
#endif
