// The threads that share a row, and how they agree: lanes of a warp by shuffles, warps of a CTA
// through shared memory, CTAs of a cluster through each other's shared memory.
//
// Every exchange combines in a fixed order by symmetric operations, so all threads hold the same
// bits: what is COUNT / 2 apart first, neighbours last.
#pragma once

#include "pair.cuh"
#include "ptx.cuh"

struct Plus {
    template <typename V>
    __device__ __forceinline__ V operator()(const V& a, const V& b) const {
        return a + b;
    }
};
struct Largest {
    template <typename V>
    __device__ __forceinline__ V operator()(V a, V b) const {
        return max(a, b);
    }
};

// Two sums that are exchanged together.
template <typename V>
struct Moments {
    V sum, squares;

    __device__ __forceinline__ Moments operator+(const Moments& other) const {
        return {sum + other.sum, squares + other.squares};
    }
};

// COUNT neighbouring lanes, a power of two. All 32 lanes take part in every exchange, whichever
// rows they serve: a shuffle under a mask of its own costs more than the addition it is for.
template <int COUNT>
struct Lanes {
    template <typename V>
    __device__ __forceinline__ V partner(V value, int distance) const {
        return __shfl_xor_sync(0xffffffffu, value, distance, COUNT);
    }
    template <typename A>
    __device__ __forceinline__ Pair<A> partner(Pair<A> value, int distance) const {
        return {partner(value.hi, distance), partner(value.lo, distance)};
    }
    template <typename V>
    __device__ __forceinline__ Moments<V> partner(Moments<V> both, int distance) const {
        return {partner(both.sum, distance), partner(both.squares, distance)};
    }
    // That of one of them.
    template <typename V>
    __device__ __forceinline__ V of(V value, unsigned lane) const {
        if constexpr (COUNT == 1) return value;
        return __shfl_sync(0xffffffffu, value, lane, COUNT);
    }

    // From the lanes' values to one, the same in all of them.
    template <typename V, class Op>
    __device__ __forceinline__ V combined(V value, Op op) const {
#pragma unroll
        for (int distance = COUNT / 2; distance > 0; distance /= 2)
            value = op(value, partner(value, distance));
        return value;
    }
    template <typename V>
    __device__ __forceinline__ Moments<V> combined(const Moments<V>& both, Plus plus) const {
        if constexpr (COUNT < 4) {
            return {combined(both.sum, plus), combined(both.squares, plus)};
        } else {
            const V mine = halves(both);
            const V theirs = partner(mine, COUNT / 2);
            return {upper() ? theirs : mine, upper() ? mine : theirs};
        }
    }

    // The same, written to `to` once.
    template <typename V, class Op>
    __device__ __forceinline__ void deposit(const V& value, Op op, V& to) const {
        const V all = combined(value, op);
        if (threadIdx.x % COUNT == 0) to = all;
    }
    template <typename V>
    __device__ __forceinline__ void deposit(const Moments<V>& both, Plus, Moments<V>& to) const {
        const V mine = halves(both);
        if (threadIdx.x % (COUNT / 2) == 0) (upper() ? to.squares : to.sum) = mine;
    }

    __device__ __forceinline__ bool upper() const { return threadIdx.x & (COUNT / 2); }

    // Shuffles are scarce, one a clock for a whole SM: two sums take little more than one where
    // the lower half of the lanes goes on with the first and the upper half with the second.
    template <typename V>
    __device__ __forceinline__ V halves(const Moments<V>& both) const {
        const V theirs = partner(upper() ? both.sum : both.squares, COUNT / 2);
        V mine = (upper() ? both.squares : both.sum) + theirs;
#pragma unroll
        for (int distance = COUNT / 4; distance > 0; distance /= 2)
            mine = mine + partner(mine, distance);
        return mine;
    }
};

