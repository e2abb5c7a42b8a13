// Channels-last norms in one launch: every CTA keeps what it reads of its block of rows on chip, as
// far as there is room, until the statistics of its columns are known, and writes it from there.
// What had no room is read again, what was read last first: L2 still holds it.
//
// The blocks of a tile leave records of their columns and wait for each other. They are joined in
// two steps: the first block of a squad joins the squad's records, and every CTA those of the
// squads, so that nobody reads many.
//
// Nothing rests on how many CTAs run at a time. Who has waited for long leaves, and says so;
// whoever leaves a record later sees that some have left, and does their work when its own block is
// written. Who says that it leaves when all records are there comes back. (Signals are fenced: of
// two CTAs that say something and then look at what the other says, one sees it.)
//
//   struct Work {  // KeptColumns, KeptColumnGradients
//       using Record;                               // of a column of a block, or of a squad
//       using Values<Shape>;                        // what makes the output of a column
//       static Record join<LANES>(records, index);  // by a few lanes
//       struct Held<Shape> {                        // a block
//           Record examine(args, place, rows);      // of the column that this thread looks after
//           void conclude(args, place, crew, by);   // when all records are there; the first
//                                                   // block stores what is known of the columns
//           void write(args, place, rows, by);
//           void forget();                          // what follows was not held
//       };
//   };
//
// Launch: column_kept as channel_tiles.cuh has it; args.number as no other launch has it, or
// clear_attendance first; dynamic shared memory for one record of each warp and column, and for
// args.kept.batches batches of rows. Precision: as channel_columns.cuh and channel_merge.cuh.
#pragma once

#include "channel_attendance.cuh"
#include "channel_columns.cuh"
#include "channel_merge.cuh"
#include "column_block.cuh"

constexpr int kJoined = 5;  // records that a lane of those who join a column takes

// Records of a column: of neighbouring blocks, or squads.
struct ColumnIndex {
    long long base, step;
    unsigned count;

    __device__ __forceinline__ long long operator()(unsigned i) const { return base + i * step; }
};

// The CTAs of a tile of a plane, a block each: how they tell each other what is done.
template <class Shape>
struct Crew {
    // Lanes that join the records of a column.
    static constexpr int kTeam =
        Shape::kBlock / Shape::kTile < 32 ? Shape::kBlock / Shape::kTile : 32;

    const ChannelArgs& args;
    const long long plane;
    const unsigned tile, blocks, squad, squads;  // squad: blocks of one
    order::Signal* const recorded;               // by block: its record is there
    order::Signal* const joined;                 // by squad: its record is there
    order::Signal* const left;                   // by block: its CTA has left
    order::Signal* const any_left;               // one: some CTA has

    __device__ __forceinline__ Crew(const ChannelArgs& args, const ColumnPlace<Shape>& place)
        : args(args),
          plane(place.plane),
          tile(place.tile),
          blocks(args.segments),
          squad(args.kept.together),
          squads((blocks + squad - 1) / squad),
          recorded(signals(place)),
          joined(recorded + blocks),
          left(joined + squads),
          any_left(left + blocks) {}

    __device__ __forceinline__ unsigned tiles() const {
        return (unsigned(args.vectors) + Shape::kTile - 1) / Shape::kTile;
    }
    __device__ __forceinline__ order::Signal* signals(const ColumnPlace<Shape>& place) const {
        const long long before = place.plane * tiles() + place.tile;
        return static_cast<order::Signal*>(args.progress) + before * (2 * blocks + squads + 1);
    }
    __device__ __forceinline__ unsigned blocks_of(unsigned of_squad) const {
        return min(squad, blocks - of_squad * squad);
    }

    // Where records lie: those of blocks, then those of squads.
    __device__ __forceinline__ long long record(unsigned block, unsigned column) const {
        return (plane * (blocks + squads) + block) * args.vectors + column;
    }
    __device__ __forceinline__ long long squad_record(unsigned of_squad, unsigned column) const {
        return record(blocks + of_squad, column);
    }
    __device__ __forceinline__ ColumnIndex of_squad(unsigned which, unsigned column) const {
        return {record(which * squad, column), args.vectors, blocks_of(which)};
    }
    __device__ __forceinline__ ColumnIndex of_all(unsigned column) const {
        if (squads == 1) return {record(0, column), args.vectors, blocks};
        return {squad_record(0, column), args.vectors, squads};
    }

