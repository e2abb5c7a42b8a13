// Backward of the row norms: x and grad_out are read once, grad_x is written once.
//
//   y = f(xhat, parameters),  xhat = (x - mean) * rstd,  g = grad_out * df/dxhat
//   grad_x = rstd * (g - mean(g) - xhat * mean(g * xhat)) [+ grad_residual_out]
//
// where RMS norms have no mean. Gradients of parameters are written row by row, or summed over the
// rows that shared the parameter: a block of rows leaves a record, and records are added up
// afterwards (row_gradient_merge.cuh). No sum depends on who comes first.
//
//   x, grad_out, grad_residual_out, grad_x  (rows, cols)   T
//   parameters and their gradients          (cols,) or (rows, cols), by strides; each T or A
//   mean, rstd                              (rows,)        A
//
// A norm brings its mathematics:
//
//   struct LayerNormGradient {
//       static constexpr bool kCentred = true;     // takes a mean
//       // g, and what one element adds to the gradient of parameter SLOT
//       static A of_xhat(A grad, A p0, A p1, A p2);
//       template <int SLOT> static A term(A grad, A xhat, A p0, A p1, A p2);
//   };
//
// Launch: grid = groups * blocks * segments, block = THREADS * ROWS, dynamic shared memory for
// STAGES rows of each team and for the sums over rows. Where a row is cut into segments, its two
// sums come from row_gradient_sums and row_gradient_row_merge (row_gradient_segments.cuh).
//
// Precision: arithmetic in A; each output is rounded once to its stored type. Sums over rows: so
// many terms as a plain sum holds with an error far below that of the terms, then with their
// rounding errors.
#pragma once

#include "row_gradient_columns.cuh"
#include "row_gradient_team.cuh"

template <class Norm, class Types, class Shape, Part PART>
struct BlockGradient {
    using T = typename Types::T;
    using A = typename Types::A;
    using Slots = SummedSlots<Types>;
    static constexpr int kVec = Shape::kVec, kPacks = Shape::kPacks;
    static constexpr bool kSumsGiven = PART == Part::kSegmentGivenSums;
    static constexpr bool kAdds = !IsSame<typename Types::Residual, Constant<0>>::value;
    // A slot is free for the next row when it has been read, which may be early in the work.
    static constexpr bool kFreeEarly = Shape::kHold && !kAdds;

    using X = Input<Each<T>, A, Shape, 0>;
    using GradOut = Input<Each<T>, A, Shape, X::kEnd>;
    using Residual = Input<typename Types::Residual, A, Shape, GradOut::kEnd>;
    using First = Input<typename Types::P0, A, Shape, Residual::kEnd>;
    using Second = Input<typename Types::P1, A, Shape, First::kEnd>;
    using Third = Input<typename Types::P2, A, Shape, Second::kEnd>;
    static constexpr int kStageBytes = Third::kEnd;
    static_assert(Shape::kCombine || Shape::kRows == 1 || Slots::kCount == 0,
                  "rows of several teams are added up in shared memory");

    // Rows of one thread's part of the row in work.
    struct Values {
        A xhat[kPacks][kVec], g[kPacks][kVec];
    };
    struct Row {
        A mean, rstd, sum, product;  // the sums where they are given
    };

    const RowGradientArgs& args;
    const RowBlock<PART != Part::kWholeRow> block;
    const TeamPlace<Shape> place;
    X x;
    GradOut grad_out;
    Residual residual;
    First p0;
    Second p1;
    Third p2;
    ColumnSums<Types, Shape> sums;

    __device__ __forceinline__ explicit BlockGradient(const RowGradientArgs& args)
        : args(args),
          block(args),
          place(args.cols, block.segment),
          x(args.x),
          grad_out(args.grad_out),
          residual(args.grad_residual_out),
          p0(args.parameter[0]),
          p1(args.parameter[1]),
          p2(args.parameter[2]),
          sums(shared_memory() + Shape::kStages * kStageBytes) {}

    static __device__ __forceinline__ char* shared_memory() {
        extern __shared__ uint4 slots[];
        return reinterpret_cast<char*>(slots);
    }
    __device__ __forceinline__ long long first_row_of_group() const {
        return block.group == 0 ? 0 : block.group * args.members;
    }
    // Where a row that the whole group shares starts in this array.
    __device__ __forceinline__ long long of_group(int array) const {
        if (block.group == 0) return 0;
        return LeadingIndex<false>(args, first_row_of_group(), 0).by_steps(array);
    }
    // Parameters of the group, when the rows are on their way.
    __device__ __forceinline__ void read_columns() {
        if constexpr (IsColumn<typename Types::P0>::value) p0.begin(place, of_group(kOfParameter));
        if constexpr (IsColumn<typename Types::P1>::value)
            p1.begin(place, of_group(kOfParameter + 1));
        if constexpr (IsColumn<typename Types::P2>::value)
            p2.begin(place, of_group(kOfParameter + 2));
    }
    __device__ __forceinline__ const char* stage(unsigned turn) const {
        if constexpr (Shape::kStages == 0) return nullptr;
        return shared_memory() + turn * kStageBytes;
    }

