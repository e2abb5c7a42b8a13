// Batch norm of short tables, (N, C) with few rows: a column has one lane, or several neighbours of
// a warp, each with every so many rows.
//
//   table_norm      forward
//   table_gradient  backward
//
// Launch: block = kTableBlock, LANES of them for a column, grid = ceil(columns * LANES / block); at
// most ROWS rows, FULL: exactly so many; their number as the length of a run in Brief; 32 bits
// number all elements; rows of all arrays are as far apart; T is not double; small arrays are
// contiguous, of the types of Smalls, statistics of type A.
//
// Arrays: channel_args.cuh. Precision: arithmetic in A, each output rounded once; a column that
// leaves its range, or whose first rows lie far outside, is taken again in double.
#pragma once

#include "channel_brief.cuh"

constexpr int kTableBlock = 128;
// CTAs of an SM. The compiler takes the registers that it may, and asks for everything at first:
// left to itself it takes 40, and asks for running statistics when the sums are known.
template <int LANES>
constexpr int kTableCtas = LANES == 1 ? 4 : 8;

// Which column this thread has rows of. Past the last one: the last one again, for nobody.
template <int LANES>
struct TablePlace {
    unsigned column, row;  // row: the first
    bool live;

    __device__ __forceinline__ explicit TablePlace(const ChannelArgs& args)
        : column((blockIdx.x * kTableBlock + threadIdx.x) / LANES), row(threadIdx.x % LANES) {
        live = column < args.brief.vectors;
        if (!live) column = args.brief.vectors - 1;
    }
    // Whether it is the one that speaks for its column.
    __device__ __forceinline__ bool speaks() const { return live && row == 0; }
};

// What the lanes of a column have, added up. One sum after the other: that takes two exchanges,
// not three, and here shuffles are not scarce.
template <int LANES, typename V>
__device__ __forceinline__ Moments<V> sum_of_column(const Moments<V>& mine) {
    const Lanes<LANES> lanes;
    return {lanes.combined(mine.sum, Plus()), lanes.combined(mine.squares, Plus())};
}

// This thread's rows of a column: zeros for those that are not there.
template <typename T, int ROWS, bool FULL, int LANES>
struct TableColumn {
    static constexpr int kVec = 1, kExactSum = sizeof(T) == 2 ? 8 : 0;
    static constexpr int kHeld = ROWS / LANES;
    using A = Accumulator<T>;

    const TablePlace<LANES>& place;
    unsigned rows;  // of the table
    Pack<T, 1> held[kHeld];

    __device__ __forceinline__ TableColumn(const ChannelArgs& args, const TablePlace<LANES>& place,
                                           const void* array, unsigned step)
        : place(place), rows(args.brief.length.size) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            held[i] = {};
            if (has(i)) held[i] = load<1, 1>(static_cast<const T*>(array) + offset(i, step));
        }
    }
    __device__ __forceinline__ bool has(int i) const {
        return FULL || place.row + i * LANES < rows;
    }
    __device__ __forceinline__ unsigned offset(int i, unsigned step) const {
        return (place.row * step + place.column) + i * (LANES * step);
    }
    __device__ __forceinline__ A operator[](int i) const {
        return widen<A>(part_of<T>(held[i], 0));
    }
    template <class F>
    __device__ __forceinline__ void for_each_pack(F f) const {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const A value[1] = {(*this)[i]};
            f(i, value);
        }
    }
    // A value near the mean, of the first rows; of values that are equal, that value.
    __device__ __forceinline__ A near_mean() const {
        constexpr int kEach = 4 / LANES;
        const Lanes<LANES> lanes;
        A quarter[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) quarter[i] = A(0.25) * (*this)[i];
        const A quarters = lanes.combined(plain_sum(quarter), Plus());
        return FULL || rows >= 4 ? quarters : lanes.of((*this)[0], 0);
    }
    template <class F>
    __device__ __forceinline__ void write(void* to, unsigned step, F f) const {
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            if (place.live && has(i))
                static_cast<T*>(to)[offset(i, step)] = narrow<T>(f(i, (*this)[i]));
    }
};

