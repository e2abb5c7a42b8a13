// Number types: what a stored type accumulates in, conversions, and the limits that decide
// when a row has to be rescaled.
//
// Stored types T: __half, __nv_bfloat16, float, double. Accumulation types A: float, and
// double for double.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T>
struct AccumulateIn {
    using type = float;
};
template <>
struct AccumulateIn<double> {
    using type = double;
};
template <typename T>
using Accumulator = typename AccumulateIn<T>::type;

template <typename A>
__device__ __forceinline__ A widen(__half value) {
    return __half2float(value);
}
template <typename A>
__device__ __forceinline__ A widen(__nv_bfloat16 value) {
    return __bfloat162float(value);
}
template <typename A>
__device__ __forceinline__ A widen(float value) {
    return value;
}
template <typename A>
__device__ __forceinline__ A widen(double value) {
    return value;
}

// Two neighbours in one word. A bfloat16 is the upper half of its float.
template <typename T>
__device__ float2 widened2(unsigned word);
template <>
__device__ __forceinline__ float2 widened2<__half>(unsigned word) {
    __half2 two;
    memcpy(&two, &word, sizeof(two));
    return __half22float2(two);
}
template <>
__device__ __forceinline__ float2 widened2<__nv_bfloat16>(unsigned word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}

// Two neighbours are narrowed by one instruction where the hardware has it.
template <typename T>
__device__ auto narrowed2(float a, float b);
template <>
__device__ __forceinline__ auto narrowed2<__half>(float a, float b) {
    return __floats2half2_rn(a, b);
}
template <>
__device__ __forceinline__ auto narrowed2<__nv_bfloat16>(float a, float b) {
    return __floats2bfloat162_rn(a, b);
}
template <typename T, typename A>
__device__ __forceinline__ T narrow(A value) {
    return value;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float value) {
    return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// Within an ulp: the hardware's estimate, off by two, and a Newton step. Infinity has its own
// answer, since the step would multiply it by 0.
__device__ __forceinline__ float reciprocal_sqrt(float value) {
    const float near = rsqrtf(value);
    const float better = fma(0.5f * near, fma(-value * near, near, 1.0f), near);
    return near == 0.0f ? near : better;
}
__device__ __forceinline__ double reciprocal_sqrt(double value) { return 1.0 / sqrt(value); }

// Can a sum of squares of T leave the range of its accumulator? Not for __half: 65504^2 and
// the square of its smallest subnormal both fit in float with room for 2^31 terms.
template <typename T>
struct NeedsRescue {
    static constexpr bool value = true;
};
template <>
struct NeedsRescue<__half> {
    static constexpr bool value = false;
};

// Sums of squares above kLargest have overflowed; below kTiny they may have lost terms to
// underflow, which matters only when eps is below kSmallEps too (in practice: eps = 0).
// A power of two that brings the row back between them repairs both.
template <typename A>
struct Range;

template <>
struct Range<float> {
    using Bits = int;
    static constexpr float kLargest = 0x1p+126f, kTiny = 0x1p-70f, kSmallEps = 0x1p-90f;
    static constexpr int kMantissaBits = 23, kMaxExponent = 255, kBias = 127, kLargestScale = 100;
    static constexpr int kHeadroom = 46;  // 2^31 squares of 2^(kHeadroom + 1) stay below kLargest
    static __device__ Bits magnitude_bits(float value) { return __float_as_int(fabsf(value)); }
    static __device__ float from_bits(Bits bits) { return __int_as_float(bits); }
};

template <>
struct Range<double> {
    using Bits = long long;
    static constexpr double kLargest = 0x1p+1020, kTiny = 0x1p-800, kSmallEps = 0x1p-900;
    static constexpr int kMantissaBits = 52, kMaxExponent = 2047, kBias = 1023, kLargestScale = 950;
    static constexpr int kHeadroom = 480;
    static __device__ Bits magnitude_bits(double value) {
        return __double_as_longlong(fabs(value));
    }
    static __device__ double from_bits(Bits bits) { return __longlong_as_double(bits); }
};

// A positive number as a power of two, by which nothing is rounded, and a factor from 1 to 2.
template <typename A>
struct Factored {
    A power, factor;

    __device__ __forceinline__ explicit Factored(A value) {
        using R = Range<A>;
        constexpr typename R::Bits kMantissa = (typename R::Bits(1) << R::kMantissaBits) - 1;
        const typename R::Bits bits = R::magnitude_bits(value);
        const int exponent = static_cast<int>(bits >> R::kMantissaBits);
        const bool normal = exponent > 0 && exponent < R::kMaxExponent;
        power = normal ? R::from_bits(bits & ~kMantissa) : value;
        factor = normal ? R::from_bits((bits & kMantissa) |
                                       (typename R::Bits(R::kBias) << R::kMantissaBits))
                        : A(1);
    }
};

template <typename A, typename V>
__device__ __forceinline__ bool in_range(V sum_of_squares, A eps) {
    using R = Range<A>;
    return sum_of_squares < R::kLargest && (sum_of_squares >= R::kTiny || eps >= R::kSmallEps);
}

// The power of two for a row whose largest magnitude has these bits; 1 for Inf and NaN. Tiny rows
// are brought to [1, 2). Huge ones stay as large as their squares may be: what is small beside the
// largest keeps its digits. Multiplying is exact. Zero takes the largest scale, so that it never
// decides a minimum.
template <typename A>
__device__ __forceinline__ A range_scale(typename Range<A>::Bits bits) {
    using R = Range<A>;
    const int exponent = static_cast<int>(bits >> R::kMantissaBits);
    if (exponent == R::kMaxExponent) return A(1);
    const int aim = exponent > R::kBias ? R::kHeadroom : 0;
    const int inverse = min(max(2 * R::kBias + aim - exponent, 1), R::kBias + R::kLargestScale);
    return R::from_bits(static_cast<typename R::Bits>(inverse) << R::kMantissaBits);
}

// 1 / scale for such a power of two.
template <typename A>
__device__ __forceinline__ A inverse_scale(A scale) {
    using R = Range<A>;
    const auto twice_bias = static_cast<typename R::Bits>(2 * R::kBias) << R::kMantissaBits;
    return R::from_bits(twice_bias - R::magnitude_bits(scale));
}
