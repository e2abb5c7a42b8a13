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
    unsigned cols;
    unsigned vectors;  // in the row
    unsigned first;    // of this thread

    // `skipped` vectors of the row belong to others: other CTAs of the cluster, other segments.
    __device__ __forceinline__ Place(const RowArgs& args, Row row, unsigned skipped)
        : row(row),
          live(Shape::kRows == 1 || row < args.rows),
          cols(args.cols),
          vectors(live ? (cols + (Shape::kRagged ? Shape::kVec - 1 : 0)) / Shape::kVec : 0),
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
    // Of a pack that is held. Only the last vector may have fewer than the others.
    __device__ __forceinline__ unsigned elements(int pack) const {
        if (!Shape::kRagged || (!Shape::kSegment && pack < Shape::kPacks - 1)) return Shape::kVec;
        return min(cols - vector(pack) * Shape::kVec, unsigned(Shape::kVec));
    }
    // Lanes with the vectors before and behind that of a whole pack, where these are whole, too.
    __device__ __forceinline__ ptx::Neighbours neighbours(int pack) const {
        const unsigned lane = threadIdx.x % Shape::kLanes;
        const bool last = lane == Shape::kLanes - 1;
        return {lane > 0, !last && vector(pack) + 2 <= cols / Shape::kVec};
    }
};

// Of a pack that is held, and of any.
template <class Shape>
__device__ __forceinline__ unsigned elements_of(const Place<Shape>& place, int pack) {
    if constexpr (Shape::kRagged) return place.elements(pack);
    return Shape::kVec;
}
template <class Shape>
__device__ __forceinline__ unsigned held_of(const Place<Shape>& place, int pack) {
    return place.holds(pack) ? elements_of(place, pack) : 0;
}

// The first elements of a row, whose average is near its mean: of one alone every hundredth lies so
// far outside that its row has to be taken again.
template <typename T, class Shape>
struct RowStart {
    static constexpr int kCount = Shape::kVec >= 4 ? 4 : 1;  // of the first pack
    static constexpr int kWidest = Shape::kMasked ? 1 : Shape::kAccess;
    static constexpr int kAccess = kWidest < kCount ? kWidest : kCount;
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

// Where ends are masked: the elements of a pack that are the row's, none if it is not held; the
// others are their neighbours in memory.
struct Span {
    unsigned begin, end;

    __device__ __forceinline__ bool lacks(unsigned e) const { return e < begin || e >= end; }
};

// TILE: how many tiles have their slots before.
template <typename T, class Shape, int TILE = 0>
struct RowTile {
    static constexpr int kVec = Shape::kVec;
    static constexpr int kHeld = Shape::kPacks - Shape::kShared;
    static constexpr bool kShift = kShifted<T, Shape::kAccess, kVec>;
    static constexpr bool kFinish = kShift && kOfWord<T> > 1;  // others start with a word
    // So many values of T a plain sum in A holds without rounding, unless they differ by more
    // than 2^12, and then it rounds far below what a 16-bit result shows.
    static constexpr int kExactSum = sizeof(T) == 2 ? 8 : 0;
    using A = Accumulator<T>;
    using P = Pack<T, kVec>;

    const Place<Shape>& place;
    RowStart<T, Shape> start;
    A near;  // the row's mean
    P held[kHeld];
    const T* unfinished = nullptr;  // whose packs have begun to be read
    // Where ends are masked, by pack: whether it is held; whether it lacks some elements.
    unsigned held_bits = 0, end_bits = 0;

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

    // Around the packs, in their order: behind each that was to be read, before each that is used.
    static __device__ __forceinline__ void begun(int i) {
        Arrivals<Shape::kShared>::begun(i - kHeld);
    }
    static __device__ __forceinline__ void await(int i) {
        Arrivals<Shape::kShared>::await(i - kHeld);
    }

    __device__ __forceinline__ bool holds(int i) const {
        if constexpr (Shape::kMasked) return held_bits >> i & 1;
        return place.holds(i);
    }
    // Where ends are masked: whether all elements of a pack that is held are the row's; which.
    __device__ __forceinline__ bool is_whole(int i) const { return !(end_bits >> i & 1); }
    __device__ __forceinline__ Span span_of(int i) const {
        return typename Place<Shape>::Spot(place, i).span();
    }

