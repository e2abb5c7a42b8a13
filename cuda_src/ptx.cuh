// Instructions that CUDA C has no word for, by their PTX: the headers that wrap them cost more to
// compile than the kernels do.
#pragma once

namespace ptx {

// Copies 16 bytes from global to shared memory without a register; visible to this thread after
// copies_wait. Before compute capability 8.0: a plain copy.
__device__ __forceinline__ void copy_async(uint4* shared, const uint4* global) {
#if __CUDA_ARCH__ >= 800
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
    *shared = *global;
#endif
}
__device__ __forceinline__ void copies_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Thread block clusters: compute capability 9.0 and newer.

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Arrive says "what I wrote so far may be read"; wait returns when every CTA has arrived.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes value to the place that `local`, an address in shared memory, has in CTA `rank`.
template <typename R>
__device__ __forceinline__ void store_remote(R* local, unsigned rank, const R& value) {
    static_assert(sizeof(R) % 4 == 0, "whole 32-bit words");
    const unsigned here = static_cast<unsigned>(__cvta_generic_to_shared(local));
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    unsigned words[sizeof(R) / 4];
    memcpy(words, &value, sizeof(R));
#pragma unroll
    for (int i = 0; i < int(sizeof(R) / 4); ++i)
        asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there + 4 * i), "r"(words[i])
                     : "memory");
}

}  // namespace ptx