// From COUNT records in shared memory to one. Every thread reads up to MOST of them itself: eight
// is faster than three exchanges, where there are registers for them.
template <int COUNT, int MOST = 8, class R, class Op>
__device__ __forceinline__ R combined_records(const R* records, Op op) {
    constexpr int kRead = COUNT < MOST ? COUNT : MOST;
    constexpr int kGroups = COUNT / kRead;
    R mine[kRead];
#pragma unroll
    for (int i = 0; i < kRead; ++i) mine[i] = records[threadIdx.x % kGroups + i * kGroups];
#pragma unroll
    for (int half = kRead / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) mine[i] = op(mine[i], mine[i + half]);
    }
    return Lanes<kGroups>().combined(mine[0], op);
}

template <class Shape>
struct Team {
    static constexpr bool kOneWarp = Shape::kWarps * Shape::kCluster == 1;
    // One warp concludes for all. It costs a second barrier: bfloat16 layer norm, 2048 x 8192,
    // eight warps, takes 23.5 us for 24.4; 2048 x 4096, four warps, 13.0 for 12.7.
    static constexpr bool kOneConcludes = Shape::kCluster > 1 || Shape::kWarps >= 8;

    Lanes<Shape::kLanes> lanes;
    unsigned rank = 0;
    mutable unsigned exchanges = 0;

    __device__ __forceinline__ Team() {
        if constexpr (Shape::kCluster > 1) {
            rank = ptx::cluster_rank();
            if (threadIdx.x == 0) ptx::open_mailbox(mailbox());
            ptx::cluster_arrive_relaxed();  // awaited before the first write into another CTA
        }
    }

    static __device__ __forceinline__ ptx::Mailbox* mailbox() {
        using ptx::Mailbox;
        __shared__ Mailbox box[1];
        return box;
    }

    // What `conclude` makes of the row's record, given that of each thread.
    template <class R, class Op, class F>
    __device__ __forceinline__ auto agree(const R& record, Op op, F conclude) const {
        if constexpr (kOneWarp) {
            return conclude(lanes.combined(record, op));
        } else {
            using Conclusion = decltype(conclude(record));
            __shared__ R of_warp[Shape::kWarps];
            __shared__ Conclusion of_row[1];
            lanes.deposit(record, op, of_warp[threadIdx.x / Shape::kLanes]);
            if constexpr (Shape::kCluster > 1) ptx::cluster_wait();  // all mailboxes are open
            __syncthreads();
            if constexpr (!kOneConcludes)
                return conclude(combined_records<Shape::kWarps, Shape::kRecords>(of_warp, op));
            if (threadIdx.x < 32) {
                const Conclusion mine = conclude(of_cluster(of_warp, op));
                if (threadIdx.x == 0) of_row[0] = mine;
            }
            __syncthreads();
            return of_row[0];
        }
    }

    // By the first warp.
    template <class R, class Op>
    __device__ __forceinline__ R of_cluster(const R* of_warp, Op op) const {
        const R of_this_cta = combined_records<Shape::kWarps, Shape::kRecords>(of_warp, op);
        if constexpr (Shape::kCluster == 1) {
            return of_this_cta;
        } else {
            __shared__ R of_cta[Shape::kCluster];
            if (threadIdx.x == 0) ptx::expect(mailbox(), Shape::kCluster * sizeof(R));
            if (threadIdx.x < Shape::kCluster)
                ptx::send(&of_cta[rank], threadIdx.x, of_this_cta, mailbox());
            ptx::await(mailbox(), exchanges++);
            return combined_records<Shape::kCluster, Shape::kRecords>(of_cta, op);
        }
    }

    // Whether any thread says so with whom an exchange has to be repeated together.
    __device__ __forceinline__ bool any(bool mine) const {
        return kOneWarp ? __any_sync(0xffffffffu, mine) : mine;
    }

    // Before another exchange: what the last one left in other CTAs has been read. (After the last
    // one nobody writes to a CTA that has read, so it may leave whenever it is done.)
    __device__ __forceinline__ void settle() const {
        if constexpr (Shape::kCluster > 1)
            ptx::cluster_arrive();
        else if constexpr (!kOneConcludes && !kOneWarp)
            __syncthreads();
    }
};