    // By all threads. Whether so many signals are raised, after some time at most.
    __device__ __forceinline__ bool await(const order::Signal* signals, unsigned count,
                                          long long patience) const {
        bool raised = true;
        for (unsigned i = threadIdx.x; raised && i < count; i += Shape::kBlock)
            raised = order::await(signals + i, args.number, patience);
        return !any_of_block<Shape::kWarps>(!raised);
    }
    // By one thread, which has waited for long: whether it must go on nevertheless, since all have
    // left their records. Else one of those who have not will see that it has left.
    __device__ __forceinline__ bool comes_back(unsigned block) const {
        order::raise(left + block, args.number);
        order::raise(any_left, args.number);
        for (unsigned i = 0; i < blocks; ++i)
            if (!order::is_raised(recorded + i, args.number)) return false;
        return order::take(left + block, args.number);
    }
    // Whether some CTA had left when this one had left its record: asked while others are awaited.
    static __device__ __forceinline__ bool* some_left() {
        __shared__ bool have[1];
        return have;
    }
    // By all threads: from `from` on the next block whose CTA has left; it is this one's now. Or
    // their number.
    __device__ __forceinline__ unsigned next_left(unsigned from) const {
        __shared__ unsigned found[1];
        bool any = false;
        for (unsigned i = threadIdx.x; i < blocks; i += Shape::kBlock)
            any |= order::is_raised(left + i, args.number);
        if (!any_of_block<Shape::kWarps>(any)) return blocks;
        if (threadIdx.x == 0) {
            while (from < blocks && !order::take(left + from, args.number)) ++from;
            found[0] = from;
        }
        __syncthreads();
        return found[0];
    }
};

// A lane's records of a column, `none` behind the last.
template <int LANES, class Record>
__device__ __forceinline__ void fetch_records(Record (&mine)[kJoined], const Record* records,
                                              const ColumnIndex& at, const Record& none) {
#pragma unroll
    for (int i = 0; i < kJoined; ++i) {
        const unsigned number = threadIdx.x % LANES + i * LANES;
        mine[i] = number < at.count ? order::load_fresh(records + at(number)) : none;
    }
}

// f(column, record): for the columns of a tile, what the records that index(column) finds say
// together. By all threads of the CTA.
template <class Work, class Shape, class Index, class F>
__device__ __forceinline__ void join_columns(const Crew<Shape>& crew, Index index, F f) {
    using Record = typename Work::Record;
    constexpr int kTeam = Crew<Shape>::kTeam;
    static_assert(Shape::kTile * kTeam <= Shape::kBlock, "lanes for every column");
    const unsigned first = crew.tile * Shape::kTile, column = first + threadIdx.x / kTeam;
    const bool live = threadIdx.x / kTeam < Shape::kTile && column < unsigned(crew.args.vectors);
    ColumnIndex at = index(live ? column : first);
    if (!live) at.count = 0;
    const Record all =
        Work::template join<kTeam>(static_cast<const Record*>(crew.args.partial), at);
    if (live && threadIdx.x % kTeam == 0) f(column, all);
}

template <class Work, class Shape>
__device__ __forceinline__ void join_squads(const Crew<Shape>& crew, unsigned first,
                                            unsigned past) {
    using Record = typename Work::Record;
    Record* const records = static_cast<Record*>(crew.args.partial);
#pragma unroll 1
    for (unsigned which = first; which < past; ++which)
        join_columns<Work>(
            crew, [&](unsigned column) { return crew.of_squad(which, column); },
            [&](unsigned column, const Record& all) {
                records[crew.squad_record(which, column)] = all;
            });
    __syncthreads();
}

