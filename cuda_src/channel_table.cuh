// Batch norm of short tables, (N, C) with few rows: every thread has a column, and waits for
// nobody.
//
//   table_norm      forward
//   table_gradient  backward
//
// Launch: grid = ceil(columns / kTableBlock), block = kTableBlock; at most ROWS rows, FULL: exactly
// so many; their number as the length of a run in Brief; 32 bits number all elements; rows of all
// arrays are as far apart; T is not double; small arrays are contiguous, of the types of Smalls,
// statistics of type A.
// Arrays: channel_args.cuh. Precision: arithmetic in A, each output rounded once; a column that
// leaves its range, or whose first rows lie far outside, is taken again in double.
#pragma once

#include "channel_brief.cuh"

constexpr int kTableBlock = 64;

// A column: zeros for rows that are not there.
template <typename T, int ROWS, bool FULL>
struct TableColumn {
    static constexpr int kVec = 1, kExactSum = sizeof(T) == 2 ? 8 : 0;
    using A = Accumulator<T>;

    unsigned rows;
    Pack<T, 1> held[ROWS];

    __device__ __forceinline__ TableColumn(const ChannelArgs& args, const void* array,
                                           unsigned column, unsigned step)
        : rows(args.brief.length.size) {
#pragma unroll
        for (unsigned i = 0; i < ROWS; ++i) {
            held[i] = {};
            if (has(i)) held[i] = load<1, 1>(static_cast<const T*>(array) + (i * step + column));
        }
    }
    __device__ __forceinline__ bool has(unsigned row) const { return FULL || row < rows; }
    __device__ __forceinline__ A operator[](int i) const {
        return widen<A>(part_of<T>(held[i], 0));
    }
    template <class F>
    __device__ __forceinline__ void for_each_pack(F f) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const A value[1] = {(*this)[i]};
            f(i, value);
        }
    }
    // A value near the mean, of the first rows; of values that are equal, that value.
    __device__ __forceinline__ A near_mean() const {
        const A quarters = (A(0.25) * (*this)[0] + A(0.25) * (*this)[1]) +
                           (A(0.25) * (*this)[2] + A(0.25) * (*this)[3]);
        return has(3) ? quarters : (*this)[0];
    }
    template <class F>
    __device__ __forceinline__ void write(void* to, unsigned column, unsigned step, F f) const {
#pragma unroll
        for (unsigned i = 0; i < ROWS; ++i)
            if (has(i)) static_cast<T*>(to)[i * step + column] = narrow<T>(f(i, (*this)[i]));
    }
};

template <typename T, int ROWS, bool FULL, typename A>
__device__ __forceinline__ A centre_of(const TableColumn<T, ROWS, FULL>& x, int row, A centre) {
    return x.has(row) ? centre : A(0);
}

// In double nothing leaves the range, and nothing is lost to an offset.
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

template <typename T, class Smalls, int ROWS, bool FULL>
__global__ void __launch_bounds__(kTableBlock)
    table_norm(const __grid_constant__ ChannelArgs args) {
    using A = Accumulator<T>;
    using Affine = BriefSmall<typename Smalls::P, false>;
    const unsigned column = blockIdx.x * kTableBlock + threadIdx.x;
    if (column >= args.brief.vectors) return;
    const TableColumn<T, ROWS, FULL> x(args, args.x, column, unsigned(args.brief.x_step));
    const Affine weight(args, kWeight, column), bias(args, kBias, column);
    const BriefRunning<T, Smalls> old(args, column);

    Findings<Centred<A>, A> found;
    found.scale = found.unit = A(1);
    found.centre = x.near_mean();
    found.record = Centred<A>::of_values(x, found.centre);
    found.statistics =
        Centred<A>::finish(found.record, args.numbers, found.centre, found.unit, found.verdict);
    const bool in_range = !NeedsRescue<T>::value && found.verdict == Verdict::kOutOfRange;
    if (found.verdict != Verdict::kSound && !in_range) {
        normalize_column_again<T, Smalls>(args, column);
        return;
    }
    const BriefResults<T, Smalls> results(args, found, old);
    const auto by =
        Coefficients<A>::of(found.statistics, A(1), weight.value(A(1)), bias.value(A(0)));
    x.write(args.y, column, unsigned(args.brief.x_step),
            [&](int, A value) { return by.apply(value); });
    results.store(args, column);
}
