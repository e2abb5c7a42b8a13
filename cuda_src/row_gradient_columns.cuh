// Gradients of parameters in a backward pass: what becomes of each, and sums over rows.
#pragma once

#include "row_gradient_inputs.cuh"

// What becomes of the gradient of a parameter: nothing, a sum over rows, or a row for every row.
struct Absent {};
struct Summed {};

template <typename T_, class Residual_, class P0_, class P1_, class P2_, class G0_, class G1_,
          class G2_>
struct GradientTypes {
    using T = T_;
    using A = Accumulator<T>;
    using Residual = Residual_;
    using P0 = P0_;
    using P1 = P1_;
    using P2 = P2_;
    using G0 = G0_;
    using G1 = G1_;
    using G2 = G2_;
};

template <class G>
struct IsSummed {
    static constexpr bool value = false;
};
template <>
struct IsSummed<Summed> {
    static constexpr bool value = true;
};

template <class Types>
struct SummedSlots {
    static constexpr bool kSummed[3] = {IsSummed<typename Types::G0>::value,
                                        IsSummed<typename Types::G1>::value,
                                        IsSummed<typename Types::G2>::value};
    static constexpr int kCount = kSummed[0] + kSummed[1] + kSummed[2];
    // Which of those that are summed.
    static __device__ constexpr int index(int slot) {
        return (slot > 0 && kSummed[0]) + (slot > 1 && kSummed[1]);
    }
};

// Rows between two additions to a sum that keeps its rounding errors. Four equal terms add up
// exactly, as do sixteen of 16 bits: a gradient may well be the same for all rows.
template <typename T>
constexpr int kPlainRows = sizeof(T) == 2 ? 16 : 4;
// And where such a sum is kept in the record, for want of room.
constexpr int kRecordRows = 32;

// Sums over rows of a thread's columns: plain ones in registers, and where shared memory has room,
// longer ones there.
template <class Types, class Shape>
struct ColumnSums {
    using T = typename Types::T;
    using A = typename Types::A;
    using Slots = SummedSlots<Types>;
    static constexpr int kVec = Shape::kVec, kPacks = Shape::kPacks;
    static constexpr int kOwn = Slots::kCount * kPacks * kVec;  // sums of a thread
    static constexpr int kColumns = Shape::kUnits * Shape::kThreads;
    static constexpr int kStep = Shape::kCombine ? kOwn * kColumns : 0;

    A part[3][kPacks][kVec];
    A* const high;
    A* const low;

    // `room`: what shared memory has for them.
    __device__ __forceinline__ explicit ColumnSums(char* room)
        : high(reinterpret_cast<A*>(room) + place()), low(high + kStep) {
        clear();
    }
    static __device__ __forceinline__ unsigned place() {
        return threadIdx.x / Shape::kUnit * Shape::kThreads + threadIdx.x % Shape::kThreads;
    }
    // Where several rows share a warp, the lanes of the first keep the sums of all.
    static __device__ __forceinline__ bool keeps() {
        return Shape::kThreads >= 32 || threadIdx.x % 32 < Shape::kThreads;
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int slot = 0; slot < 3; ++slot)
#pragma unroll
            for (int i = 0; i < kPacks; ++i)
#pragma unroll
                for (int e = 0; e < kVec; ++e) part[slot][i][e] = A(0);
    }
    static __device__ __forceinline__ int number(int slot, int i, int e) {
        return ((Slots::index(slot) * kPacks + i) * kVec + e) * kColumns;
    }
    template <class F>
    static __device__ __forceinline__ void for_each(F f) {
#pragma unroll
        for (int slot = 0; slot < 3; ++slot) {
            if (!Slots::kSummed[slot]) continue;
#pragma unroll
            for (int i = 0; i < kPacks; ++i)
#pragma unroll
                for (int e = 0; e < kVec; ++e) f(slot, i, e);
        }
    }
    __device__ __forceinline__ Pair<A> total(int slot, int i, int e) const {
        const int n = number(slot, i, e);
        return {high[n], low[n]};
    }
    __device__ __forceinline__ void set_total(int slot, int i, int e, const Pair<A>& sum) const {
        const int n = number(slot, i, e);
        high[n] = sum.hi;
        low[n] = sum.lo;
    }

    static __device__ __forceinline__ Pair<A> with(Pair<A> all, const Pair<A>& more) {
        all.add(more.hi);
        all.lo += more.lo;
        return all;
    }

    // Those of all teams in the registers of the first, where none has been kept: few rows, whose
    // sum is going to be rounded anyway.
    __device__ __forceinline__ void gather_plain() {
        for_each([&](int slot, int i, int e) {
#pragma unroll
            for (int distance = 16; distance >= Shape::kThreads; distance /= 2)
                part[slot][i][e] += Lanes<32>().partner(part[slot][i][e], distance);
        });
        const int unit = threadIdx.x / Shape::kUnit;
        Pack<A, kVec>* const room = reinterpret_cast<Pack<A, kVec>*>(high - place()) + place();
#pragma unroll 1
        for (int units = Shape::kUnits; units > 1;) {
            const int half = (units + 1) / 2, moved = units - half;
            if (unit >= half && unit < units && keeps())
                for_each_pack([&](int n, A(&mine)[kVec]) { room[n] = narrowed<A>(mine); });
            __syncthreads();
            if (unit < moved && keeps())
                for_each_pack([&](int n, A(&mine)[kVec]) {
                    A theirs[kVec];
                    widen_pack(room[n + half * Shape::kThreads], theirs);
#pragma unroll
                    for (int e = 0; e < kVec; ++e) mine[e] += theirs[e];
                });
            units = half;
        }
    }
    template <class F>
    __device__ __forceinline__ void for_each_pack(F f) {
#pragma unroll
        for (int slot = 0; slot < 3; ++slot) {
            if (!Slots::kSummed[slot]) continue;
#pragma unroll
            for (int i = 0; i < kPacks; ++i)
                f((Slots::index(slot) * kPacks + i) * kColumns, part[slot][i]);
        }
    }

    // `first`: there is nothing yet to add to.
    __device__ __forceinline__ void keep(bool first) {
        for_each([&](int slot, int i, int e) {
            Pair<A> sum{part[slot][i][e], A(0)};
#pragma unroll
            for (int distance = 16; distance >= Shape::kThreads; distance /= 2)
                sum = sum + Lanes<32>().partner(sum, distance);
            if (keeps()) {
                Pair<A> all{A(0), A(0)};
                if (!first) all = total(slot, i, e);
                set_total(slot, i, e, with(all, sum));
            }
            part[slot][i][e] = A(0);
        });
    }

    // Those of all teams, with the first.
    __device__ __forceinline__ void gather(bool first) {
        keep(first);
#pragma unroll 1
        for (int units = Shape::kUnits; units > 1;) {
            const int half = (units + 1) / 2, moved = units - half;
            units = half;
            __syncthreads();
            if (int(threadIdx.x) >= moved * Shape::kUnit || !keeps()) continue;
            const int beyond = half * Shape::kThreads;
            for_each([&](int slot, int i, int e) {
                const int n = number(slot, i, e);
                const Pair<A> theirs{high[n + beyond], low[n + beyond]};
                set_total(slot, i, e, total(slot, i, e) + theirs);
            });
        }
    }
};
