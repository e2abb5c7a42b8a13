// Instructions that CUDA C has no word for, by their PTX: the headers that wrap them cost more to
// compile than the kernels do.
#pragma once

namespace ptx {

__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// The first thing that every kernel does: what was launched before it on the stream has ended after
// this, and what that wrote is there. Where the host allows it (cunorm/cuda/driver.py), CTAs start
// before. Nothing says that the next launch may start: that is left to the end of this one, since
// CTAs that wait take the place of some that work.
__device__ __forceinline__ void take_turn() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A pointer to global memory of which the compiler knows nothing else.
template <typename T>
__device__ __forceinline__ T* opaque_global(T* pointer) {
    size_t address = __cvta_generic_to_global(pointer);
    asm volatile("" : "+l"(address));
    return static_cast<T*>(__cvta_global_to_generic(address));
}

// Writes whole words to global memory: of a word of several registers assigned in C the compiler
// makes as many transactions where it loses sight of the alignment.
template <typename Word>
__device__ __forceinline__ void store(Word* global, Word word) {
    *global = word;
}
template <>
__device__ __forceinline__ void store(uint2* global, uint2 word) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(global), "r"(word.x), "r"(word.y)
                 : "memory");
}
template <>
__device__ __forceinline__ void store(uint4* global, uint4 word) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(word.x), "r"(word.y),
                 "r"(word.z), "r"(word.w)
                 : "memory");
}

// The compiler works an address out when it needs it, and would put off a load whose result is
// needed late. This one it needs now, for a branch that is never taken.
__device__ __forceinline__ void known(const void* address) {
    asm volatile(
        "{\n\t"
        ".reg .pred never;\n\t"
        "setp.eq.u64 never, %0, 0;\n\t"
        "@never exit;\n\t"
        "}" ::"l"(address)
        : "memory");
}

// Lanes of a warp that have to do with each other, as bits: the one below, the one above, or none.
struct Neighbours {
    unsigned below, above;

    __device__ __forceinline__ Neighbours(bool has_below, bool has_above)
        : below(has_below ? 1u << threadIdx.x % 32 >> 1 : 0),
          above(has_above ? 1u << threadIdx.x % 32 << 1 : 0) {}
};
// The lanes that come here together.
struct Together {
    unsigned lanes;

    __device__ __forceinline__ Together() : lanes(__activemask()) {}
    __device__ __forceinline__ bool with(unsigned lane) const { return lanes & lane; }
    // Of the lane below, if it is one of them.
    template <typename V>
    __device__ __forceinline__ V of_below(V value) const {
        return __shfl_up_sync(lanes, value, 1);
    }
    // Those with an address `step` bytes before and behind this one.
    __device__ __forceinline__ Neighbours around(const void* address, unsigned step) const {
        const size_t mine = reinterpret_cast<size_t>(address);
        const unsigned lane = threadIdx.x % 32;
        const bool meets = of_below(mine) + step == mine, follows = meets && lanes << 1 >> lane & 1;
        const unsigned followers = __ballot_sync(lanes, follows);
        return {follows, bool(followers >> lane >> 1 & 1)};
    }
};

// Copies 16 bytes from global to shared memory without a register; visible to this thread after
// copies_wait. `CACHED`: by way of L1, for what other CTAs read too. Before compute capability 8.0:
// a plain copy.
template <bool CACHED>
__device__ __forceinline__ void copy_async(uint4* shared, const uint4* global) {
#if __CUDA_ARCH__ >= 800
    if constexpr (CACHED)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
                     "l"(global)
                     : "memory");
    else
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
                     "l"(global)
                     : "memory");
#else
    *shared = *global;
#endif
}
__device__ __forceinline__ void copies_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// To L2; for what is read when it has come.
__device__ __forceinline__ void prefetch(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// The same of 4, 8 or 16 bytes, in groups: those begun before a commit.
template <int BYTES>
__device__ __forceinline__ void copy_part(void* shared, const void* global) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "what the hardware copies at once");
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
                     "l"(global)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)),
                     "l"(global), "n"(BYTES)
                     : "memory");
#else
    memcpy(__builtin_assume_aligned(shared, BYTES), __builtin_assume_aligned(global, BYTES), BYTES);
#endif
}
// The first `bytes` of 16, by words, so that no byte behind them is read; what follows them in
// shared memory stays as it is. There after copies_wait.
__device__ __forceinline__ void copy_first_async(uint4* shared, const uint4* global,
                                                 unsigned bytes) {
    auto* const to = reinterpret_cast<unsigned*>(shared);
    const auto* const from = reinterpret_cast<const unsigned*>(global);
#pragma unroll
    for (unsigned i = 0; i < 4; ++i)
        if (bytes >= 4 * (i + 1)) copy_part<4>(to + i, from + i);
    if (const unsigned halves = bytes / 2; halves % 2)
        reinterpret_cast<unsigned short*>(to)[halves - 1] =
            reinterpret_cast<const unsigned short*>(from)[halves - 1];
}
__device__ __forceinline__ void copies_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until all groups but the last LEFT are there.
template <int LEFT>
__device__ __forceinline__ void copies_wait_but() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}
// The same of a number that is known when an unrolled loop is compiled, or of MOST.
template <int MOST = 5>
__device__ __forceinline__ void copies_wait_but(int left) {
    if constexpr (MOST > 0)
        if (left < MOST) return copies_wait_but<MOST - 1>(left);
    copies_wait_but<MOST>();
}

// A barrier of some warps of a CTA; barrier 0 is that of all.
__device__ __forceinline__ void barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
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
// Says only "I am here": without the fence, which waits for all memory traffic of the CTA.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// What a CTA expects from others, as an mbarrier in its shared memory.
using Mailbox = unsigned long long;

// By one thread, before its relaxed arrival.
__device__ __forceinline__ void open_mailbox(Mailbox* box) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(
                     shared_address(box))
                 : "memory");
}
// By one thread, once for each time that all threads await.
__device__ __forceinline__ void expect(Mailbox* box, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(box)),
                 "r"(bytes)
                 : "memory");
}
// `times`: how often the box has been awaited before.
__device__ __forceinline__ void await(Mailbox* box, unsigned times) {
    asm volatile(
        "{\n\t"
        ".reg .pred full;\n\t"
        "again:\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 full, [%0], %1;\n\t"
        "@!full bra again;\n\t"
        "}" ::"r"(shared_address(box)),
        "r"(times % 2)
        : "memory");
}

// Writes value to the place that `local`, an address in shared memory, has in CTA `rank`, and
// tells the box that `box` is there. The sender may leave before it has arrived.
template <typename R>
__device__ __forceinline__ void send(R* local, unsigned rank, const R& value, Mailbox* box) {
    static_assert(sizeof(R) % 4 == 0, "whole 32-bit words");
    unsigned to, told, words[sizeof(R) / 4];
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(to)
                 : "r"(shared_address(local)), "r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(told)
                 : "r"(shared_address(box)), "r"(rank));
    memcpy(words, &value, sizeof(R));
#pragma unroll
    for (int i = 0; i < int(sizeof(R) / 4); ++i)
        asm volatile(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                to + 4 * i),
            "r"(words[i]), "r"(told)
            : "memory");
}

}  // namespace ptx
