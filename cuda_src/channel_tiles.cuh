// Tiles of columns: which rows a thread takes, how they are read and written, and how the threads
// of a column find each other.
//
// A thread takes VEC neighbouring columns, TX threads a row of the tile, TY rows at a time; a batch
// is PACKS times as many rows. Blocks take the batches of a plane in turns: all of a launch walks
// memory from one end to the other, so that what was read last is what L2 still holds.
//
// Launch: grid = planes * segments * tiles, segments being blocks; block = TX * TY; segment_rows =
// segments * TY * PACKS. VEC divides the number of columns.
// Arrays: channel_args.cuh.
#pragma once

#include "channel_args.cuh"

constexpr int kBetween = 16;  // rows between two additions to a pair

template <int VEC, int ACCESS, int TX, int TY, int PACKS, int CTAS>
struct ColumnShape {
    static constexpr int kVec = VEC, kAccess = ACCESS, kTx = TX, kTy = TY;
    static constexpr int kPacks = PACKS;  // rows a thread holds, or reads at a time
    static constexpr int kCtas = CTAS;
    static constexpr int kBatch = TY * PACKS;
    // Of two batches each, between two additions to a pair.
    static constexpr unsigned kRounds = 2 * PACKS < kBetween ? kBetween / (2 * PACKS) : 1;
    static constexpr int kBlock = TX * TY, kWarps = kBlock / 32, kTile = TX * VEC;
    static_assert(TX <= 32 && kTile <= kBlock, "a thread for each column of a tile");
};

template <class Shape>
struct ColumnPlace {
    static constexpr int kTy = Shape::kTy, kBatch = Shape::kBatch;

    unsigned tile, block;
    long long plane, column, row;  // of this thread, in the first batch of the block
    bool active;

    __device__ __forceinline__ ColumnPlace(const ChannelArgs& args, unsigned index) {
        const unsigned tiles = (unsigned long long)(args.vectors + Shape::kTile - 1) / Shape::kTile;
        const unsigned above = index / tiles;
        tile = index - above * tiles;
        plane = above / unsigned(args.segments);
        block = above - unsigned(plane) * unsigned(args.segments);
        column = (long long)tile * Shape::kTile + threadIdx.x % Shape::kTx * Shape::kVec;
        active = column < args.vectors;
        // The others read what the first thread reads, and nobody asks what they make of it.
        if (!active) column = (long long)tile * Shape::kTile;
        row = (long long)block * kBatch + threadIdx.x / Shape::kTx;
    }

    __device__ __forceinline__ void move_to(unsigned other) {
        row += ((long long)other - block) * kBatch;
        block = other;
    }

    // Rows of the block's first batch, and how many of them this thread takes.
    __device__ __forceinline__ int rows(const ChannelArgs& args) const {
        return min(args.runs - (long long)block * kBatch, (long long)kBatch);
    }
    static __device__ __forceinline__ int packs(int rows) {
        return (rows + kTy - 1 - int(threadIdx.x / Shape::kTx)) / kTy;
    }

    template <typename T>
    __device__ __forceinline__ T* address(const ChannelArgs& args, void* base,
                                          ChannelArray array) const {
        return static_cast<T*>(base) + plane * args.outer_step[array] + row * args.run_step[array] +
               column;
    }
    template <typename T>
    __device__ __forceinline__ const T* address(const ChannelArgs& args, const void* base,
                                                ChannelArray array) const {
        return address<T>(args, const_cast<void*>(base), array);
    }
    // The column of the tile that this thread, one of the first kTile, looks after.
    __device__ __forceinline__ long long own_column() const {
        return (long long)tile * Shape::kTile + threadIdx.x;
    }
    __device__ __forceinline__ bool owns(const ChannelArgs& args) const {
        return threadIdx.x < Shape::kTile && own_column() < args.vectors;
    }
};

// Channel of a column: those of a channel are neighbours.
__device__ __forceinline__ long long channel_of(const ChannelArgs& args, long long column) {
    return args.channel.size == 1 ? column : column / args.channel.size;
}

// The batches of a block: whole ones, and rows of one more.
template <class Shape>
struct BlockRows {
    unsigned whole;
    int rest;

    __device__ __forceinline__ BlockRows(const ChannelArgs& args, unsigned block) {
        constexpr int kBatch = Shape::kBatch;
        const unsigned batches = (unsigned long long)args.runs / kBatch;
        whole = batches / unsigned(args.segments);
        const long long passed = ((long long)whole * unsigned(args.segments) + block) * kBatch;
        rest = min(max(args.runs - passed, 0ll), (long long)kBatch);
        if (rest == kBatch) {
            ++whole;
            rest = 0;
        }
    }
    __device__ __forceinline__ unsigned batches() const { return whole + (rest > 0); }
    __device__ __forceinline__ int packs(unsigned batch) const {
        return batch < whole ? Shape::kPacks : batch == whole ? ColumnPlace<Shape>::packs(rest) : 0;
    }
    __device__ __forceinline__ long long count() const {
        return (long long)whole * Shape::kBatch + rest;
    }
};

