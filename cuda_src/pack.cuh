// Packs: VEC neighbouring elements of a row, moved with as few memory transactions as the
// alignment allows, kept in their stored type until they are used.
//
// VEC follows from the row length alone, ACCESS (elements per transaction, a divisor of VEC)
// from the alignment of the arrays: which thread adds which element never depends on where an
// array lies, so neither do the bits of the result. Packs of 16 bytes that lie anywhere are moved
// 16 bytes at a time, too (shift.cuh); of these alone there may be fewer elements than VEC.
#pragma once

#include "numbers.cuh"
#include "ptx.cuh"
#include "shift.cuh"

template <int BYTES>
struct WordOf;
template <>
struct WordOf<1> {
    using type = unsigned char;
};
template <>
struct WordOf<2> {
    using type = unsigned short;
};
template <>
struct WordOf<4> {
    using type = unsigned int;
};
template <>
struct WordOf<8> {
    using type = uint2;
};
template <>
struct WordOf<16> {
    using type = uint4;
};

// Kept as words: of 16-bit elements kept one by one the compiler takes every word apart.
template <typename T, int VEC>
struct alignas(sizeof(T) * VEC < 16 ? sizeof(T) * VEC : 16) Pack {
    using Raw = typename WordOf<(sizeof(T) * VEC < 4 ? sizeof(T) * VEC : 4)>::type;
    Raw raw[sizeof(T) * VEC / sizeof(Raw)];
};

template <typename T, int ACCESS>
struct Transaction {
    static constexpr int kBytes = ACCESS * sizeof(T) < 16 ? ACCESS * int(sizeof(T)) : 16;
    using Word = typename WordOf<kBytes>::type;
};

// Part i of a pack as a word or an element of another type, by memcpy, which moves nothing: a
// pointer of the other type would let the compiler take them for different memory.
template <typename Part, typename T, int VEC>
__device__ __forceinline__ Part part_of(const Pack<T, VEC>& pack, int i) {
    Part part;
    memcpy(&part, reinterpret_cast<const char*>(pack.raw) + i * sizeof(Part), sizeof(Part));
    return part;
}
template <typename Part, typename T, int VEC>
__device__ __forceinline__ void set_part(Pack<T, VEC>& pack, int i, Part part) {
    memcpy(reinterpret_cast<char*>(pack.raw) + i * sizeof(Part), &part, sizeof(Part));
}

// Whether packs that may start at every ACCESS elements are shifted: where single words are all
// that is aligned.
template <typename T, int ACCESS, int VEC>
constexpr bool kShifted = sizeof(T) <= 4 && VEC * sizeof(T) % 16 == 0 && ACCESS * sizeof(T) <= 4;

struct Fetch {
    template <typename Word>
    __device__ __forceinline__ Word operator()(const Word* from) const {
        return *from;
    }
};
// From arrays that nothing writes during the launch: the compiler may move these loads.
struct FetchConstant {
    template <typename Word>
    __device__ __forceinline__ Word operator()(const Word* from) const {
        return __ldg(from);
    }
};

// Packs that are shifted come in two steps, so that none is waited for before all are asked for;
// others are there after the first. Zeros follow where there are `count` elements alone.
template <int ACCESS, int VEC, class How = Fetch, typename T>
__device__ __forceinline__ Pack<T, VEC> begin_load(const T* from, unsigned count = VEC) {
    using Word = typename Transaction<T, ACCESS>::Word;
    Pack<T, VEC> pack;
    if constexpr (kShifted<T, ACCESS, VEC>) {
        begin_shifted(Origin<const T>(from), 0, count, How(), pack.raw);
        return pack;
    } else if constexpr (kShifted<T, 1, VEC>) {
        if (count < VEC) {
            begin_shifted(Origin<const T>(from), 0, count, How(), pack.raw);
            return pack;
        }
    }
#pragma unroll
    for (int i = 0; i < int(sizeof(pack) / sizeof(Word)); ++i)
        set_part(pack, i, How()(reinterpret_cast<const Word*>(from) + i));
    return pack;
}
template <int ACCESS, class How = Fetch, typename T, int VEC>
__device__ __forceinline__ Pack<T, VEC> finish_load(Pack<T, VEC> pack, const T* from,
                                                    unsigned count = VEC) {
    if constexpr (kShifted<T, ACCESS, VEC>)
        finish_shifted(Origin<const T>(from), 0, count, How(), pack.raw);
    return pack;
}

template <int ACCESS, int VEC, class How = Fetch, typename T>
__device__ __forceinline__ Pack<T, VEC> load(const T* from) {
    return finish_load<ACCESS, How>(begin_load<ACCESS, VEC, How>(from), from);
}

// Past the registers, in transactions of 16 bytes, the last one with what there is of `count`
// elements; there after ptx::copies_wait.
template <bool CACHED, typename T, int VEC>
__device__ __forceinline__ void copy_async(Pack<T, VEC>* to, const T* from, unsigned count = VEC) {
    static_assert(sizeof(*to) % 16 == 0, "whole transactions");
    constexpr int kEach = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < int(sizeof(*to) / 16); ++i) {
        uint4* const slot = reinterpret_cast<uint4*>(to) + i;
        const uint4* const block = reinterpret_cast<const uint4*>(from) + i;
        if (count >= (i + 1) * kEach)
            ptx::copy_async<CACHED>(slot, block);
        else if (count > i * kEach)
            ptx::copy_first_async(slot, block, (count - i * kEach) * sizeof(T));
    }
}

// Of a thread's slots, in the order in which copy_async fills them: they are awaited some at a
// time, so that what has come is added up while the rest comes. There are SLOTS, or none.
template <int SLOTS>
struct Arrivals {
    static constexpr int kEach = 4;