// Tells that this block has left its record, and waits for all others. Whether the CTA goes on.
template <class Work, class Shape>
__device__ __forceinline__ bool gather_crew(const Crew<Shape>& crew, unsigned block) {
    __syncthreads();
    if (threadIdx.x == 0) {
        order::raise(crew.recorded + block, crew.args.number);
        crew.some_left()[0] = order::is_raised(crew.any_left, crew.args.number);
    }
    const unsigned mine = block / crew.squad;
    bool all = crew.squads == 1 && crew.await(crew.recorded, crew.blocks, kPatience);
    if (crew.squads > 1) {
        if (block == mine * crew.squad &&
            crew.await(crew.recorded + block, crew.blocks_of(mine), kPatience)) {
            join_squads<Work>(crew, mine, mine + 1);
            if (threadIdx.x == 0) order::raise(crew.joined + mine, crew.args.number);
        }
        all = crew.await(crew.joined, crew.squads, 2 * kPatience);
    }
    if (all) return true;
    __shared__ bool back[1];
    if (threadIdx.x == 0) back[0] = crew.comes_back(block);
    __syncthreads();
    if (!back[0]) return false;
    if (crew.squads > 1) join_squads<Work>(crew, 0, crew.squads);
    return true;
}

// What make(record, column) gives to the threads that look after a column of a tile, for all that
// work on it: from what all records say of the column.
template <class Work, class Shape, class Values, class F>
__device__ __forceinline__ void conclude_columns(const ColumnPlace<Shape>& place,
                                                 const Crew<Shape>& crew, Values (&by)[Shape::kVec],
                                                 F make) {
    using Record = typename Work::Record;
    Record* const columns = column_records<Record>();
    join_columns<Work>(
        crew, [&](unsigned column) { return crew.of_all(column); },
        [&](unsigned column, const Record& all) { columns[column % Shape::kTile] = all; });
    __syncthreads();
    share_columns<Shape>(place.owns(crew.args), by,
                         [&] { return make(columns[threadIdx.x], unsigned(place.own_column())); });
}

template <class Work, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    column_kept(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    typename Work::template Held<Shape> held;
    {
        const ColumnPlace<Shape> place(args, blockIdx.x);
        const auto record = held.examine(args, place, BlockRows<Shape>(args, place.block));
        if (place.owns(args))
            static_cast<typename Work::Record*>(
                args.partial)[Crew<Shape>(args, place)
                                  .record(place.block, unsigned(place.own_column()))] = record;
    }
    // What finds a block is worked out anew: there are no registers to keep it.
    ColumnPlace<Shape> place(args, opaque(blockIdx.x));
    const Crew<Shape> crew(args, place);
    if (!gather_crew<Work>(crew, place.block)) return;
    typename Work::template Values<Shape> by[Shape::kVec];
    bool concluded = false;
#pragma unroll 1
    for (unsigned other = 0;; ++other) {
        if (!concluded || place.block == 0) held.conclude(args, place, crew, by);
        concluded = true;
        if (place.active) held.write(args, place, BlockRows<Shape>(args, place.block), by);
        if (!crew.some_left()[0]) return;
        other = crew.next_left(other);
        if (other == crew.blocks) return;
        place.move_to(other);
        held.forget();
    }
}

// The rows of a block as examine_columns takes them.
template <typename T, class Shape>
struct KeptRows {
    using A = Accumulator<T>;
    const ChannelArgs& args;
    const ColumnPlace<Shape>& place;
    const BlockRows<Shape>& rows;
    KeptBlock<T, Shape, 1>& block;
    typename KeptBlock<T, Shape, 1>::Fetching fetching{args, place};

    __device__ __forceinline__ void begin() { fetching = block.begin(args, place, rows); }
    template <class F, class D>
    __device__ __forceinline__ void for_each_row(F f, D done) {
        block.for_each(
            args, place, rows, fetching,
            [&](const HeldRows<T, Shape>(&x)[1]) { x[0].for_each_row(f, [] {}); }, done);
    }
    __device__ __forceinline__ BatchedRows<T, Shape> again() const {
        return {RowWalk<T, Shape>(args, place, kChannelX), rows};
    }
};

// What a block, or a squad, adds up to: the squares are those of distances from its mean, and both
// are in units of `scale`. No column has 2^31 rows.
struct ColumnRecord {
    double mean, squares;
    float scale;
    unsigned count;
};

template <class Norm, typename T>
struct KeptColumns {
    using A = Accumulator<T>;
    using Record = ColumnRecord;
    template <class Shape>
    using Values = Coefficients<A>;

