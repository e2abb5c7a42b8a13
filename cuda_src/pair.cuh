// Sums that keep their rounding errors.
//
// Pair<A>: an unevaluated sum hi + lo with twice the digits of A.
// Wide<A>: what threads exchange; double for float, Pair<double> for double.
//
// Knuth, The Art of Computer Programming 2, 4.2.2 (two_sum); Dekker, Numer. Math. 18 (1971);
// Markstein, IBM J. Res. Dev. 34 (1990) (quotients).
#pragma once

template <typename A>
struct Pair {
    A hi, lo;

    __device__ __forceinline__ void add(A value) {
        const A sum = hi + value;
        const A shown = sum - hi;
        lo += (hi - (sum - shown)) + (value - shown);
        hi = sum;
    }
};

template <typename A>
__device__ __forceinline__ Pair<A> operator*(Pair<A> sum, A factor) {
    const A high = sum.hi * factor;
    return {high, fma(sum.hi, factor, -high) + sum.lo * factor};
}

// Needs |big| >= |small| or big == 0.
template <typename A>
__device__ __forceinline__ Pair<A> fast_two_sum(A big, A small) {
    const A sum = big + small;
    return {sum, small - (sum - big)};
}

// Symmetric in its arguments to the last bit: lanes that exchange and add agree.
template <typename A>
__device__ __forceinline__ Pair<A> operator+(Pair<A> a, Pair<A> b) {
    Pair<A> sum{a.hi, a.lo + b.lo};
    sum.add(b.hi);
    return fast_two_sum(sum.hi, sum.lo);
}

template <typename A>
__device__ __forceinline__ Pair<A> operator*(Pair<A> a, Pair<A> b) {
    const A high = a.hi * b.hi;
    return fast_two_sum(high, fma(a.hi, b.hi, -high) + (a.hi * b.lo + a.lo * b.hi));
}

template <typename A>
struct WideOf {
    using type = Pair<A>;
};
template <>
struct WideOf<float> {
    using type = double;
};
template <typename A>
using Wide = typename WideOf<A>::type;

__device__ __forceinline__ double wide(float value) { return value; }
__device__ __forceinline__ Pair<double> wide(double value) { return {value, 0.0}; }
__device__ __forceinline__ double wide(Pair<float> sum) { return double(sum.hi) + sum.lo; }
__device__ __forceinline__ Pair<double> wide(Pair<double> sum) {
    return fast_two_sum(sum.hi, sum.lo);
}

__device__ __forceinline__ double leading(double value) { return value; }
__device__ __forceinline__ double leading(Pair<double> value) { return value.hi; }

// As two numbers of type A, the first of which is the value rounded to A: were it cut, an element
// next to it could cancel against the second. By its bits: no conversion there and back.
template <typename A>
__device__ __forceinline__ Pair<A> split(double value) {
    if constexpr (sizeof(A) == sizeof(double)) return {value, 0.0};
    constexpr long long kBelow = 0x1fffffff;  // what a double has below the digits of a float
    const long long rounded = (__double_as_longlong(value) + (kBelow + 1) / 2) & ~kBelow;
    const double high = __longlong_as_double(rounded);
    return {A(high), A(value - high)};
}
template <typename A>
__device__ __forceinline__ Pair<A> split(Pair<double> value) {
    return value;
}

// sum / count, given 1 / count rounded to double: correctly rounded, so that the mean of equal
// values is that value.
__device__ __forceinline__ double quotient(double sum, double count, double inverse) {
    const double near = sum * inverse;
    return fma(fma(-count, near, sum), inverse, near);
}
__device__ __forceinline__ Pair<double> quotient(Pair<double> sum, double count, double inverse) {
    const double high = quotient(sum.hi, count, inverse);
    return fast_two_sum(high, quotient(fma(-count, high, sum.hi) + sum.lo, count, inverse));
}

// squares - count * distance^2
__device__ __forceinline__ double less_squares(double squares, double count, double distance) {
    return fma(-count * distance, distance, squares);
}
__device__ __forceinline__ double less_squares(Pair<double> squares, double count,
                                               Pair<double> distance) {
    const Pair<double> moved = distance * distance * Pair<double>{-count, 0.0};
    return (squares + moved).hi;
}
