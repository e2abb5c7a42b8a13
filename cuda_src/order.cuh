// CTAs of one launch that hand results to later ones.
//
// A CTA takes its place in the order of work when it starts to run. It waits only for CTAs before
// it that wait for nobody: they are running already, so all of them end, however many CTAs fit
// the GPU and whatever else it runs.
#pragma once

namespace order {

// Added to a count of arrivals by who leaves before all have arrived.
constexpr unsigned kLeave = 1u << 16;

// The next place. One thread of a CTA asks.
__device__ __forceinline__ unsigned take(unsigned* next) { return atomicAdd(next, 1u); }

// Says that what this thread wrote may be read; how many had said so before.
__device__ __forceinline__ unsigned arrive(unsigned* arrived, unsigned count = 1) {
    __threadfence();
    const unsigned before = atomicAdd(arrived, count);
    __threadfence();
    return before;
}

// Whether the word held `from`; then it holds `to`.
__device__ __forceinline__ bool replace(unsigned* word, unsigned from, unsigned to) {
    return atomicCAS(word, from, to) == from;
}

// Returns when `wanted` have arrived.
__device__ __forceinline__ void wait_for(const unsigned* arrived, unsigned wanted) {
    for (;;) {
        unsigned found;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(arrived) : "memory");
        if (found >= wanted) return;
        __nanosleep(100);
    }
}

// Whether `wanted` have arrived, after at most `patience` looks.
__device__ __forceinline__ bool wait_for(const unsigned* arrived, unsigned wanted,
                                         long long patience) {
    for (; patience > 0; --patience) {
        unsigned found;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(arrived) : "memory");
        if (found % kLeave >= wanted) return true;
        __nanosleep(50);
    }
    return false;
}

// What another CTA of the launch may have written: not out of this SM's cache.
template <typename R>
__device__ __forceinline__ R load_fresh(const R* from) {
    static_assert(sizeof(R) % sizeof(double) == 0, "whole words");
    constexpr int kWords = sizeof(R) / sizeof(double);
    double words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldcg(reinterpret_cast<const double*>(from) + i);
    R value;
    memcpy(&value, words, sizeof(R));
    return value;
}

}  // namespace order
