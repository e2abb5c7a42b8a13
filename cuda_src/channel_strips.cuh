// Batch norm, channels first, of channels whose positions are no whole number of vectors: strips of
// neighbouring channels that are, with all their samples on chip.
//
//   strip_norm      forward (channel_norm_strips.cuh)
//   strip_gradient  backward (channel_gradient_strips.cuh)
//
// A row is what a sample has of a strip. A thread takes one vector of it, which may end in another
// channel than it begins in, of every TY-th row. It copies to shared memory itself what it reads
// there, so that it waits for nobody before its sums are complete; then every channel has a warp
// that concludes.
//
// Launch: a CTA a strip; VEC divides the elements of a strip, CHANNELS of them in a row, and a
// channel has at least VEC; every row of every array starts at a multiple of VEC elements; T is not
// double. In Brief: vectors: rows; sets: TY, at most as many; length: vectors of a row, TY times of
// which are at most THREADS; inner_sets: positions of a channel. KIB of dynamic shared memory: for
// the strip of all arrays that are read, a record a thread, and TY * CHANNELS more.
// Arrays: channel_args.cuh. Precision: arithmetic in A, each output rounded once.
#pragma once

#include "channel_tiles.cuh"

template <int VEC, int CHANNELS, int THREADS, int ROWS, int AHEAD, int CTAS, int KIB>
struct StripShape {
    static constexpr int kVec = VEC, kChannels = CHANNELS, kThreads = THREADS, kCtas = CTAS;
    static constexpr int kRows = ROWS;    // of a thread, copied and added up together
    static constexpr int kAhead = AHEAD;  // so many times on their way
    // Of them, between two additions in double: 16 rows at most, with those of the end.
    static constexpr int kRounds = (17 - ROWS) / ROWS;
    static_assert(CHANNELS <= THREADS / 32, "a warp for each channel");
};

// What this thread works on.
template <class Shape>
struct StripPlace {
    unsigned width;    // vectors of a row
    unsigned ty;       // rows that all threads take at a time
    unsigned stride;   // vectors on chip from one of a thread's rows to its next
    unsigned rows;     // of the strip
    unsigned row;      // of this thread, the first
    unsigned vector;   // of the row
    unsigned channel;  // of the strip: that of its first element
    unsigned length;   // positions of a channel
    unsigned split;    // elements before the next channel begins, or VEC
    int left;          // rows from the thread's first on; 0 where it has none

    __device__ __forceinline__ explicit StripPlace(const ChannelArgs& args)
        : width(args.brief.length.size),
          ty(args.brief.sets),
          stride(opaque(ty * width)),
          rows(args.brief.vectors),
          row(args.brief.length.quotient(threadIdx.x, args.brief.length_shift)),
          vector(threadIdx.x - row * width),
          length(args.brief.inner_sets.size) {
        const unsigned element = vector * Shape::kVec;
        channel = args.brief.inner_sets.quotient(element, args.brief.inner_shift);
        split = min((channel + 1) * length - element, unsigned(Shape::kVec));
        left = row < ty ? int(rows - row) : 0;
    }

    __device__ __forceinline__ long long first_channel() const {
        return (long long)blockIdx.x * Shape::kChannels;
    }
    // The thread's first vector in an array with `step` elements from row to row.
    __device__ __forceinline__ long long offset(long long step) const {
        return row * step + first_channel() * length + vector * Shape::kVec;
    }
    // Whether it is the one that speaks for the channel of its first element.
    __device__ __forceinline__ bool speaks() const {
        return row == 0 && vector * Shape::kVec - channel * length < Shape::kVec;
    }
    __device__ __forceinline__ bool crosses() const { return split < Shape::kVec && row < ty; }
    // Of the other channel that the vector has elements of.
    __device__ __forceinline__ unsigned next_channel() const {
        return channel + (split < Shape::kVec);
    }

    // group(): before every kRows rows that the thread has, and at the end; f(): every row.
    template <class G, class F>
    __device__ __forceinline__ void for_each_row(G group, F f) const {
        constexpr int kRows = Shape::kRows;
        const int step = int(ty);
        int rest = left;
#pragma unroll 1
        for (; rest > (kRows - 1) * step; rest -= kRows * step) {
            group();
#pragma unroll
            for (int i = 0; i < kRows; ++i) f();
        }
        ptx::copies_wait_but<0>();
#pragma unroll 1
        for (; rest > 0; rest -= step) f();
    }
};

// A thread's vectors of one array: on their way, and on chip.
template <typename T, class Shape>
struct StripRows {
    using P = Pack<T, Shape::kVec>;

    const StripPlace<Shape>& place;
    P* const slot;  // of its first vector
    const T* from;
    P* to;
    long long step;  // from one of its rows to the next
    int left;

    // `number` of the arrays that are read.
    __device__ __forceinline__ StripRows(const ChannelArgs& args, const StripPlace<Shape>& place,
                                         const void* array, long long row_step, unsigned number)
        : place(place),
          slot(slots() + number * place.rows * place.width + threadIdx.x),
          from(static_cast<const T*>(array) + place.offset(row_step)),
          to(slot),
          step(place.ty * row_step),
          left(place.left) {
        fix(from, step);
    }

