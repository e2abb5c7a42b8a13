// CTAs of one launch that hand results to each other.
//
// Whoever waits does so for a while only, and must have a way to go on without: which CTAs run at
// the same time is up to the hardware and to what else it runs.
#pragma once

namespace order {

// Added to a count of arrivals by who leaves before all have arrived.
constexpr unsigned kLeave = 1u << 16;

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

// Signals: words that hold the number of a launch once something has been done. Nobody else writes
// that number, so that they need not be cleared first; but whoever replays a launch has to.
using Signal = unsigned long long;

// Says that what this thread wrote may be read.
__device__ __forceinline__ void raise(Signal* signal, Signal number) {
    __threadfence();
    *static_cast<volatile Signal*>(signal) = number;
    __threadfence();  // before it looks at other signals
}
__device__ __forceinline__ bool is_raised(const Signal* signal, Signal number) {
    Signal found;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(signal) : "memory");
    return found == number;
}
// Whether it is, after at most `patience` looks.
__device__ __forceinline__ bool await(const Signal* signal, Signal number, long long patience) {
#pragma unroll 1
    for (; patience > 0; --patience) {
        if (is_raised(signal, number)) return true;
        __nanosleep(20);
    }
    return false;
}
// Takes a raised signal down; whether it was this thread that did.
__device__ __forceinline__ bool take(Signal* signal, Signal number) {
    return atomicCAS(signal, number, ~number) == number;
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
