// The part of CUDA's header that the kernels use.
#pragma once

struct __nv_bfloat16 {
    unsigned short bits;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

static inline float __bfloat162float(__nv_bfloat16 from) {
    return bit_cast<float>(unsigned(from.bits) << 16);
}
static inline __nv_bfloat16 __float2bfloat16_rn(float from) {
    if (from != from) return {0x7fff};
    const unsigned bits = bit_cast<unsigned>(from);
    return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16) % 2) >> 16)};
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
    return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)};
}