    static __device__ __forceinline__ P* slots() {
        extern __shared__ uint4 slots[];
        return reinterpret_cast<P*>(slots);
    }
    // Asks for the next kRows.
    __device__ __forceinline__ void copy() {
        const int ty = int(place.ty);
        if (left > (Shape::kRows - 1) * ty) {
#pragma unroll
            for (int i = 0; i < Shape::kRows; ++i) copy_row();
            left -= Shape::kRows * ty;
        } else {
#pragma unroll 1
            for (; left > 0; left -= ty) copy_row();
        }
    }
    __device__ __forceinline__ void copy_row() {
        copy_in_parts<Shape::kVec>(to, from);
        from += step;
        to += place.stride;
    }
};

// The thread's vectors of an array that is on chip, one after the other.
template <typename T, class Shape>
struct StripReader {
    using A = Accumulator<T>;
    using P = Pack<T, Shape::kVec>;

    const P* at;
    unsigned stride;

    __device__ __forceinline__ explicit StripReader(const StripRows<T, Shape>& rows)
        : at(rows.slot), stride(rows.place.stride) {}

    __device__ __forceinline__ void next(A (&values)[Shape::kVec]) {
        widen_pack(opaque(*at), values);
        at += stride;
    }
};
template <typename T, class Shape>
struct StripWriter {
    using A = Accumulator<T>;

    T* at;
    long long step;

    __device__ __forceinline__ StripWriter(const ChannelArgs& args, const StripPlace<Shape>& place)
        : at(static_cast<T*>(args.y) + place.offset(args.run_step[kChannelY])),
          step(place.ty * args.run_step[kChannelY]) {
        fix(at, step);
    }

    __device__ __forceinline__ void next(const A (&values)[Shape::kVec]) {
        store<Shape::kVec, Shape::kVec>(at, narrowed<T>(values));
        at += step;
    }
};

// Adds a thread's elements, of which the first `split` are of one channel and the others of the
// next.
template <typename A, int VEC>
__device__ __forceinline__ void add_split(double (&to)[2], const A (&values)[VEC], unsigned split) {
    A sum[2] = {values[0], A(0)};
#pragma unroll
    for (int e = 1; e < VEC; ++e) {
        sum[0] += e < split ? values[e] : A(0);
        sum[1] += e < split ? A(0) : values[e];
    }
    to[0] += sum[0];
    to[1] += sum[1];
}

// Records of a strip's channels, made by all its threads.
template <class R, class Shape>
struct StripRecords {
    const StripPlace<Shape>& place;
    R* const of_first;  // channel of a thread's vector
    R* const of_next;   // channel, for a row and a channel that a vector crosses into

    // `packs`: vectors on chip, of type P, after which they lie.
    template <class P>
    static __device__ __forceinline__ R* behind(P* slots, unsigned packs) {
        constexpr unsigned kUnit = sizeof(uint4) / sizeof(P);
        return reinterpret_cast<R*>(slots + (packs + kUnit - 1) / kUnit * kUnit);
    }
    template <typename T>
    __device__ __forceinline__ StripRecords(const StripRows<T, Shape>& x, unsigned arrays)
        : place(x.place),
          of_first(behind(x.slots(), arrays * place.rows * place.width)),
          of_next(of_first + Shape::kThreads) {}

    __device__ __forceinline__ void leave(const R (&mine)[2]) const {
        of_first[threadIdx.x] = mine[0];
        if (place.crosses()) of_next[place.row * Shape::kChannels + place.channel + 1] = mine[1];
    }
    // By a warp, after a barrier: of a channel, in all its lanes.
    __device__ __forceinline__ R total(unsigned channel) const {
        constexpr unsigned kVec = Shape::kVec;
        const unsigned lane = threadIdx.x % 32, start = channel * place.length;
        const unsigned first = (start + kVec - 1) / kVec;
        const unsigned count = (start + place.length + kVec - 1) / kVec - first;
        R sum = {};
#pragma unroll 1
        for (unsigned i = lane; i < count * place.ty; i += 32) {
            const unsigned row = i / count;
            sum = sum + of_first[row * place.width + first + (i - row * count)];
        }
        if (start % kVec != 0) {
#pragma unroll 1
            for (unsigned row = lane; row < place.ty; row += 32)
                sum = sum + of_next[row * Shape::kChannels + channel];
        }
        return Lanes<32>().combined(sum, Plus());
    }
};

// What the threads of a strip tell each other: of every channel what its elements are taken about
// and what becomes of them, and whether it is known already.
template <class Values, typename A, class Shape>
struct StripTable {
    Values by[Shape::kChannels];
    A centre[Shape::kChannels];
    bool sound[Shape::kChannels];
    bool all_sound;

    static __device__ __forceinline__ StripTable& get() {
        __shared__ StripTable tables[1];
        return tables[0];
    }
    __device__ __forceinline__ void of_elements(const StripPlace<Shape>& place,
                                                Values (&values)[Shape::kVec]) const {
        const Values first = by[place.channel], next = by[place.next_channel()];
#pragma unroll
        for (int e = 0; e < Shape::kVec; ++e) values[e] = e < place.split ? first : next;
    }
};

// The channel that a warp concludes for, if there is one.
template <class Shape>
struct StripOwner {
    unsigned channel;  // of the strip

    __device__ __forceinline__ StripOwner() : channel(threadIdx.x / 32) {}
    __device__ __forceinline__ explicit operator bool() const { return channel < Shape::kChannels; }
    __device__ __forceinline__ bool first() const { return threadIdx.x % 32 == 0; }
    __device__ __forceinline__ long long of_all() const {
        return (long long)blockIdx.x * Shape::kChannels + channel;
    }
};
