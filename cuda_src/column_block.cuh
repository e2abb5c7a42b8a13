// A block of rows of a tile of columns on its way to shared memory, as far as there is room, and
// out of it again. Every thread copies what it reads itself: nobody waits for another.
//
// Rows of a block: channel_tiles.cuh. Dynamic shared memory: as channel_columns_kept.cuh has it.
#pragma once

#include "channel_tiles.cuh"

// A block of rows, of one array or two: batches of it in shared memory, behind the records of warps
// and columns, with a place for every pack of every thread; an even number where others follow.
template <typename T, class Shape, int ARRAYS>
struct KeptBlock {
    static constexpr int kAhead = 4 / ARRAYS;  // batches on their way
    static constexpr int kRecords =
        Shape::kWarps * Shape::kTile * 2 * int(sizeof(Wide<Accumulator<T>>));
    using Slot = Pack<T, Shape::kVec>;
    using Batch = HeldRows<T, Shape>[ARRAYS];
    static_assert(sizeof(Slot) == 16, "one transaction");

    unsigned count = 0;  // batches that are kept

    static __device__ __forceinline__ Slot* slot(unsigned batch, int array) {
        Slot* const first = reinterpret_cast<Slot*>(column_records<char>() + kRecords);
        return first + (batch * ARRAYS + array) * Shape::kPacks * Shape::kBlock + threadIdx.x;
    }
    static __device__ __forceinline__ RowWalk<T, Shape> walk(const ChannelArgs& args,
                                                             const ColumnPlace<Shape>& place,
                                                             int array) {
        return {args, place, array == 0 ? kChannelX : kGradOut};
    }

    // Batches on their way to shared memory, one after the other.
    struct Fetching {
        const T* from[ARRAYS];
        long long step[ARRAYS], leap[ARRAYS];
        unsigned next = 0;

        __device__ __forceinline__ Fetching(const ChannelArgs& args,
                                            const ColumnPlace<Shape>& place) {
#pragma unroll
            for (int array = 0; array < ARRAYS; ++array) {
                const RowWalk<T, Shape> of_array = walk(args, place, array);
                from[array] = of_array.at;
                step[array] = of_array.step;
                leap[array] = of_array.leap;
                fix(from[array], step[array]);
            }
        }
        // There after ptx::copies_wait_but.
        __device__ __forceinline__ void fetch(int packs) {
#pragma unroll
            for (int array = 0; array < ARRAYS; ++array) {
                Slot* const to = slot(next, array);
#pragma unroll
                for (int i = 0; i < Shape::kPacks; ++i)
                    if (i < packs)
                        copy_async<false>(to + i * Shape::kBlock, from[array] + i * step[array]);
                from[array] += leap[array];
            }
            ++next;
            ptx::copies_commit();
        }
    };

    __device__ __forceinline__ Fetching begin(const ChannelArgs& args,
                                              const ColumnPlace<Shape>& place,
                                              const BlockRows<Shape>& rows) {
        count = min(args.kept.batches, rows.batches());
        Fetching fetching(args, place);
#pragma unroll
        for (unsigned i = 0; i < kAhead; ++i) fetching.fetch(i < count ? rows.packs(i) : 0);
        return fetching;
    }
    __device__ __forceinline__ void take(Batch& batch, unsigned number, int packs) const {
#pragma unroll
        for (int array = 0; array < ARRAYS; ++array) {
            const Slot* const from = slot(number, array);
            batch[array].packs = packs;
#pragma unroll
            for (int i = 0; i < Shape::kPacks; ++i)
                if (i < packs) batch[array].held[i] = from[i * Shape::kBlock];
        }
    }

