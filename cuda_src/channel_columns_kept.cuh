// Channels-last norms in one launch: every CTA keeps what it reads of its block of rows on chip, as
// far as there is room, until the statistics of the plane are known, and writes it from there. What
// had no room is read again, what was read last first: L2 still holds it.
//
// All blocks of a plane leave records of their columns and wait for each other (attendance.cuh).
// The blocks of a tile are joined in two steps: the last one of a squad to arrive joins the squad's
// records, and every CTA those of the squads of its tile, so that nobody reads many.
//
//   struct Work {  // KeptColumns, KeptColumnGradients
//       using Record;                              // of a column of a block, or of a squad
//       static Record join<LANES>(records, index);  // by a few lanes
//       struct Held<Shape> {                        // a block
//           Record examine(args, place, rows);      // of the column that this thread looks after
//           void write(args, place, rows, crew);    // when all records are there
//           void forget();                          // what follows was not held
//       };
//   };
//
// Launch: clear_attendance first, a thread for each word; then column_kept as channel_tiles.cuh has
// it; dynamic shared memory for one record of each warp and column, and for args.kept.batches
// batches of rows. Precision: as channel_columns.cuh and channel_merge.cuh.
#pragma once

#include "attendance.cuh"
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

// The CTAs of a plane: blocks of all of its tiles.
template <class Shape>
struct Crew {
    // Lanes that join the records of a column.
    static constexpr int kTeam =
        Shape::kBlock / Shape::kTile < 32 ? Shape::kBlock / Shape::kTile : 32;

    const ChannelArgs& args;
    unsigned tiles, blocks, members, squad, squads;  // squad: blocks of one
    long long planes;

    __device__ __forceinline__ explicit Crew(const ChannelArgs& args)
        : args(args),
          tiles((unsigned(args.vectors) + Shape::kTile - 1) / Shape::kTile),
          blocks(args.segments),
          members(tiles * blocks),
          squad(args.kept.together),
          squads((blocks + squad - 1) / squad),
          planes(gridDim.x / members) {}

    __device__ __forceinline__ unsigned number(const ColumnPlace<Shape>& place) const {
        return place.block * tiles + place.tile;
    }
    __device__ __forceinline__ Attendance attendance(long long plane) const {
        return {args.progress, planes, members, plane};
    }
    // How many blocks of its squad are there.
    __device__ __forceinline__ unsigned* squad_arrived(const ColumnPlace<Shape>& place) const {
        const long long squads_before =
            (place.plane * tiles + place.tile) * squads + place.block / squad;
        return static_cast<unsigned*>(args.progress) + planes * (1 + members) + squads_before;
    }
    // By all threads of the last CTA of a plane: from `from` on the next one that has left, or
    // `members`; it has been claimed.
    __device__ __forceinline__ unsigned next_left(long long plane, unsigned from) const {
        __shared__ unsigned found[1];
        __syncthreads();
        if (threadIdx.x == 0) {
            const Attendance here = attendance(plane);
            while (from < members && !here.claim(from)) ++from;
            found[0] = from;
        }
        __syncthreads();
        return found[0];
    }
    __device__ __forceinline__ unsigned blocks_of(unsigned of_squad) const {
        return min(squad, blocks - of_squad * squad);
    }