    // Behind the copy to a slot, whether there is one or not; slots before the first are registers.
    static __device__ __forceinline__ void begun(int slot) {
        if (slot >= 0 && (slot % kEach == kEach - 1 || slot == SLOTS - 1)) ptx::copies_commit();
    }
    // Before a slot is read. Others may have begun in between, but none of theirs behind.
    static __device__ __forceinline__ void await(int slot) {
        if (slot >= 0 && slot % kEach == 0)
            ptx::copies_wait_but((SLOTS - 1) / kEach - slot / kEach);
    }
};

// In transactions of ACCESS elements; there after ptx::copies_wait_but. Less than four bytes at a
// time come by way of a register.
template <int ACCESS, typename T, int VEC>
__device__ __forceinline__ void copy_in_parts(Pack<T, VEC>* to, const T* from) {
    constexpr int kBytes = Transaction<T, ACCESS>::kBytes;
    if constexpr (kBytes < 4) {
        *to = load<ACCESS, VEC>(from);
    } else {
#pragma unroll
        for (int i = 0; i < int(sizeof(*to) / kBytes); ++i)
            ptx::copy_part<kBytes>(reinterpret_cast<char*>(to) + i * kBytes,
                                   reinterpret_cast<const char*>(from) + i * kBytes);
    }
}

// The compiler must have the pack in registers here, and cannot tell afterwards that it is the
// same.
template <typename T, int VEC>
__device__ __forceinline__ Pack<T, VEC> opaque(Pack<T, VEC> pack) {
    if constexpr (sizeof(pack.raw[0]) == 4) {
#pragma unroll
        for (auto& word : pack.raw) asm volatile("" : "+r"(word));
    }
    return pack;
}

__device__ __forceinline__ unsigned opaque(unsigned value) {
    asm volatile("" : "+r"(value));
    return value;
}

// The compiler must have worked a number out here.
__device__ __forceinline__ float opaque(float value) {
    Pack<float, 1> pack;
    set_part(pack, 0, value);
    return part_of<float>(opaque(pack), 0);
}

// One element that has been loaded before: this is where the compiler must wait for it.
template <typename T>
__device__ __forceinline__ Pack<T, 1> awaited(Pack<T, 1> element) {
    if constexpr (sizeof(T) == 2)
        element.raw[0] = opaque(unsigned(element.raw[0]));
    else
        element = opaque(element);
    return element;
}

template <int ACCESS, int VEC, typename T>
__device__ __forceinline__ void store(T* to, const Pack<T, VEC>& pack) {
    using Word = typename Transaction<T, ACCESS>::Word;
    if constexpr (kShifted<T, ACCESS, VEC>) {
        const ptx::Neighbours near = ptx::Together().around(to, sizeof(pack));
        write_blocks<kAnyWord>(Origin<T>(to), 0, pack.raw, near);
    } else {
#pragma unroll
        for (int i = 0; i < int(sizeof(pack) / sizeof(Word)); ++i)
            ptx::store(reinterpret_cast<Word*>(to) + i, part_of<Word>(pack, i));
    }
}

// The same, for the compiler to move: 3 % less instructions in row norms, where it keeps words
// whole; in channel norms it does not.
template <int ACCESS, int VEC, typename T>
__device__ __forceinline__ void assign(T* to, const Pack<T, VEC>& pack) {
    using Word = typename Transaction<T, ACCESS>::Word;
    if constexpr (kShifted<T, ACCESS, VEC>) {
        store<ACCESS>(to, pack);
    } else {
#pragma unroll
        for (int i = 0; i < int(sizeof(pack) / sizeof(Word)); ++i)
            reinterpret_cast<Word*>(to)[i] = part_of<Word>(pack, i);
    }
}

template <typename T, typename A, int VEC>
__device__ __forceinline__ void widen_pack(const Pack<T, VEC>& pack, A (&values)[VEC]) {
    if constexpr (sizeof(T) == 2 && VEC % 2 == 0) {
#pragma unroll
        for (int e = 0; e < VEC; e += 2) {
            const float2 two = widened2<T>(pack.raw[e / 2]);
            values[e] = two.x;
            values[e + 1] = two.y;
        }
    } else {
#pragma unroll
        for (int e = 0; e < VEC; ++e) values[e] = widen<A>(part_of<T>(pack, e));
    }
}

template <typename T, typename A, int VEC>
__device__ __forceinline__ Pack<T, VEC> narrowed(const A (&values)[VEC]) {
    Pack<T, VEC> pack;
    if constexpr (sizeof(T) == 2 && VEC % 2 == 0) {
#pragma unroll
        for (int e = 0; e < VEC; e += 2)
            set_part(pack, e / 2, narrowed2<T>(values[e], values[e + 1]));
    } else {
#pragma unroll
        for (int e = 0; e < VEC; ++e) set_part(pack, e, narrow<T>(values[e]));
    }
    return pack;
}

// What is written is the first to leave L2, for the sake of what is still to be read.
template <int ACCESS, int VEC, typename T>
__device__ __forceinline__ void store_streaming(T* to, const Pack<T, VEC>& pack) {
    using Word = typename Transaction<T, ACCESS>::Word;
    if constexpr (kShifted<T, ACCESS, VEC>) {
        store<ACCESS>(to, pack);
    } else {
#pragma unroll
        for (int i = 0; i < int(sizeof(pack) / sizeof(Word)); ++i)
            __stcs(reinterpret_cast<Word*>(to) + i, part_of<Word>(pack, i));
    }
}
