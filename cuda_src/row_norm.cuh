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
// Launch: grid = ceil(rows / (ROWS * FOLD)) CTAs, or rows * CLUSTER; block = THREADS * ROWS; SHARED
// * block packs of dynamic shared memory. PACKS is the least that makes THREADS * CLUSTER * PACKS *
// VEC >= cols; VEC divides cols; every address is a multiple of ACCESS elements (at most 16 bytes).
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

// The rows of a thread: one exchange, unless squares leave the range of A or the first element lies
// far outside the row. Such rows are taken again, and with them, to the same bits, those that share
// their warp. `keep(f)` is called before row f is multiplied.
template <class Statistics, typename T, class Shape, class Keep, typename A = Accumulator<T>>
__device__ __forceinline__ void examine_rows(RowTile<T, Shape> (&x)[Shape::kFold],
                                             const Team<Shape>& team, const RowNumbers& numbers,
                                             Findings<Statistics, A> (&found)[Shape::kFold],
                                             Keep keep) {
    using Record = typename Statistics::Record;
    constexpr int kFold = Shape::kFold;
    const auto begin = [&](int f) { found[f].centre = Statistics::kCentred ? x[f].first : A(0); };
    const auto conclude = [&](Findings<Statistics, A>& row, const Record& record) {
        Conclusion<Statistics, A> made;
        made.unit = row.scale;
        made.statistics = Statistics::finish(record, numbers, row.centre, made.unit, made.verdict);
        if (!NeedsRescue<T>::value && made.verdict == Verdict::kOutOfRange)
            made.verdict = Verdict::kSound;
        row.record = record;
        return made;
    };
    const auto any = [&](Verdict least) {
        bool mine = false;
#pragma unroll
        for (int f = 0; f < kFold; ++f) mine |= found[f].verdict >= least;
        return team.any(mine);
    };

#pragma unroll
    for (int f = 0; f < kFold; ++f) {
        found[f].scale = A(1);
        begin(f);
    }
#pragma unroll 1
    for (int rest = 2;; --rest) {
        Record records[kFold];
#pragma unroll
        for (int f = 0; f < kFold; ++f) records[f] = Statistics::of_values(x[f], found[f].centre);
#pragma unroll
        for (int f = 0; f < kFold; ++f) {
            Findings<Statistics, A>& row = found[f];
            static_cast<Conclusion<Statistics, A>&>(row) = team.agree(
                records[f], Plus(), [&](const Record& record) { return conclude(row, record); });
        }
        if (!any(Verdict::kFarFromCentre) || rest == 0) return;
        team.settle();
        const bool rescue = NeedsRescue<T>::value && any(Verdict::kOutOfRange);
#pragma unroll
        for (int f = 0; f < kFold; ++f) {
            Findings<Statistics, A>& row = found[f];
            if (row.verdict == Verdict::kFarFromCentre) row.centre = row.statistics.centre();
            if constexpr (NeedsRescue<T>::value) {
                if (!rescue) continue;
                const A scale = team.agree(x[f].largest_magnitude(), Largest(), range_scale<A>);
                const bool first_time = scale != A(1) && row.scale == A(1);
                if (row.verdict == Verdict::kOutOfRange && first_time) {
                    keep(f);
                    x[f].multiply(scale);
                    row.scale = scale;
                    begin(f);
                }
                team.settle();
            }
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
                                         const Place<Shape>& place, RowTile<T, Shape>& x,
                                         size_t start = 0) {
    x.read(place, static_cast<const T*>(args.x) + index.of_array(args, kX), start);
    if constexpr (Norm::kAdds)
        x.add(static_cast<const T*>(args.residual) + index.of_array(args, kResidual), start);
}

// `place_of(f)`: where the thread stands in its row f.
template <class Norm, class Types, class Shape, class PlaceOf>
__device__ __forceinline__ void normalize_rows(const RowArgs& args, const Team<Shape>& team,
                                               PlaceOf place_of) {
    using T = typename Types::T;
    using A = typename Types::A;
    using Statistics = typename Norm::template Statistics<A>;
    constexpr int kFold = Shape::kFold;
    static_assert(kFold == 1 || !Norm::kRowParameters, "rows of a thread share their parameters");

    RowTile<T, Shape> x[kFold];
#pragma unroll
    for (int f = 0; f < kFold; ++f) {
        const Place<Shape> place = place_of(f);
        read_row<Norm>(args, RowIndex<Shape>(args, place.row), place, x[f]);
    }
    const RowParameters<Norm, Types, Shape> parameters(args, RowIndex<Shape>(args, x[0].place.row),
                                                       x[0].place);
    const auto keep_sum = [&](int f) {
        const RowIndex<Shape> index(args, x[f].place.row);
        if constexpr (Norm::kAdds)
            x[f].write(static_cast<T*>(args.residual_out) + index.of_array(args, kResidualOut));
    };

    Findings<Statistics, A> found[kFold];
    examine_rows(x, team, args.numbers, found, keep_sum);

#pragma unroll
    for (int f = 0; f < kFold; ++f) {
        const Place<Shape>& place = x[f].place;
        if (found[f].scale == A(1)) keep_sum(f);
        parameters.normalize(x[f], found[f].statistics);
        x[f].write(static_cast<T*>(args.y) + RowIndex<Shape>(args, place.row).of_array(args, kY));
        if (place.live && place.first == 0)
            store_statistics(args, place.row, found[f].statistics, found[f].scale, found[f].unit);
    }
}

// ROWS * FOLD rows a CTA.
template <class Norm, class Types, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    row_norm(const __grid_constant__ RowArgs args) {
    using Row = typename Place<Shape>::Row;
    constexpr int kTogether = Shape::kRows * Shape::kFold;
    normalize_rows<Norm, Types>(args, Team<Shape>(), [&](int f) {
        Row row = blockIdx.x;
        if constexpr (kTogether > 1)
            row = row * kTogether + f * Shape::kRows + threadIdx.x / Shape::kThreads;
        return Place<Shape>(args, row, 0);
    });
}

// One row a cluster: for rows that a CTA's registers cannot hold.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <class Norm, class Types, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    __cluster_dims__(Shape::kCluster, 1, 1) row_norm_cluster(const __grid_constant__ RowArgs args) {
    const Team<Shape> team;
    normalize_rows<Norm, Types>(args, team, [&](int) {
        return Place<Shape>(args, blockIdx.x / Shape::kCluster, team.rank * Shape::kThreads);
    });
}
#endif
