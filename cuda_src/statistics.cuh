// Statistics of a row, taken from values in registers.
//
//   Record      what a group of values adds up to; the sum of records is that of a larger group
//   of_values   the record of the values that a thread holds
//   finish      what the row is normalized with, and whether it may be trusted
//   normalized  (value - mean) * rstd
//
// `scale` is a power of two, 1 but for rows whose squares leave the range of A (numbers.cuh):
// such a row has been multiplied by it, and eps is brought to its units. `unit`: what rstd is to
// be multiplied by to be that of the row as it was.
#pragma once

#include "team.cuh"

enum class Verdict { kSound, kOutOfRange, kFarFromCentre };

// Of the row: how many elements, 1 over that, and eps; also rounded to float.
struct RowNumbers {
    double count, inverse, eps;
    float inverse32, eps32;
};

template <typename A>
__device__ __forceinline__ A eps_of(const RowNumbers& row) {
    return row.eps;
}
template <>
__device__ __forceinline__ float eps_of<float>(const RowNumbers& row) {
    return row.eps32;
}

// 1 / sqrt(squares / n + eps); 0 where both vanish, so that a row without spread gives its bias.
__device__ __forceinline__ double inverse_deviation(double squares, const RowNumbers& row,
                                                    double scale) {
    const double inside = fma(squares, row.inverse, row.eps * scale * scale);
    return inside == 0.0 ? 0.0 : reciprocal_sqrt(inside);
}
__device__ __forceinline__ float inverse_deviation(float squares, const RowNumbers& row,
                                                   float scale) {
    const float inside = fma(squares, row.inverse32, row.eps32 * scale * scale);
    const float root = reciprocal_sqrt(inside);  // beforehand: no branch
    return inside == 0.0f ? 0.0f : root;
}

// Of the VEC values of a pack, as a tree.
template <typename A, int COUNT>
__device__ __forceinline__ A plain_sum(const A (&x)[COUNT]) {
    A sum[COUNT];
#pragma unroll
    for (int e = 0; e < COUNT; ++e) sum[e] = x[e];
#pragma unroll
    for (int half = COUNT / 2; half > 0; half /= 2) {
#pragma unroll
        for (int e = 0; e < half; ++e) sum[e] += sum[e + half];
    }
    return sum[0];
}

// What the values of a pack are taken about; 0 where a pack is 0 for want of values.
template <class Values, typename A>
__device__ __forceinline__ A centre_of(const Values&, int, A centre) {
    return centre;
}

// Whether some elements of a pack may be 0 for want of values; then what says whether one is.
template <class Values>
__device__ __forceinline__ bool may_lack(const Values&, int) {
    return false;
}
template <class Values>
__device__ __forceinline__ auto missing_of(const Values&, int) {
    return [](unsigned) { return false; };
}

// mean = sum(x) / n,  variance = sum((x - mean)^2) / n.
//
// One reduction gives both: sum(x), kept with its rounding errors, and sum((x - c)^2) about a
// centre c that is known beforehand, the average of a few elements. Then
//
//   sum((x - mean)^2) = sum((x - c)^2) - n (c - mean)^2
//
// loses digits only where c lies far outside the row's spread; such a row is taken again about
// its mean. The mean is a pair: as one number of type A it is off by half its last digit, which
// for an offset far above the spread is most of what the subtraction leaves.
template <typename A>
struct Centred {
    static constexpr bool kCentred = true;
    static constexpr double kFar = 8;  // costs three bits of a sum that has as many to spare

    using Record = Moments<Wide<A>>;

    Pair<A> mean;
    A rstd;
    A offset;  // -mean.lo * rstd

