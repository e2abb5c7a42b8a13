// What a thread of a backward pass reads: arrays row by row, on their way some rows ahead, and
// parameters that all rows of a block share.
//
//   Constant<VALUE>  an absent one
//   Column<P>        one row of it for a whole block of rows
//   Each<P>          a row of its own for every row
//
// A thread copies what it will read itself: nobody waits for others.
#pragma once

#include "row_gradient_shape.cuh"

template <int VALUE>
struct Constant {};
template <typename P>
struct Column {};
template <typename P>
struct Each {};

template <class Kind>
struct IsColumn {
    static constexpr bool value = false;
};
template <typename P>
struct IsColumn<Column<P>> {
    static constexpr bool value = true;
};
template <class Kind>
struct IsEach {
    static constexpr bool value = false;
};
template <typename P>
struct IsEach<Each<P>> {
    static constexpr bool value = true;
    using type = P;
};
template <class Kind, class Other>
struct IsSame {
    static constexpr bool value = false;
};
template <class Kind>
struct IsSame<Kind, Kind> {
    static constexpr bool value = true;
};

// FIRST: bytes of a stage that other inputs have.
template <class Kind, typename A, class Shape, int FIRST>
struct Input;

template <int VALUE, typename A, class Shape, int FIRST>
struct Input<Constant<VALUE>, A, Shape, FIRST> {
    static constexpr int kEnd = FIRST;

    __device__ __forceinline__ explicit Input(const void*) {}
    __device__ __forceinline__ void read(const TeamPlace<Shape>&, long long, const char*) {}
    __device__ __forceinline__ void widened(int, const char*, A (&values)[Shape::kVec]) const {
#pragma unroll
        for (int e = 0; e < Shape::kVec; ++e) values[e] = A(VALUE);
    }
};

template <typename P, typename A, class Shape, int FIRST>
struct Input<Column<P>, A, Shape, FIRST> {
    static constexpr int kEnd = FIRST;

    const P* row;
    Pack<P, Shape::kVec> pack[Shape::kEarly ? Shape::kPacks : 1];

    __device__ __forceinline__ explicit Input(const void* base)
        : row(static_cast<const P*>(base)) {}
    // The row starts `offset` elements in.
    __device__ __forceinline__ void begin(const TeamPlace<Shape>& place, long long offset) {
        row += offset + place.column();
        if constexpr (Shape::kEarly) {
#pragma unroll
            for (int i = 0; i < Shape::kPacks; ++i)
                if (place.holds(i)) pack[i] = fetch(i);
        }
    }
    // Not as a constant: the gradient may be written over it.
    __device__ __forceinline__ Pack<P, Shape::kVec> fetch(int i) const {
        return load<Shape::kAccess, Shape::kVec>(row + TeamPlace<Shape>::beyond(i));
    }
    __device__ __forceinline__ void read(const TeamPlace<Shape>&, long long, const char*) {}
    __device__ __forceinline__ void widened(int i, const char*, A (&values)[Shape::kVec]) const {
        if constexpr (!Shape::kEarly)
            widen_pack(fetch(i), values);
        else
            widen_pack(opaque(pack[i]), values);
    }
};

template <typename P, typename A, class Shape, int FIRST>
struct Input<Each<P>, A, Shape, FIRST> {
    using Packed = Pack<P, Shape::kVec>;
    static constexpr bool kInRegisters = Shape::kStages == 0;
    static constexpr int kEnd = FIRST + Shape::kPacks * Shape::kBlock * int(sizeof(Packed));

    const P* base;
    Packed held[kInRegisters ? Shape::kPacks : 1];

    __device__ __forceinline__ explicit Input(const void* base)
        : base(static_cast<const P*>(base)) {}

    static __device__ __forceinline__ Packed* slot(const char* stage, int i) {
        return reinterpret_cast<Packed*>(const_cast<char*>(stage) + FIRST) + i * Shape::kBlock +
               threadIdx.x;
    }
    __device__ __forceinline__ void read(const TeamPlace<Shape>& place, long long offset,
                                         const char* stage) {
        const P* const row = base + offset;
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            if (!place.holds(i)) continue;
            if constexpr (kInRegisters)
                held[i] = load<Shape::kAccess, Shape::kVec>(row + place.beyond(i));
            else
                copy_in_parts<Shape::kAccess>(slot(stage, i), row + place.beyond(i));
        }
    }
    __device__ __forceinline__ void widened(int i, const char* stage,
                                            A (&values)[Shape::kVec]) const {
        if constexpr (kInRegisters)
            widen_pack(opaque(held[i]), values);
        else
            widen_pack(*slot(stage, i), values);
    }
};