    __device__ __forceinline__ long long record(long long plane, unsigned block,
                                                long long column) const {
        return (plane * blocks + block) * args.vectors + column;
    }
    __device__ __forceinline__ long long squad_record(long long plane, unsigned of_squad,
                                                      long long column) const {
        return (planes * blocks + plane * squads + of_squad) * args.vectors + column;
    }
    __device__ __forceinline__ ColumnIndex of_squad(const ColumnPlace<Shape>& place,
                                                    long long column) const {
        const unsigned mine = place.block / squad;
        return {record(place.plane, mine * squad, column), args.vectors, blocks_of(mine)};
    }
    __device__ __forceinline__ ColumnIndex of_plane(long long plane, long long column) const {
        if (squads == 1) return {record(plane, 0, column), args.vectors, blocks};
        return {squad_record(plane, 0, column), args.vectors, squads};
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

// f(column, record): for the columns of a tile, which begins at `first`, what their records say
// together. By all threads of the CTA.
template <class Work, class Shape, class Index, class F>
__device__ __forceinline__ void join_columns(const ChannelArgs& args, unsigned first, Index index,
                                             F f) {
    using Record = typename Work::Record;
    constexpr int kTeam = Crew<Shape>::kTeam;
    static_assert(Shape::kTile * kTeam <= Shape::kBlock, "lanes for every column");
    const unsigned column = first + threadIdx.x / kTeam;
    const bool live = threadIdx.x / kTeam < Shape::kTile && column < unsigned(args.vectors);
    ColumnIndex at = index(live ? column : first);
    if (!live) at.count = 0;
    const Record all = Work::template join<kTeam>(static_cast<const Record*>(args.partial), at);
    if (live && threadIdx.x % kTeam == 0) f(column, all);
}

// What make(record, column) gives to the threads that look after a column of a tile, for all that
// work on it: from what the records of the plane say of the column.
template <class Work, class Shape, class Values, class F>
__device__ __forceinline__ void conclude_columns(const ChannelArgs& args,
                                                 const ColumnPlace<Shape>& place,
                                                 const Crew<Shape>& crew, Values (&by)[Shape::kVec],
                                                 F make) {
    using Record = typename Work::Record;
    const unsigned first = place.tile * Shape::kTile;
    Record* const columns = column_records<Record>();
    __syncthreads();
    join_columns<Work, Shape>(
        args, first, [&](unsigned column) { return crew.of_plane(place.plane, column); },
        [&](unsigned column, const Record& all) { columns[column - first] = all; });
    __syncthreads();
    share_columns<Shape>(place.owns(args), by,
                         [&] { return make(columns[threadIdx.x], unsigned(place.own_column())); });
}

// Joins the records of a squad, and waits for all of the plane's. Whether the CTA stays; `last` as
// in Attendance.
template <class Work, class Shape>
__device__ __forceinline__ bool gather_crew(const ChannelArgs& args, const Crew<Shape>& crew,
                                            const ColumnPlace<Shape>& place, unsigned& last) {
    using Record = typename Work::Record;
    __shared__ unsigned told[2];
    __syncthreads();
    if (crew.squads > 1) {
        const unsigned mine = place.block / crew.squad;
        if (threadIdx.x == 0)
            told[0] = order::arrive(crew.squad_arrived(place)) + 1 == crew.blocks_of(mine);
        __syncthreads();
        if (told[0]) {
            join_columns<Work, Shape>(
                args, place.tile * Shape::kTile,
                [&](unsigned column) { return crew.of_squad(place, column); },
                [&](unsigned column, const Record& all) {
                    static_cast<Record*>(
                        args.partial)[crew.squad_record(place.plane, mine, column)] = all;
                });
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) told[0] = crew.attendance(place.plane).stays(crew.number(place), told[1]);
    __syncthreads();
    last = told[1];
    return told[0];
}

template <class Work, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    column_kept(const __grid_constant__ ChannelArgs args) {
    typename Work::template Held<Shape> held;
    {
        const ColumnPlace<Shape> place(args, blockIdx.x);
        const BlockRows<Shape> rows(args, place.block);
        const auto record = held.examine(args, place, rows);
        if (place.owns(args)) {
            const Crew<Shape> crew(args);
            static_cast<typename Work::Record*>(
                args.partial)[crew.record(place.plane, place.block, place.own_column())] = record;
        }
    }
    // What finds a block is worked out anew: there are no registers to keep it.
    unsigned block = opaque(blockIdx.x);
    const Crew<Shape> crew(args);
    unsigned last = 0;
    if (!gather_crew<Work>(args, crew, ColumnPlace<Shape>(args, block), last)) return;
    const unsigned first = block / crew.members * crew.members;
#pragma unroll 1
    for (unsigned other = 0;; ++other) {
        {
            const ColumnPlace<Shape> place(args, block);
            held.write(args, place, BlockRows<Shape>(args, place.block), crew);
        }
        // Blocks of those who have left.
        if (last <= 1) return;
        other = crew.next_left(block / crew.members, other);
        if (other == crew.members) return;
        block = first + other;
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

        __device__ __forceinline__ void write(const ChannelArgs& args,
                                              const ColumnPlace<Shape>& place,
                                              const BlockRows<Shape>& rows,
                                              const Crew<Shape>& crew) const {
            Coefficients<A> by[kVec];
            const bool owns = place.owns(args), stores = owns && place.block == 0;
            Fetched<T> weight, bias;
            FetchedRunning<T> running;
            if (owns) {  // asked for before the records
                const long long channel = channel_of(args, place.own_column());
                weight = Fetched<T>(args, kWeight, channel);
                bias = Fetched<T>(args, kBias, channel);
                if (stores) running = fetch_running<Norm, T>(args, channel);
            }
            const auto conclude = [&](const Record& all, unsigned column) {
                const Merged<A> merged(args, Pair<double>{all.mean, 0.0}, all.squares,
                                       inverse_scale(double(all.scale)));
                if (stores)
                    store_set<Norm, T>(args, place.plane * args.inner_sets + column,
                                       merged.statistics, merged.scale, merged.unit, merged.moments,
                                       running);
                return Coefficients<A>::of(merged.statistics, merged.scale,
                                           weight.value(args, kWeight, A(1)),
                                           bias.value(args, kBias, A(0)));
            };
            conclude_columns<KeptColumns>(args, place, crew, by, conclude);
            if (!place.active) return;
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