    __device__ __forceinline__ RowCursor<Shape> first_row() const {
        return {args, place, first_row_of_group() + (block.begin + place.team)};
    }
    // Starts to read a row, if there is one.
    __device__ __forceinline__ void read(RowCursor<Shape>& cursor, bool any, const char* at) {
        if (any) {
            const auto index = cursor.here();
            x.read(place, index.of_array(kOfX), at);
            grad_out.read(place, index.of_array(kOfGradOut), at);
            if constexpr (kAdds) residual.read(place, index.of_array(kOfResidual), at);
            if constexpr (IsEach<typename Types::P0>::value)
                p0.read(place, index.of_array(kOfParameter), at);
            if constexpr (IsEach<typename Types::P1>::value)
                p1.read(place, index.of_array(kOfParameter + 1), at);
            if constexpr (IsEach<typename Types::P2>::value)
                p2.read(place, index.of_array(kOfParameter + 2), at);
        }
        cursor.advance();
        if constexpr (Shape::kStages > 0) ptx::copies_commit();
    }
    __device__ __forceinline__ Row read_statistics(long long number, bool any) const {
        Row row = {};
        if (any) {
            const LeadingIndex<Shape::kDense> index(args, number, 0);
            if constexpr (Norm::kCentred)
                row.mean = static_cast<const A*>(args.mean)[index.of_statistic(kOfMean)];
            row.rstd = static_cast<const A*>(args.rstd)[index.of_statistic(kOfRstd)];
            if constexpr (kSumsGiven) {
                const auto given = static_cast<const Moments<A>*>(args.sums)[number];
                row.sum = given.sum;
                row.product = given.squares;
            }
        }
        return row;
    }
    // Each lane of a team for one of its rows `later` than `row`, that of `turn`.
    __device__ __forceinline__ Row read_statistics_from(long long row, unsigned turn, unsigned own,
                                                        unsigned later = 0) const {
        later += opaque(threadIdx.x % Shape::kLanes);  // not before what is read first
        return read_statistics(row + (long long)(later)*args.row_step, turn + later < own);
    }
    static __device__ __forceinline__ Row row_of_lane(const Row& mine, unsigned lane) {
        const Lanes<Shape::kLanes> lanes;
        Row row = {};
        if constexpr (Norm::kCentred) row.mean = lanes.of(mine.mean, lane);
        row.rstd = lanes.of(mine.rstd, lane);
        if constexpr (kSumsGiven) {
            row.sum = lanes.of(mine.sum, lane);
            row.product = lanes.of(mine.product, lane);
        }
        return row;
    }