// The compiler must take an address and a step as they are: it would rather work them out anew,
// for every row.
template <typename T>
__device__ __forceinline__ void fix(T*& at, long long& step) {
    at = ptx::opaque_global(at);
    asm volatile("" : "+l"(step));
}

// The rows of one thread, in registers.
template <typename T, class Shape>
struct HeldRows {
    using A = Accumulator<T>;
    Pack<T, Shape::kVec> held[Shape::kPacks];
    int packs;

    // `step`: from one of them to the next.
    __device__ __forceinline__ void read(const T* from, long long step, int count) {
        packs = count;
        fix(from, step);
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i)
            if (i < packs) held[i] = load<Shape::kAccess, Shape::kVec>(from + i * step);
    }
    // Those of the first batch of a block.
    __device__ __forceinline__ void read(const ChannelArgs& args, const ColumnPlace<Shape>& place,
                                         ChannelArray array) {
        read(place.template address<T>(args, array == kGradOut ? args.grad_out : args.x, array),
             Shape::kTy * args.run_step[array], place.packs(place.rows(args)));
    }

    __device__ __forceinline__ void widened(int i, A (&values)[Shape::kVec]) const {
        widen_pack(opaque(held[i]), values);
    }
    // What f(i, values) makes of row i, to y.
    template <bool STREAMING = false, class F>
    __device__ __forceinline__ void write(T* y, long long step, F f) const {
        fix(y, step);
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            if (i >= packs) continue;
            A values[Shape::kVec];
            widened(i, values);
            f(i, values);
            if constexpr (STREAMING)
                store_streaming<Shape::kAccess, Shape::kVec>(y + i * step, narrowed<T>(values));
            else
                store<Shape::kAccess, Shape::kVec>(y + i * step, narrowed<T>(values));
        }
    }
    __device__ __forceinline__ void begin() const {}
    // f(values) for every row, done() now and then: after no more than kBetween rows.
    template <class F, class D>
    __device__ __forceinline__ void for_each_row(F f, D done) const {
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            if (i >= packs) continue;
            A values[Shape::kVec];
            widened(i, values);
            f(values);
        }
        done();
    }
    __device__ __forceinline__ const HeldRows& again() const { return *this; }
};

// Where a thread is in an array of whose rows it takes a batch after the other.
template <typename T, class Shape>
struct RowWalk {
    const T* at;
    long long step, leap;  // to its next row, to its next batch

    __device__ __forceinline__ RowWalk(const ChannelArgs& args, const ColumnPlace<Shape>& place,
                                       ChannelArray array)
        : at(place.template address<T>(args, array == kGradOut ? args.grad_out : args.x, array)),
          step(Shape::kTy * args.run_step[array]),
          leap(args.segment_rows * args.run_step[array]) {}

    __device__ __forceinline__ void read(HeldRows<T, Shape>& rows, int packs) {
        rows.read(at, step, packs);
        at += leap;
    }
};

// A block of rows out of memory, a batch after the other: takes few registers. Adds as StreamedRows
// does: columns that were sound come to the same bits when their neighbours are taken again.
template <typename T, class Shape>
struct BatchedRows {
    RowWalk<T, Shape> walk;
    const BlockRows<Shape>& rows;

    template <class F, class D>
    __device__ __forceinline__ void for_each_row(F f, D done) {
        const unsigned batches = rows.batches();
#pragma unroll 1
        for (unsigned i = 0; i < batches; ++i) {
            HeldRows<T, Shape> batch;
            walk.read(batch, rows.packs(i));
            batch.for_each_row(f, [] {});
            if (i % (2 * Shape::kRounds) == 2 * Shape::kRounds - 1) done();
        }
        done();
    }
};

// The same with one batch on its way while another is added up.
template <typename T, class Shape>
struct StreamedRows {
    using A = Accumulator<T>;
    const ChannelArgs& args;
    const ColumnPlace<Shape>& place;
    const BlockRows<Shape>& rows;
    RowWalk<T, Shape> walk;
    HeldRows<T, Shape> even, odd;
    unsigned next = 0;

    __device__ __forceinline__ StreamedRows(const ChannelArgs& args,
                                            const ColumnPlace<Shape>& place,
                                            const BlockRows<Shape>& rows)
        : args(args), place(place), rows(rows), walk(args, place, kChannelX) {
        read(even);
        read(odd);
    }
    __device__ __forceinline__ void read(HeldRows<T, Shape>& batch) {
        walk.read(batch, rows.packs(next++));
    }

