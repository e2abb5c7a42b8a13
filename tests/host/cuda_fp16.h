// The part of CUDA's header that the kernels use.
#pragma once

struct __half {
    _Float16 value;
};
struct alignas(4) __half2 {
    __half x, y;
};

static inline float __half2float(__half from) { return from.value; }
static inline __half __float2half_rn(float from) { return {_Float16(from)}; }
static inline __half2 __floats2half2_rn(float a, float b) {
    return {__float2half_rn(a), __float2half_rn(b)};
}
static inline float2 __half22float2(__half2 from) { return {from.x.value, from.y.value}; }