template <typename T, int ROWS, bool FULL, int LANES, typename A>
__device__ __forceinline__ A centre_of(const TableColumn<T, ROWS, FULL, LANES>& x, int i,
                                       A centre) {
    return x.has(i) ? centre : A(0);
}

// By one thread. In double nothing leaves the range, and nothing is lost to an offset.
template <typename T, class Smalls>
__device__ __noinline__ void normalize_column_again(const ChannelArgs& args, unsigned column) {
    using A = Accumulator<T>;
    using P = typename Smalls::P;
    using Affine = BriefSmall<P, false>;
    const T* const x = static_cast<const T*>(args.x) + column;
    T* const y = static_cast<T*>(args.y) + column;
    const long long step = args.brief.x_step;
    const RowNumbers& numbers = args.numbers;
    const double weight = Affine(args, kWeight, column).value(A(1));
    const double bias = Affine(args, kBias, column).value(A(0));
    const BriefRunning<T, Smalls> old(args, column);
    double sum = 0, squares = 0;
    for (long long i = 0; i < args.runs; ++i) sum += widen<A>(x[i * step]);
    const double mean = quotient(sum, numbers.count, numbers.inverse);
    for (long long i = 0; i < args.runs; ++i) {
        const double distance = widen<A>(x[i * step]) - mean;
        squares = fma(distance, distance, squares);
    }
    const double rstd = inverse_deviation(squares, numbers, 1.0);
    for (long long i = 0; i < args.runs; ++i)
        y[i * step] = narrow<T>(A(fma(double(widen<A>(x[i * step])) - mean, rstd * weight, bias)));
    if (args.mean_out) static_cast<A*>(args.mean_out)[column] = A(mean);
    if (args.rstd_out) static_cast<A*>(args.rstd_out)[column] = A(rstd);
    if constexpr (BriefRunning<T, Smalls>::Old::kGiven) {
        using Results = BriefResults<T, Smalls>;
        using R = typename Smalls::R;
        static_cast<R*>(args.small[kRunningMean])[column] =
            narrow<R>(Results::moved(args, old.mean.value(A(0)), mean));
        static_cast<R*>(args.small[kRunningVar])[column] =
            narrow<R>(Results::moved(args, old.variance.value(A(0)), squares * args.unbiased));
    }
}

template <typename T, class Smalls, int ROWS, bool FULL, int LANES>
__global__ void __launch_bounds__(kTableBlock, kTableCtas<LANES>)
    table_norm(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    using Affine = BriefSmall<typename Smalls::P, false>;
    const TablePlace<LANES> place(args);
    const unsigned step = unsigned(args.brief.x_step);
    const TableColumn<T, ROWS, FULL, LANES> x(args, place, args.x, step);
    const Affine weight(args, kWeight, place.column), bias(args, kBias, place.column);
    const BriefRunning<T, Smalls> old(args, place.column);

    // All lanes of a column find the same.
    Findings<Centred<A>, A> found;
    found.scale = found.unit = A(1);
    found.centre = x.near_mean();
    found.record = sum_of_column<LANES>(Centred<A>::of_values(x, found.centre));
    found.statistics =
        Centred<A>::finish(found.record, args.numbers, found.centre, found.unit, found.verdict);
    const bool in_range = !NeedsRescue<T>::value && found.verdict == Verdict::kOutOfRange;
    if (found.verdict != Verdict::kSound && !in_range) {
        if (place.speaks()) normalize_column_again<T, Smalls>(args, place.column);
        return;
    }
    const BriefResults<T, Smalls> results(args, found, old);
    const auto by =
        Coefficients<A>::of(found.statistics, A(1), weight.value(A(1)), bias.value(A(0)));
    x.write(args.y, step, [&](int, A value) { return by.apply(value); });
    if (place.speaks()) results.store(args, place.column);
}
