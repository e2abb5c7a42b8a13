// The part of a row that one thread holds on chip, in its stored type: in registers, and for
// rows beyond those in slots of shared memory that no other thread touches.
#pragma once

#include "pack.cuh"
#include "row_shape.cuh"

// Which row, and which of its vectors, this thread works on. Vectors past the end of the row,
// and all vectors of a row past the last one, are not held: such threads only join the exchanges.
template <class Shape>
struct Place {
    static constexpr unsigned kStride = Shape::kThreads * Shape::kCluster;
    using Row = typename RowIndex<Shape>::Row;

    Row row;
    bool live;
    unsigned vectors;  // in the row
    unsigned first;    // of this thread

    // `skipped` vectors of the row belong to others: other CTAs of the cluster, other segments.
    __device__ __forceinline__ Place(const RowArgs& args, Row row, unsigned skipped)
        : row(row),
          live(Shape::kRows == 1 || row < args.rows),
          vectors(live ? args.cols / Shape::kVec : 0),
          first(skipped + (Shape::kRows == 1 ? threadIdx.x : threadIdx.x % Shape::kThreads)) {}

    __device__ __forceinline__ unsigned vector(int pack) const { return first + pack * kStride; }
    // In two terms, so that the packs of an array need one address between them.
    __device__ __forceinline__ size_t column(int pack) const {
        return size_t(first) * Shape::kVec + size_t(pack) * kStride * Shape::kVec;
    }
    // A shape has no more packs than the row needs: only the last one can be missing. Where packs
    // are large the question is asked all the same: the branch keeps the compiler from working
    // on all packs at once, in twice the registers.
    __device__ __forceinline__ bool holds(int pack) const {
        if (Shape::kVec <= 2 && !Shape::kSegment && pack < Shape::kPacks - 1) return live;
        return vector(pack) < vectors;
    }
};

// The first elements of a row, whose average is near its mean: of one alone every hundredth lies so
// far outside that its row has to be taken again.
template <typename T, class Shape>
struct RowStart {
    static constexpr int kCount = Shape::kVec >= 4 ? 4 : 1;  // of the first pack
    static constexpr int kAccess = Shape::kAccess < kCount ? Shape::kAccess : kCount;
    using A = Accumulator<T>;

    Pack<T, kCount> elements = {};

    RowStart() = default;
    __device__ __forceinline__ explicit RowStart(const T* from)
        : elements(load<kAccess, kCount>(from)) {}

    // As the sum is stored.
    __device__ __forceinline__ RowStart operator+(const RowStart& other) const {
        A sum[kCount], addend[kCount];
        widen_pack(elements, sum);
        widen_pack(other.elements, addend);
#pragma unroll
        for (int e = 0; e < kCount; ++e) sum[e] += addend[e];
        RowStart both;
        both.elements = narrowed<T>(sum);
        return both;
    }
    // Of values that are equal, that value.
    __device__ __forceinline__ A average() const {
        A value[kCount];
        widen_pack(elements, value);
        if constexpr (kCount == 1) return value[0];
#pragma unroll
        for (int e = 0; e < kCount; ++e) value[e] *= A(1) / kCount;
        return plain_sum(value);
    }
};

// TILE: how many tiles have their slots before.
template <typename T, class Shape, int TILE = 0>
struct RowTile {
    static constexpr int kVec = Shape::kVec;
    static constexpr int kHeld = Shape::kPacks - Shape::kShared;
    // So many values of T a plain sum in A holds without rounding, unless they differ by more
    // than 2^12, and then it rounds far below what a 16-bit result shows.
    static constexpr int kExactSum = sizeof(T) == 2 ? 8 : 0;
    using A = Accumulator<T>;
    using P = Pack<T, kVec>;

    const Place<Shape>& place;
    RowStart<T, Shape> start;
    A near;  // the row's mean
    P held[kHeld];

    __device__ __forceinline__ explicit RowTile(const Place<Shape>& place) : place(place) {}

    static __device__ __forceinline__ P* slot(int i) {
        extern __shared__ uint4 slots[];
        constexpr int kBefore = TILE * Shape::kShared;
        return reinterpret_cast<P*>(slots) + (kBefore + i - kHeld) * Shape::kBlock + threadIdx.x;
    }
    __device__ __forceinline__ P get(int i) const { return i < kHeld ? held[i] : *slot(i); }
    __device__ __forceinline__ void set(int i, const P& pack) {
        if (i < kHeld)
            held[i] = pack;
        else
            *slot(i) = pack;
    }

