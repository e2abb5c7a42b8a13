// The threads that share a row, and how they agree: lanes of a warp by shuffles, warps of a CTA
// through shared memory, CTAs of a cluster through each other's shared memory.
//
// Every exchange adds in a fixed, symmetric order, so all threads hold the same bits.
#pragma once

#include "pair.cuh"
#include "ptx.cuh"

// COUNT neighbouring lanes, a power of two. All 32 lanes take part in every exchange, whichever
// rows they serve: a shuffle under a mask of its own costs more than the addition it is for.
template <int COUNT>
struct Lanes {
    __device__ __forceinline__ int partner(int value, int distance) const {
        return __shfl_xor_sync(0xffffffffu, value, distance, COUNT);
    }
    __device__ __forceinline__ long long partner(long long value, int distance) const {
        return __shfl_xor_sync(0xffffffffu, value, distance, COUNT);
    }
    __device__ __forceinline__ float partner(float value, int distance) const {
        return __shfl_xor_sync(0xffffffffu, value, distance, COUNT);
    }
    __device__ __forceinline__ double partner(double value, int distance) const {
        return __shfl_xor_sync(0xffffffffu, value, distance, COUNT);
    }
    template <typename A>
    __device__ __forceinline__ Pair<A> partner(Pair<A> value, int distance) const {
        return {partner(value.hi, distance), partner(value.lo, distance)};
    }
    template <class R>
    __device__ __forceinline__ R partner(const R& record, int distance) const {
        return record.partner(*this, distance);
    }

    template <typename V>
    __device__ __forceinline__ V sum(V value) const {
#pragma unroll
        for (int distance = COUNT / 2; distance > 0; distance /= 2)
            value = value + partner(value, distance);
        return value;
    }
    template <typename V>
    __device__ __forceinline__ V largest(V value) const {
#pragma unroll
        for (int distance = COUNT / 2; distance > 0; distance /= 2)
            value = max(value, partner(value, distance));
        return value;
    }
};

// `combine(lanes, record)` makes one record of COUNT lanes' records, equal in all of them.
template <class Shape>
struct Team {
    Lanes<Shape::kLanes> lanes;
    unsigned rank = 0;

    __device__ __forceinline__ Team() {
        if constexpr (Shape::kCluster > 1) {
            rank = ptx::cluster_rank();
            ptx::cluster_arrive();  // awaited before the first write into another CTA
        }
    }

    // Takes each warp's record, gives the row's.
    template <class R, class Combine>
    __device__ __forceinline__ R agree(R record, Combine combine) const {
        if constexpr (Shape::kWarps > 1) {
            __shared__ R of_warp[Shape::kWarps];
            if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = record;
            __syncthreads();
            record = combine(Lanes<Shape::kWarps>(), of_warp[threadIdx.x % Shape::kWarps]);
        }
        if constexpr (Shape::kCluster > 1) {
            __shared__ R of_cta[Shape::kCluster];
            ptx::cluster_wait();
            if (threadIdx.x < Shape::kCluster)
                ptx::store_remote(&of_cta[rank], threadIdx.x, record);
            ptx::cluster_arrive();
            ptx::cluster_wait();
            record = combine(Lanes<Shape::kCluster>(), of_cta[threadIdx.x % Shape::kCluster]);
        }
        return record;
    }

    // Whether any thread says so with whom an exchange has to be repeated together.
    __device__ __forceinline__ bool any(bool mine) const {
        return Shape::kWarps * Shape::kCluster > 1 ? mine : __any_sync(0xffffffffu, mine);
    }

    // Before another exchange: all have read what the last one left. (After the last exchange
    // nobody writes to a CTA any more, so it may leave whenever it is done.)
    __device__ __forceinline__ void settle() const {
        if constexpr (Shape::kCluster > 1)
            ptx::cluster_arrive();
        else if constexpr (Shape::kWarps > 1)
            __syncthreads();
    }
};