    // f(batch) for all of them in their order, after begin(); done() now and then, as BatchedRows.
    template <class F, class D>
    __device__ __forceinline__ void for_each(const ChannelArgs& args,
                                             const ColumnPlace<Shape>& place,
                                             const BlockRows<Shape>& rows, Fetching& fetching, F f,
                                             D done) const {
        constexpr unsigned kPairs = Shape::kRounds;
        const unsigned whole = min(count, rows.whole);
#pragma unroll 1
        for (unsigned i = 0; i < whole; ++i) {
            Batch batch;
            ptx::copies_wait_but<kAhead - 1>();
            take(batch, i, Shape::kPacks);
            f(batch);
            fetching.fetch(fetching.next < whole   ? Shape::kPacks
                           : fetching.next < count ? rows.packs(fetching.next)
                                                   : 0);
            if (i % (2 * kPairs) == 2 * kPairs - 1) done();
        }
        if (whole < count) {
            Batch batch;
            ptx::copies_wait();
            take(batch, whole, rows.packs(whole));
            f(batch);
        } else if (count < rows.batches()) {
            take_further(args, place, rows, f, done);
        }
        done();
    }
    // The same for those that are not kept.
    template <class F, class D>
    __device__ __forceinline__ void take_further(const ChannelArgs& args,
                                                 const ColumnPlace<Shape>& place,
                                                 const BlockRows<Shape>& rows, F f, D done) const {
        constexpr unsigned kPairs = Shape::kRounds;
        Fetching walks(args, place);
#pragma unroll
        for (int array = 0; array < ARRAYS; ++array) walks.from[array] += count * walks.leap[array];
        unsigned next = count;
        const auto read = [&](Batch& batch) {
            const int packs = rows.packs(next++);
#pragma unroll
            for (int array = 0; array < ARRAYS; ++array) {
                batch[array].read(walks.from[array], walks.step[array], packs);
                walks.from[array] += walks.leap[array];
            }
        };
        const auto whole = [](Batch& batch) -> Batch& {
#pragma unroll
            for (auto& of_array : batch) of_array.packs = Shape::kPacks;
            return batch;
        };
        Batch even, odd;
        read(even);
        read(odd);
#pragma unroll 1
        for (unsigned i = count; i < rows.batches(); i += 2) {
            if (i + 1 < rows.whole) {
                f(whole(even));
                read(even);
                f(whole(odd));
                read(odd);
            } else {
                f(even);
                f(odd);
            }
            if (i / 2 % kPairs == kPairs - 1) done();
        }
    }

    // f(batch, its number): those that are not kept out of memory, the last ones first, each behind
    // one that is kept.
    template <class F>
    __device__ __forceinline__ void for_each_again(const ChannelArgs& args,
                                                   const ColumnPlace<Shape>& place,
                                                   const BlockRows<Shape>& rows, F f) const {
        const unsigned batches = rows.batches(), again = batches - count;
#pragma unroll 1
        for (unsigned i = 0; i < max(again, count); ++i) {
            Batch read, kept;
            const unsigned number = batches - 1 - i;
#pragma unroll
            for (int array = 0; array < ARRAYS; ++array) {
                const RowWalk<T, Shape> of_array = walk(args, place, array);
                read[array].read(of_array.at + number * of_array.leap, of_array.step,
                                 i < again ? rows.packs(number) : 0);
            }
            take(kept, i, i < count ? rows.packs(i) : 0);
            f(kept, i);
            f(read, number);
        }
    }
};

// Where the output goes.
template <typename T, class Shape>
struct OutputWalk {
    T* at;
    long long step, leap;

    __device__ __forceinline__ OutputWalk(const ChannelArgs& args, const ColumnPlace<Shape>& place)
        : at(place.template address<T>(args, args.y, kChannelY)),
          step(Shape::kTy * args.run_step[kChannelY]),
          leap(args.segment_rows * args.run_step[kChannelY]) {}

    // What f(i, values) makes of row i of a batch.
    template <class F>
    __device__ __forceinline__ void write(const HeldRows<T, Shape>& rows, unsigned batch,
                                          F f) const {
        rows.template write<true>(at + batch * leap, step, f);
    }
};