    // Starts to read; who touches a slot waits. `first`: the column where it starts.
    __device__ __forceinline__ void read(const T* row, size_t first = 0) {
        if (place.live) start = RowStart<T, Shape>(row + first);
        if constexpr (!kFinish) near = start.average();
        read_packs(row);
        if constexpr (kFinish) near = start.average();  // awaits it
    }
    // Leaves `near` to others.
    __device__ __forceinline__ void read_packs(const T* row) {
        if constexpr (kFinish) unfinished = row;
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            if constexpr (Shape::kMasked)
                read_masked(i, row);
            else if ((kShift && Shape::kRagged) || place.holds(i))
                read_pack(i, row);
            begun(i);
        }
    }
    __device__ __forceinline__ void read_pack(int i, const T* row) {
        if constexpr (Shape::kAccess * sizeof(T) == 16) {
            if (i >= kHeld) {
                copy_async<false>(slot(i), row + place.column(i));
                return;
            }
        }
        set(i, begun_pack(i, row));
    }
    // Packs that are shifted come in two steps: none is waited for before all are on their way.
    // Those of a row are whole blocks apart; those of a set lie anywhere, each.
    __device__ __forceinline__ P begun_pack(int i, const T* row) const {
        if constexpr (kShift && Shape::kRagged) {
            P pack;
            begin_shifted(Origin<const T>(row), place.column(i), held_of(place, i), Fetch(),
                          pack.raw);
            return pack;
        } else {
            return begin_load<Shape::kAccess, kVec>(row + place.column(i));
        }
    }
    // With its neighbours in memory, where there is some.
    __device__ __forceinline__ void read_masked(int i, const T* row) {
        const typename Place<Shape>::Spot spot(place, i);
        const Span span = spot.span();
        const bool held = span.end > 0, whole = span.end - span.begin == kVec;
        held_bits |= unsigned(held) << i;
        end_bits |= unsigned(held && !whole) << i;
        const T* const from = row + spot.column();
        if (held && !whole && spot.ends_array())
            set(i, begin_load<kVec, kVec>(from, span.end));
        else if (held && i >= kHeld)
            copy_async<false>(slot(i), from);
        else if (held)
            set(i, begin_load<kVec, kVec>(from));
    }
    __device__ __forceinline__ P finished_pack(int i, const T* row, P pack) const {
        if constexpr (kShift && Shape::kRagged)
            finish_shifted(Origin<const T>(row), place.column(i), held_of(place, i), Fetch(),
                           pack.raw);
        else if (kShift && place.holds(i))
            pack = finish_load<Shape::kAccess>(pack, row + place.column(i));
        return pack;
    }
    __device__ __forceinline__ void finish_packs() {
        if (!kFinish || unfinished == nullptr) return;
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) set(i, finished_pack(i, unfinished, get(i)));
        unfinished = nullptr;
    }

    // The rounded sum takes the place of the addends: what is normalized is what is stored.
    __device__ __forceinline__ void add(const T* other, size_t first = 0) {
        // So many packs of the other addend are on their way at once.
        constexpr int kBatch = (Shape::kShared > 0 || kShift) && kHeld > 4 ? 4 : kHeld;
        if (place.live) near = (start + RowStart<T, Shape>(other + first)).average();
#pragma unroll
        for (int begin = 0; begin < Shape::kPacks; begin += kBatch) {
            P theirs[kBatch];
#pragma unroll
            for (int i = begin; i < begin + kBatch && i < Shape::kPacks; ++i)
                if (place.holds(i)) theirs[i - begin] = begun_pack(i, other);
            if (begin == 0) finish_packs();
#pragma unroll
            for (int i = begin; i < begin + kBatch && i < Shape::kPacks; ++i) {
                await(i);
                if (!place.holds(i)) continue;
                A sum[kVec], addend[kVec];
                widened(i, sum);
                widen_pack(finished_pack(i, other, theirs[i - begin]), addend);
#pragma unroll
                for (int e = 0; e < kVec; ++e) sum[e] += addend[e];
                set(i, narrowed<T>(sum));
            }
        }
    }

    __device__ __forceinline__ void write(T* row) const {
        if constexpr (kShift && Shape::kRagged) {
            write_shifted(row);
        } else {
#pragma unroll
            for (int i = 0; i < Shape::kPacks; ++i) {
                if (!holds(i)) continue;
                if constexpr (Shape::kMasked) {
                    if (!is_whole(i)) {
                        const Span span = span_of(i);
                        write_elements(row + place.column(i), get(i).raw, span.end, span.begin);
                        continue;
                    }
                }
                if constexpr (Shape::kAssigns)
                    assign<Shape::kAccess, kVec>(row + place.column(i), get(i));
                else
                    store<Shape::kAccess, kVec>(row + place.column(i), get(i));
            }
        }
    }
    // In little code, for what is rare.
    __device__ __forceinline__ void write_by_elements(T* row) const {
        if constexpr (kShift) {
#pragma unroll
            for (int i = 0; i < Shape::kPacks; ++i)
                if (place.holds(i))
                    write_elements(row + place.column(i), get(i).raw, elements_of(place, i));
        } else {
            write(row);
        }
    }
    __device__ __forceinline__ void write_shifted(T* row) const {
        const Origin<T> origin(row);
        by_first_word<Shape::kPacks>(origin, [&](auto first) {
            constexpr int kFirst = decltype(first)::value;
#pragma unroll
            for (int i = 0; i < Shape::kPacks; ++i) {
                if (!place.holds(i)) continue;
                const unsigned count = place.elements(i);
                if (count < kVec)
                    write_elements(row + place.column(i), get(i).raw, count);
                else
                    write_blocks<kFirst>(origin, place.column(i), get(i).raw, place.neighbours(i));
            }
        });
    }

    // Opaque: else the compiler widens 16-bit elements once and keeps all of them as floats over
    // the whole kernel, in twice the registers.
    __device__ __forceinline__ void widened(int i, A (&values)[kVec]) const {
        if constexpr (sizeof(T) == 2)
            widen_pack(opaque(get(i)), values);
        else
            widen_pack(get(i), values);
        if constexpr (Shape::kMasked) {
            if (is_whole(i)) return;
            const Span span = span_of(i);
#pragma unroll
            for (int e = 0; e < kVec; ++e)
                if (span.lacks(e)) values[e] = 0;
        }
    }

    // Registers first: a wait before them would let the compiler put off their loads behind it.
    template <class F>
    __device__ __forceinline__ void for_each_pack(F f) const {
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            await(i);
            if (!holds(i)) continue;
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
            if (!holds(i)) continue;
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

template <typename T, class Shape, int TILE>
__device__ __forceinline__ bool may_lack(const RowTile<T, Shape, TILE>& x, int pack) {
    if constexpr (Shape::kMasked) return !x.is_whole(pack);
    return Shape::kRagged;
}
template <typename T, class Shape, int TILE>
__device__ __forceinline__ auto missing_of(const RowTile<T, Shape, TILE>& x, int pack) {
    if constexpr (Shape::kMasked) {
        const Span span = x.span_of(pack);
        return [=](unsigned e) { return span.lacks(e); };
    } else {
        return [&x, pack](unsigned e) { return e >= elements_of(x.place, pack); };
    }
}

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
                    copy_async<true>(slot(i), row + place.column(i), elements_of(place, i));
            }
        }
    }

    static __device__ __forceinline__ Pack<P, kVec>* slot(int i) {
        extern __shared__ uint4 slots[];
        return reinterpret_cast<Pack<P, kVec>*>(reinterpret_cast<char*>(slots) + OFFSET) +
               i * Shape::kBlock + threadIdx.x;
    }

    __device__ __forceinline__ Pack<P, kVec> fetch(int i) const {
        return begin_load<Shape::kOfParameters, kVec, FetchConstant>(row + place.column(i),
                                                                     elements_of(place, i));
    }
    __device__ __forceinline__ Pack<P, kVec> finished(int i, const Pack<P, kVec>& begun) const {
        return finish_load<Shape::kOfParameters, FetchConstant>(begun, row + place.column(i),
                                                                elements_of(place, i));
    }

    __device__ __forceinline__ void widened(int i, A (&values)[kVec]) const {
        if constexpr (Shape::kReading == kStaged)
            widen_pack(*slot(i), values);
        else if constexpr (Shape::kReading == kLate)
            widen_pack(finished(i, fetch(i)), values);
        else if constexpr (sizeof(P) == 2)
            widen_pack(opaque(finished(i, pack[i])), values);
        else
            widen_pack(finished(i, pack[i]), values);
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