    // About the mean of the first record. It is that of a part of the column, so that squaring its
    // distance from the mean of all loses no more digits of their spread than there are parts.
    template <int LANES>
    static __device__ __forceinline__ Record join(const Record* records, const ColumnIndex& at) {
        const Lanes<LANES> lanes;
        Record mine[kJoined];
        fetch_records<LANES>(mine, records, at, Record{0, 0, 1, 0});
        float inverse = 0;  // of the scale of the largest values
        unsigned count = 0;
#pragma unroll
        for (int i = 0; i < kJoined; ++i) {
            count += mine[i].count;
            if (mine[i].count) inverse = max(inverse, inverse_scale(mine[i].scale));
        }
        count = lanes.combined(count, Plus());
        inverse = lanes.combined(inverse, Largest());
        const float scale = inverse_scale(inverse);
        const double about = lanes.of(mine[0].mean * (scale * inverse_scale(mine[0].scale)), 0);
        double distances = 0, squares = 0;
#pragma unroll
        for (int i = 0; i < kJoined; ++i) {
            if (mine[i].count == 0) continue;
            const double unit = scale * inverse_scale(mine[i].scale);
            const double distance = fma(mine[i].mean, unit, -about);
            const double weighted = mine[i].count * distance;
            distances += weighted;
            squares += fma(weighted, distance, mine[i].squares * unit * unit);
        }
        const auto all = lanes.combined(Moments<double>{distances, squares}, Plus());
        const double moved = all.sum * reciprocal(count);
        return {about + moved, fma(-all.sum, moved, all.squares), scale, count};
    }

    template <class Shape>
    struct Held {
        static constexpr int kVec = Shape::kVec;
        KeptBlock<T, Shape, 1> block;

        __device__ __forceinline__ Record examine(const ChannelArgs& args,
                                                  const ColumnPlace<Shape>& place,
                                                  const BlockRows<Shape>& rows) {
            KeptRows<T, Shape> x{args, place, rows, block};
            const double count = rows.count();
            const auto found = examined_block<T>(args, place, x, count);
            const double mean = Centred<A>::mean_of(found.record, count, reciprocal(count));
            return {mean, Centred<A>::spread(found.record, mean, found.centre, count), found.scale,
                    unsigned(count)};
        }
        __device__ __forceinline__ void forget() { block.count = 0; }

        __device__ __forceinline__ void conclude(const ChannelArgs& args,
                                                 const ColumnPlace<Shape>& place,
                                                 const Crew<Shape>& crew,
                                                 Coefficients<A> (&by)[kVec]) const {
            const bool owns = place.owns(args), stores = owns && place.block == 0;
            Fetched<T> weight, bias;
            FetchedRunning<T> running;
            if (owns) {  // asked for before the records
                const long long channel = channel_of(args, place.own_column());
                weight = Fetched<T>(args, kWeight, channel);
                bias = Fetched<T>(args, kBias, channel);
                if (stores) running = fetch_running<Norm, T>(args, channel);
            }
            conclude_columns<KeptColumns>(place, crew, by, [&](const Record& all, unsigned column) {
                const Merged<A> merged(args, Pair<double>{all.mean, 0.0}, all.squares,
                                       inverse_scale(double(all.scale)));
                if (stores)
                    store_set<Norm, T>(args, place.plane * args.inner_sets + column,
                                       merged.statistics, merged.scale, merged.unit, merged.moments,
                                       running);
                return Coefficients<A>::of(merged.statistics, merged.scale,
                                           weight.value(args, kWeight, A(1)),
                                           bias.value(args, kBias, A(0)));
            });
        }
        __device__ __forceinline__ void write(const ChannelArgs& args,
                                              const ColumnPlace<Shape>& place,
                                              const BlockRows<Shape>& rows,
                                              const Coefficients<A> (&by)[kVec]) const {
            const OutputWalk<T, Shape> y(args, place);
            block.for_each_again(args, place, rows,
                                 [&](const HeldRows<T, Shape>(&x)[1], unsigned number) {
                                     y.write(x[0], number, [&](int, A(&value)[kVec]) {
#pragma unroll
                                         for (int e = 0; e < kVec; ++e)
                                             value[e] = by[e].apply(value[e]);
                                     });
                                 });
        }
    };
};
