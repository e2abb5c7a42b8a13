// Packs of 16 bytes, or several times that, which start anywhere.
//
// Read: word by word of 4 aligned bytes. Of 16-bit elements every other address lies within a
// word: then half a word follows, and all are shifted by half of one. Nothing is read behind the
// last element; before the first one, half a word of the same allocation.
//
// Written: 16 aligned bytes by a lane, of which the lane below gives it what it has of them. Where
// that lane writes something else, or nothing, the bytes of its own pack, in pieces.
#pragma once

#include "numbers.cuh"
#include "ptx.cuh"

constexpr int kBlockWords = 4, kAnyWord = -1;

// Elements of a word.
template <typename T>
constexpr int kOfWord = 4 / sizeof(T);

template <typename T>
__device__ __forceinline__ T first_of_word(unsigned word) {
    T element;
    memcpy(&element, &word, sizeof(T));
    return element;
}

// Where packs lie that are 16 bytes apart, or several times that: the word in which the first one
// starts, and how many elements of it are not of the pack, 0 or 1.
template <typename T>
struct Origin {
    unsigned skipped;
    T* start;

    __device__ __forceinline__ explicit Origin(T* first)
        : skipped(sizeof(T) == 4 ? 0 : reinterpret_cast<size_t>(first) / sizeof(T) % 2),
          start(first - skipped) {}

    // Of the pack that is `column` elements behind the first.
    __device__ __forceinline__ const unsigned* words(size_t column) const {
        return reinterpret_cast<const unsigned*>(start + column);
    }
    // Which of the four words of a block is the first of a pack.
    __device__ __forceinline__ unsigned in_block() const {
        return reinterpret_cast<size_t>(start) / 4 % kBlockWords;
    }
};

// A pack of `count` elements, zeros behind them, comes in two steps: its words; and the half that
// may follow them, when they are there, and it with them. `fetch` reads a word or half of one.
template <typename T, int WORDS, class Fetch>
__device__ __forceinline__ void begin_shifted(const Origin<T>& origin, size_t column,
                                              unsigned count, Fetch fetch,
                                              unsigned (&pack)[WORDS]) {
    const unsigned end = count > 0 ? origin.skipped + count : 0;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const unsigned* const word = origin.words(column) + i;
        pack[i] = 0;
        if (end >= (i + 1) * kOfWord<T>) pack[i] = fetch(word);
        if (sizeof(T) == 2 && end == i * 2 + 1)
            pack[i] = fetch(reinterpret_cast<const unsigned short*>(word));
    }
}
template <typename T, int WORDS, class Fetch>
__device__ __forceinline__ void finish_shifted(const Origin<T>& origin, size_t column,
                                               unsigned count, Fetch fetch,
                                               unsigned (&pack)[WORDS]) {
    if constexpr (sizeof(T) == 2) {
        const unsigned* const behind = origin.words(column) + WORDS;
        unsigned last = 0;
        if (origin.skipped + count > WORDS * 2)
            last = fetch(reinterpret_cast<const unsigned short*>(behind));
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const unsigned next = i + 1 < WORDS ? pack[i + 1] : last;
            pack[i] = __funnelshift_r(pack[i], next, origin.skipped * 16);
        }
    }
}

// A whole pack, whose first word is number FIRST of its block, or whichever it is. `near`: the
// lanes whose packs end and start where this one does. Those that come here, too, help each other:
// which these are decides who writes a byte, never which byte.
template <int FIRST, typename T, int WORDS>
__device__ __forceinline__ void write_blocks(const Origin<T>& origin, size_t column,
                                             const unsigned (&pack)[WORDS],
                                             const ptx::Neighbours& near) {
    const ptx::Together here;
    const unsigned first = FIRST == kAnyWord ? origin.in_block() : FIRST;
    const bool skips = origin.skipped > 0;
    T* const to = origin.start + column + origin.skipped;
    unsigned* const words = reinterpret_cast<unsigned*>(origin.start + column);

    unsigned mine[WORDS];  // with what the lane below has of the first
    unsigned before = sizeof(T) == 2 ? here.of_below(pack[WORDS - 1]) : 0;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        mine[i] = sizeof(T) == 2 ? __funnelshift_l(before, pack[i], origin.skipped * 16) : pack[i];
        before = pack[i];
    }
    constexpr int kBelow = kBlockWords - 1;
    unsigned all[kBelow + WORDS];  // the last of the lane below, and those of this one
#pragma unroll
    for (int i = 0; i < kBelow; ++i) {
        const bool needed = FIRST == kAnyWord || i + FIRST >= kBelow;
        all[i] = needed ? here.of_below(mine[WORDS - kBelow + i]) : 0;
    }
#pragma unroll
    for (int i = 0; i < WORDS; ++i) all[kBelow + i] = mine[i];

    unsigned some[WORDS + 1], block[WORDS];  // without 2 words if `first` is 0 or 1; and 1 if even
#pragma unroll
    for (int i = 0; i <= WORDS; ++i) some[i] = first & 2 ? all[i] : all[i + 2];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) block[i] = first & 1 ? some[i] : some[i + 1];

    const bool starts = here.with(near.below) || (first == 0 && !skips);
    const bool ends = here.with(near.above);
#pragma unroll
    for (int i = 0; i < WORDS; i += kBlockWords)
        if (i > 0 || starts)
            ptx::store(reinterpret_cast<uint4*>(words - first + i),
                       uint4{block[i], block[i + 1], block[i + 2], block[i + 3]});
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const bool of_start = i < kBlockWords && first + i < kBlockWords;
        const bool of_end = i >= WORDS - kBlockWords && first + i >= WORDS;
        if ((of_start && !starts && (i > 0 || !skips)) || (of_end && !ends))
            ptx::store(words + i, mine[i]);
    }
    if (skips && !starts) to[0] = first_of_word<T>(pack[0]);
    if (skips && !ends) to[WORDS * 2 - 1] = first_of_word<T>(pack[WORDS - 1] >> 16);
}

// The first `count` elements of a pack, but for so many before them.
template <typename T, int WORDS>
__device__ __forceinline__ void write_elements(T* to, const unsigned (&pack)[WORDS], unsigned count,
                                               unsigned skipped = 0) {
#pragma unroll
    for (int e = 0; e < WORDS * kOfWord<T>; ++e) {
        const unsigned word = pack[e / kOfWord<T>];
        if (e >= skipped && e < count) to[e] = first_of_word<T>(e % kOfWord<T> ? word >> 16 : word);
    }
}

template <int N>
struct Number {
    static constexpr int value = N;
};
// Calls write(Number<FIRST>()) for the packs of `origin`. One way for each FIRST takes a tenth less
// time, but registers that 32-bit elements need, and where packs are many, a second to compile.
template <int PACKS, typename T, class Write>
__device__ __forceinline__ void by_first_word(const Origin<T>& origin, Write write) {
    if constexpr (sizeof(T) == 4 || PACKS > 8) {
        write(Number<kAnyWord>());
    } else {
        switch (origin.in_block()) {
            case 0:
                return write(Number<0>());
            case 1:
                return write(Number<1>());
            case 2:
                return write(Number<2>());
            default:
                return write(Number<3>());
        }
    }
}