    // xhat and its gradient; `f` is given each element with its parameters.
    template <class F>
    __device__ __forceinline__ void differentiate(int i, const char* at, const Row& row,
                                                  A (&xhat)[kVec], A (&g)[kVec], F f) const {
        A grad[kVec], a[kVec], b[kVec], c[kVec];
        x.widened(i, at, xhat);
        grad_out.widened(i, at, grad);
        p0.widened(i, at, a);
        p1.widened(i, at, b);
        p2.widened(i, at, c);
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
            xhat[e] = (Norm::kCentred ? xhat[e] - row.mean : xhat[e]) * row.rstd;
            g[e] = Norm::of_xhat(grad[e], a[e], b[e], c[e]);
            f(e, grad[e], xhat[e], a[e], b[e], c[e]);
        }
    }

    // The gradient of a parameter that has a row for every row, or the sum over rows of one.
    template <int SLOT, class G>
    __device__ __forceinline__ void take_term(A (&terms)[kVec], int i, int e, A grad, A xhat, A a,
                                              A b, A c) {
        if constexpr (!IsSame<G, Absent>::value) {
            const A term = Norm::template term<SLOT>(grad, xhat, a, b, c);
            if constexpr (IsSummed<G>::value)
                sums.part[SLOT][i][e] += term;
            else
                terms[e] = term;
        }
    }
    template <int SLOT, class G>
    __device__ __forceinline__ void write_terms(const A (&terms)[kVec], int i, long long offset) {
        if constexpr (IsEach<G>::value) {
            using P = typename IsEach<G>::type;
            assign<Shape::kAccess, kVec>(
                static_cast<P*>(args.grad_parameter[SLOT]) + offset + place.beyond(i),
                narrowed<P>(terms));
        }
    }

    __device__ __forceinline__ Moments<A> take_row(const LeadingIndex<Shape::kDense>& index,
                                                   const char* at, const Row& row, Values& values) {
        using G0 = typename Types::G0;
        using G1 = typename Types::G1;
        using G2 = typename Types::G2;
        const long long of_term[3] = {IsEach<G0>::value ? index.of_array(kOfGradParameter) : 0,
                                      IsEach<G1>::value ? index.of_array(kOfGradParameter + 1) : 0,
                                      IsEach<G2>::value ? index.of_array(kOfGradParameter + 2) : 0};
        Moments<A> mine{A(0), A(0)};
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
            if (!place.holds(i)) continue;
            A terms[3][kVec];
            A(&xhat)[kVec] = values.xhat[i];
            A(&g)[kVec] = values.g[i];
            differentiate(i, at, row, xhat, g, [&](int e, A grad, A xhat, A a, A b, A c) {
                take_term<0, G0>(terms[0], i, e, grad, xhat, a, b, c);
                take_term<1, G1>(terms[1], i, e, grad, xhat, a, b, c);
                take_term<2, G2>(terms[2], i, e, grad, xhat, a, b, c);
            });
            write_terms<0, G0>(terms[0], i, of_term[0]);
            write_terms<1, G1>(terms[1], i, of_term[1]);
            write_terms<2, G2>(terms[2], i, of_term[2]);
            if constexpr (!kSumsGiven) {
                if constexpr (Norm::kCentred) mine.sum += plain_sum(g);
                A product[2] = {A(0), A(0)};
#pragma unroll
                for (int e = 0; e < kVec; ++e) product[e % 2] = fma(g[e], xhat[e], product[e % 2]);
                mine.squares += product[0] + product[1];
            }
        }
        return mine;
    }

    __device__ __forceinline__ void write_row(const LeadingIndex<Shape::kDense>& index,
                                              const char* at, const Row& row, Values& values) {
        T* const to = static_cast<T*>(args.grad_x) + index.of_array(kOfGradX);
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
            if (!place.holds(i)) continue;
            A(&xhat)[kVec] = values.xhat[i];
            A(&g)[kVec] = values.g[i];
            if constexpr (!Shape::kHold)
                differentiate(i, at, row, xhat, g, [](int, A, A, A, A, A) {});
            A added[kVec];
            residual.widened(i, at, added);
#pragma unroll
            for (int e = 0; e < kVec; ++e) {
                const A centred = Norm::kCentred ? g[e] - row.sum : g[e];
                const A inner = fma(-xhat[e], row.product, centred);
                g[e] = kAdds ? fma(inner, row.rstd, added[e]) : inner * row.rstd;
            }
            assign<Shape::kAccess, kVec>(to + place.beyond(i), narrowed<T>(g));
        }
    }

    // -- sums over rows ---------------------------------------------------------------------

    // What `value` says of each sum, if this thread has them, as the record of this block; with
    // what it holds already, if there is `more`.
    template <class F>
    __device__ __forceinline__ void write_record(bool more, F value) const {
#pragma unroll
        for (int slot = 0; slot < 3; ++slot) {
            if (!Slots::kSummed[slot]) continue;
            A* const to = static_cast<A*>(args.partial) + record(slot);
#pragma unroll
            for (int i = 0; i < kPacks; ++i) {
                if (!place.holds(i)) continue;
                A high[kVec] = {}, low[kVec] = {};
                if (more) {
                    widen_pack(load<kVec, kVec>(to + place.beyond(i)), high);
                    if (args.words > 1)
                        widen_pack(load<kVec, kVec>(to + args.cols + place.beyond(i)), low);
                }
#pragma unroll
                for (int e = 0; e < kVec; ++e) {
                    Pair<A> sum = value(slot, i, e);
                    if (more) sum = sums.with({high[e], low[e]}, sum);
                    high[e] = args.words == 1 ? sum.hi + sum.lo : sum.hi;
                    low[e] = sum.lo;
                }
                assign<kVec, kVec>(to + place.beyond(i), narrowed<A>(high));
                if (args.words > 1)
                    assign<kVec, kVec>(to + args.cols + place.beyond(i), narrowed<A>(low));
            }
        }
    }
    __device__ __forceinline__ long long record(int slot) const {
        const long long of_group = (long long)(block.group) * Slots::kCount + Slots::index(slot);
        return (of_group * args.blocks + block.index) * args.words * args.cols + place.column();
    }
    // One block has seen all rows of a group.
    template <class F>
    __device__ __forceinline__ void write_gradients(F value) const {
#pragma unroll
        for (int slot = 0; slot < 3; ++slot) {
            if (!Slots::kSummed[slot]) continue;
            void* const base = args.grad_parameter[slot];
            const long long start = of_group(kOfGradParameter + slot) + place.column();
#pragma unroll
            for (int i = 0; i < kPacks; ++i) {
                if (!place.holds(i)) continue;
                A total[kVec];
#pragma unroll
                for (int e = 0; e < kVec; ++e) {
                    const Pair<A> sum = value(slot, i, e);
                    total[e] = sum.hi + sum.lo;
                }
                const long long at = start + place.beyond(i);
                if (args.wide[slot])
                    assign<Shape::kAccess, kVec>(static_cast<A*>(base) + at, narrowed<A>(total));
                else
                    assign<Shape::kAccess, kVec>(static_cast<T*>(base) + at, narrowed<T>(total));
            }
        }
    }

    // `kept`: sums have left the registers before.
    __device__ __forceinline__ void finish(bool kept) {
        const auto plain = [&](int slot, int i, int e) {
            return Pair<A>{sums.part[slot][i][e], A(0)};
        };
        if constexpr (!Shape::kCombine) {
            leave(kept, plain);
        } else if (!kept && args.words == 1) {
            sums.gather_plain();
            if (threadIdx.x < Shape::kThreads) leave(false, plain);
        } else {
            sums.gather(!kept);
            if (threadIdx.x < Shape::kThreads)
                leave(false, [&](int slot, int i, int e) { return sums.total(slot, i, e); });
        }
    }
    template <class F>
    __device__ __forceinline__ void leave(bool more, F value) const {
        if (args.direct)
            write_gradients(value);
        else
            write_record(more, value);
    }

    // The two sums of a segment of one row.
    __device__ __forceinline__ Moments<A> sums_of_segment() {
        RowCursor<Shape> cursor = first_row();
        const auto index = cursor.here();
        read(cursor, true, stage(0));
        const Row row = read_statistics(index.row, true);
        read_columns();
        if constexpr (Shape::kStages > 0) ptx::copies_wait_but<0>();
        Values values;
        const Moments<A> mine = take_row(index, stage(0), row, values);
        return RowSums<Shape, A, Norm::kCentred>::over_team(mine, 0, 0);
    }

    __device__ __forceinline__ void run() {
        constexpr int kStages = Shape::kStages;
        constexpr unsigned kPlain = Shape::kCombine ? kPlainRows<T> : kRecordRows;
        // Rounds of the CTA, and those in which this team has a row.
        const unsigned rounds = (block.rows + Shape::kRows - 1) / Shape::kRows;
        const unsigned own = (block.rows + Shape::kRows - 1 - place.team) / Shape::kRows;
        RowCursor<Shape> now = first_row(), ahead = now;
#pragma unroll
        for (int s = 0; s < kStages; ++s) read(ahead, s < own, stage(s));
        Row of_lane = read_statistics_from(now.row, 0, own);
        read_columns();
        unsigned at_stage = 0, plain = 0;
        bool kept = false;
#pragma unroll 1
        for (unsigned turn = 0; turn < rounds; ++turn) {
            const bool live = turn < own;
            const char* const at = stage(at_stage);
            if constexpr (kStages == 0) read(ahead, live, at);
            if constexpr (kStages > 0) ptx::copies_wait_but<kStages - 1>();
            Row row = row_of_lane(of_lane, turn % Shape::kLanes);
            if ((turn + 1) % Shape::kLanes == 0)
                of_lane = read_statistics_from(now.row, turn, own, 1);
            const auto index = now.here();
            now.advance();
            Values values;
            Moments<A> record{A(0), A(0)};
            if (live) record = take_row(index, at, row, values);
            if constexpr (kStages > 0 && kFreeEarly) read(ahead, turn + kStages < own, at);
            if constexpr (!kSumsGiven) {
                record = RowSums<Shape, A, Norm::kCentred>::over_team(record, place.team, turn);
                row.sum = record.sum * inverse_count<A>(args);
                row.product = record.squares * inverse_count<A>(args);
            }
            if (live) write_row(index, at, row, values);
            if constexpr (kStages > 0 && !kFreeEarly) read(ahead, turn + kStages < own, at);
            if (++at_stage == kStages) at_stage = 0;
            if constexpr (Slots::kCount > 0) {
                if (++plain < kPlain || turn + 1 == rounds) continue;
                plain = 0;
                keep(kept);
                kept = true;
            }
        }
        if constexpr (Slots::kCount > 0) finish(kept);
    }
    // Sums in registers begin anew.
    __device__ __forceinline__ void keep(bool kept) {
        if constexpr (Shape::kCombine) {
            sums.keep(!kept);
        } else {
            write_record(
                kept, [&](int slot, int i, int e) { return Pair<A>{sums.part[slot][i][e], A(0)}; });
            sums.clear();
        }
    }
};

template <class Norm, class Types, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    row_gradient(const __grid_constant__ RowGradientArgs args) {
    ptx::take_turn();
    BlockGradient<Norm, Types, Shape, Part::kWholeRow>(args).run();
}