    // Starts to read; who touches a slot waits. `first`: the column where it starts.
    __device__ __forceinline__ void read(const T* row, size_t first = 0) {
        if (place.live) start = RowStart<T, Shape>(row + first);
        near = start.average();
        read_packs(row);
    }
    // Leaves `near` to others.
    __device__ __forceinline__ void read_packs(const T* row) {
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i)
            if (place.holds(i)) read_pack(i, row);
    }
    __device__ __forceinline__ void read_pack(int i, const T* row) {
        const T* const from = row + place.column(i);
        if constexpr (Shape::kAccess * sizeof(T) == 16) {
            if (i >= kHeld) {
                copy_async<false>(slot(i), from);
                return;
            }
        }
        set(i, load<Shape::kAccess, kVec>(from));
    }

    // The rounded sum takes the place of the addends: what is normalized is what is stored.
    __device__ __forceinline__ void add(const T* other, size_t first = 0) {
        // So many packs of the other addend are on their way at once.
        constexpr int kBatch = Shape::kShared > 0 && kHeld > 4 ? 4 : kHeld;
        if (place.live) near = (start + RowStart<T, Shape>(other + first)).average();
#pragma unroll
        for (int begin = 0; begin < Shape::kPacks; begin += kBatch) {
            P theirs[kBatch];
#pragma unroll
            for (int i = begin; i < begin + kBatch && i < Shape::kPacks; ++i)
                if (place.holds(i))
                    theirs[i - begin] = load<Shape::kAccess, kVec>(other + place.column(i));
            if (Shape::kShared > 0 && begin + kBatch > kHeld) ptx::copies_wait();
#pragma unroll
            for (int i = begin; i < begin + kBatch && i < Shape::kPacks; ++i) {
                if (!place.holds(i)) continue;
                A sum[kVec], addend[kVec];
                widened(i, sum);
                widen_pack(theirs[i - begin], addend);
#pragma unroll
                for (int e = 0; e < kVec; ++e) sum[e] += addend[e];
                set(i, narrowed<T>(sum));
            }
        }
    }

    __device__ __forceinline__ void write(T* row) const {
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            if (!place.holds(i)) continue;
            if constexpr (Shape::kAssigns)
                assign<Shape::kAccess, kVec>(row + place.column(i), get(i));
            else
                store<Shape::kAccess, kVec>(row + place.column(i), get(i));
        }
    }

    // Opaque: else the compiler widens 16-bit elements once and keeps all of them as floats over
    // the whole kernel, in twice the registers.
    __device__ __forceinline__ void widened(int i, A (&values)[kVec]) const {
        if constexpr (sizeof(T) == 2)
            widen_pack(opaque(get(i)), values);
        else
            widen_pack(get(i), values);
    }

    // Registers first: a wait before them would let the compiler put off their loads behind it.
    template <class F>
    __device__ __forceinline__ void for_each_pack(F f) const {
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            if (Shape::kShared > 0 && i == kHeld) ptx::copies_wait();
            if (!place.holds(i)) continue;
            A values[kVec];
            widened(i, values);
            f(i, values);
        }
    }

    // By a power of two: exact, but for what becomes smaller than the smallest number of A.
    __device__ __forceinline__ void multiply(A scale) {
        near *= scale;
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            if (!place.holds(i)) continue;
            A values[kVec];
            widened(i, values);
#pragma unroll
            for (int e = 0; e < kVec; ++e) values[e] *= scale;
            set(i, narrowed<T>(values));
        }
    }

    __device__ __forceinline__ typename Range<A>::Bits largest_magnitude() const {
        typename Range<A>::Bits largest = 0;
        for_each_pack([&](int, const A(&x)[kVec]) {
#pragma unroll
            for (int e = 0; e < kVec; ++e) largest = max(largest, Range<A>::magnitude_bits(x[e]));
        });
        return largest;
    }
};

// A parameter's part for one thread. One and Zero stand for a weight and a bias that are absent.
template <int VALUE>
struct Constant {};
using One = Constant<1>;
using Zero = Constant<0>;

// OFFSET: bytes of dynamic shared memory that others have.
template <typename P, typename A, class Shape, int OFFSET>
struct Parameter {
    static constexpr int kVec = Shape::kVec;
    static constexpr bool kEarlyPacks = Shape::kReading == kEarly;
    static constexpr int kEnd =
        OFFSET +
        (Shape::kReading == kStaged ? Shape::kPacks * Shape::kBlock * kVec * sizeof(P) : 0);

    const Place<Shape>& place;
    const P* row;
    Pack<P, kVec> pack[kEarlyPacks ? Shape::kPacks : 1];

    __device__ __forceinline__ Parameter(const Place<Shape>& place, const void* base,
                                         long long offset)
        : place(place), row(static_cast<const P*>(base) + offset) {
        if constexpr (Shape::kReading != kLate) {
#pragma unroll
            for (int i = 0; i < Shape::kPacks; ++i) {
                if (!place.holds(i)) continue;
                if constexpr (kEarlyPacks)
                    pack[i] = fetch(i);
                else
                    copy_async<true>(slot(i), row + place.column(i));
            }
        }
    }

    static __device__ __forceinline__ Pack<P, kVec>* slot(int i) {
        extern __shared__ uint4 slots[];
        return reinterpret_cast<Pack<P, kVec>*>(reinterpret_cast<char*>(slots) + OFFSET) +
               i * Shape::kBlock + threadIdx.x;
    }

    __device__ __forceinline__ Pack<P, kVec> fetch(int i) const {
        return load_constant<Shape::kAccess, kVec>(row + place.column(i));
    }

    __device__ __forceinline__ void widened(int i, A (&values)[kVec]) const {
        if constexpr (Shape::kReading == kStaged)
            widen_pack(*slot(i), values);
        else if constexpr (Shape::kReading == kLate)
            widen_pack(fetch(i), values);
        else if constexpr (sizeof(P) == 2)
            widen_pack(opaque(pack[i]), values);
        else
            widen_pack(pack[i], values);
    }
};

template <int VALUE, typename A, class Shape, int OFFSET>
struct Parameter<Constant<VALUE>, A, Shape, OFFSET> {
    static constexpr int kEnd = OFFSET;

    __device__ __forceinline__ Parameter(const Place<Shape>&, const void*, long long) {}
    __device__ __forceinline__ void widened(int, A (&values)[Shape::kVec]) const {
#pragma unroll
        for (int e = 0; e < Shape::kVec; ++e) values[e] = A(VALUE);
    }
};