    template <class Values>
    static __device__ __forceinline__ Record of_values(const Values& values, A centre) {
        // Between two additions to the pair: as many values as a plain sum holds exactly.
        constexpr int kVec = Values::kVec, kTogether = Values::kExactSum / kVec;
        Pair<A> sum{A(0), A(0)};
        A part = 0, squares[2] = {};  // two chains: additions need not wait for each other
        values.for_each_pack([&](int i, const A(&x)[kVec]) {
            const A about = centre_of(values, i, centre);
            if constexpr (kTogether > 0) {
                part = i % kTogether == 0 ? plain_sum(x) : part + plain_sum(x);
                if (i % kTogether == kTogether - 1) {
                    if (i < kTogether)
                        sum.hi = part;
                    else
                        sum.add(part);
                    part = 0;
                }
            }
            const auto add = [&](auto missing) {
#pragma unroll
                for (int e = 0; e < kVec; ++e) {
                    if constexpr (kTogether == 0) {
                        if (i + e == 0)
                            sum.hi = x[e];
                        else
                            sum.add(x[e]);
                    }
                    const int chain = kVec > 1 ? e % 2 : i % 2;
                    const A distance = missing(e) ? A(0) : x[e] - about;
                    squares[chain] = fma(distance, distance, squares[chain]);
                }
            };
            if (may_lack(values, i))
                add(missing_of(values, i));
            else
                add([](unsigned) { return false; });
        });
        if constexpr (kTogether > 1) sum.add(part);
        return {wide(sum), wide(squares[0] + squares[1])};
    }

    // The mean in full, and the sum of squares about it.
    static __device__ __forceinline__ Wide<A> mean_of(Record row, double count, double inverse) {
        return quotient(row.sum, count, inverse);
    }
    static __device__ __forceinline__ double spread(Record row, Wide<A> mean, A centre,
                                                    double count) {
        const Wide<A> distance = mean + wide(-centre);
        const double squares = less_squares(row.squares, count, distance);
        return squares < 0.0 ? 0.0 : squares;  // rounding; NaN stays
    }

    // A row without spread is its mean, and its rstd is that of eps in plain units: eps would
    // vanish in those of a huge row.
    static __device__ __forceinline__ Centred of_moments(Pair<A> mean, double squares,
                                                         const RowNumbers& row, A& unit) {
        if (squares == 0.0) {
            mean.lo = A(0);
            unit = A(1);
        }
        const A rstd = inverse_deviation(A(squares), row, unit);
        return {mean, rstd, -mean.lo * rstd};
    }

    static __device__ __forceinline__ Centred finish(Record record, const RowNumbers& row, A centre,
                                                     A& unit, Verdict& verdict) {
        const Wide<A> mean = mean_of(record, row.count, row.inverse);
        const double squares = spread(record, mean, centre, row.count);
        // Compared as doubles: a conversion takes the time of four comparisons. NaN here: a sum
        // left the range of A, if not the row itself.
        const double about_centre = leading(record.squares);
        const bool kept = squares >= 0.0 && in_range<A>(about_centre, eps_of<A>(row));
        verdict = !kept                           ? Verdict::kOutOfRange
                  : about_centre > kFar * squares ? Verdict::kFarFromCentre
                                                  : Verdict::kSound;
        return of_moments(split<A>(mean), squares, row, unit);
    }

    __device__ __forceinline__ A centre() const { return mean.hi; }

    // value - mean.hi rounds relative to itself, and |mean.lo| is no larger.
    __device__ __forceinline__ A normalized(A value) const {
        return fma(value - mean.hi, rstd, offset);
    }
};

// mean of squares = sum(x^2) / n; nothing is subtracted.
template <typename A>
struct MeanSquare {
    static constexpr bool kCentred = false;

    using Record = A;  // the sum of squares

    A rstd;

    template <class Values>
    static __device__ __forceinline__ Record of_values(const Values& values, A) {
        A squares[2] = {};
        values.for_each_pack([&](int i, const A(&x)[Values::kVec]) {
#pragma unroll
            for (int e = 0; e < Values::kVec; ++e) {
                const int chain = Values::kVec > 1 ? e % 2 : i % 2;
                squares[chain] = fma(x[e], x[e], squares[chain]);
            }
        });
        return squares[0] + squares[1];
    }

    static __device__ __forceinline__ MeanSquare finish(Record squares, const RowNumbers& row, A,
                                                        A unit, Verdict& verdict) {
        verdict = in_range<A>(squares, eps_of<A>(row)) ? Verdict::kSound : Verdict::kOutOfRange;
        return {inverse_deviation(squares, row, unit)};
    }

    __device__ __forceinline__ A centre() const { return A(0); }

    __device__ __forceinline__ A normalized(A value) const { return value * rstd; }
};