    __device__ __forceinline__ void begin() const {}
    template <class F, class D>
    __device__ __forceinline__ void for_each_row(F f, D done) {
        const unsigned batches = rows.batches();
#pragma unroll 1
        for (unsigned i = 0; i < batches; i += 2) {
            even.for_each_row(f, [] {});
            read(even);
            odd.for_each_row(f, [] {});
            read(odd);
            if (i / 2 % Shape::kRounds == Shape::kRounds - 1) done();
        }
        if constexpr (Shape::kRounds > 1) done();
    }
    __device__ __forceinline__ BatchedRows<T, Shape> again() const {
        return {RowWalk<T, Shape>(args, place, kChannelX), rows};
    }
};

template <typename R>
__device__ __forceinline__ R* column_records() {
    extern __shared__ uint4 slots[];
    return reinterpret_cast<R*>(slots);
}

// One of two, number by number: the compiler would choose among addresses, and needs memory then.
template <typename V>
__device__ __forceinline__ V chosen(bool first, V a, V b) {
    return first ? a : b;
}
template <typename A>
__device__ __forceinline__ Pair<A> chosen(bool first, Pair<A> a, Pair<A> b) {
    return {chosen(first, a.hi, b.hi), chosen(first, a.lo, b.lo)};
}
template <typename V>
__device__ __forceinline__ Moments<V> chosen(bool first, Moments<V> a, Moments<V> b) {
    return {chosen(first, a.sum, b.sum), chosen(first, a.squares, b.squares)};
}

// Every thread's records of its columns, added over the warp: kTile a warp, to shared memory. Each
// of two lanes goes on with half of the columns: shuffles are scarce (Lanes::halves).
template <class Shape, int DISTANCE = 16, int COUNT = Shape::kVec, class R, class Combine>
__device__ __forceinline__ void gather_columns(R (&mine)[Shape::kVec], Combine combine,
                                               unsigned column) {
    constexpr int kHalf = COUNT / 2;
    if constexpr (DISTANCE < Shape::kTx) {
        // Where there are more lanes than columns, several have the same.
        constexpr unsigned kSame = (32 / Shape::kVec - 1) & ~(Shape::kTx - 1);
        if (threadIdx.x & kSame) return;
        R* const of_warp = column_records<R>() + threadIdx.x / 32 * Shape::kTile + column;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) of_warp[e] = mine[e];
    } else if constexpr (kHalf == 0) {
        mine[0] = combine(mine[0], Lanes<32>().partner(mine[0], DISTANCE));
        gather_columns<Shape, DISTANCE / 2, COUNT>(mine, combine, column);
    } else {
        const bool upper = threadIdx.x & DISTANCE;
#pragma unroll
        for (int e = 0; e < kHalf; ++e) {
            const R given = chosen(upper, mine[e], mine[e + kHalf]);
            const R kept = chosen(upper, mine[e + kHalf], mine[e]);
            mine[e] = combine(kept, Lanes<32>().partner(given, DISTANCE));
        }
        gather_columns<Shape, DISTANCE / 2, kHalf>(mine, combine, column + (upper ? kHalf : 0));
    }
}
template <class Shape, class R, class Combine>
__device__ __forceinline__ void gather_columns(R (&mine)[Shape::kVec], Combine combine) {
    gather_columns<Shape>(mine, combine, threadIdx.x % Shape::kTx * Shape::kVec);
}
// What all warps have of column `column` of the tile.
template <class Shape, class R, class Combine>
__device__ __forceinline__ R total_of_column(unsigned column, Combine combine) {
    const R* const of_warp = column_records<R>() + column;
    R total = of_warp[0];
#pragma unroll
    for (int warp = 1; warp < Shape::kWarps; ++warp)
        total = combine(total, of_warp[warp * Shape::kTile]);
    return total;
}

template <int WARPS>
__device__ __forceinline__ bool any_of_block(bool mine) {
    __shared__ int says[WARPS];
    const bool any_of_warp = __any_sync(0xffffffffu, mine);
    if (threadIdx.x % 32 == 0) says[threadIdx.x / 32] = any_of_warp;
    __syncthreads();
    bool any = false;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) any |= says[warp] != 0;
    __syncthreads();
    return any;
}

// What `make` gives to the threads that look after a column, for all that work on it: that of a
// thread's column e at e * kTx. (Were they neighbours, threads would ask the same banks.)
template <class Shape, class F>
__device__ __forceinline__ auto share_columns(bool owns, F make) {
    using Values = decltype(make());
    __shared__ Values of_tile[Shape::kTile];
    if (owns) of_tile[threadIdx.x % Shape::kVec * Shape::kTx + threadIdx.x / Shape::kVec] = make();
    __syncthreads();
    return static_cast<const Values*>(of_tile + threadIdx.x % Shape::kTx);
}
template <class Shape, class Values, class F>
__device__ __forceinline__ void share_columns(bool owns, Values (&by)[Shape::kVec], F make) {
    const Values* const mine = share_columns<Shape>(owns, make);
#pragma unroll
    for (int e = 0; e < Shape::kVec; ++e) by[e] = mine[e * Shape::kTx];
}
