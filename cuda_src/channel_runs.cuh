// Channels-first norms: a set is read once, kept on chip while its statistics settle, and written
// once; or, where it is too large for that, cut into segments whose records are merged
// (channel_merge.cuh).
//
// Launch: run_norm: grid = ceil(sets / SETS) CTAs, or sets * CLUSTER; run_statistics: grid = sets *
// segments; block = THREADS * SETS; SHARED * block packs of dynamic shared memory. VEC divides S;
// every run of every array starts at a multiple of ACCESS elements.
// Arrays: channel_args.cuh. Precision: arithmetic in A, each output rounded once.
#pragma once

#include "channel_args.cuh"

template <int VEC, int ACCESS, int PACKS, int SHARED, int THREADS, int SETS, int CLUSTER, int CTAS,
          bool SEGMENT>
struct RunShape
    : RowShape<VEC, ACCESS, PACKS, SHARED, THREADS, SETS, CLUSTER, kLate, CTAS, false, SEGMENT> {
    static constexpr bool kAssigns = false;
    static constexpr int kRecords = 4;  // eight do not fit 64 registers, beside what is held
};

// Which set, and which of its vectors, this thread works on; `step` is that of the array that is
// being walked. As Place in row_tile.cuh.
template <int VEC, int ACCESS, int PACKS, int SHARED, int THREADS, int SETS, int CLUSTER, int CTAS,
          bool SEGMENT>
struct Place<RunShape<VEC, ACCESS, PACKS, SHARED, THREADS, SETS, CLUSTER, CTAS, SEGMENT>> {
    static constexpr unsigned kStride = THREADS * CLUSTER;

    const ChannelArgs& args;
    SetIndex index;
    bool live;
    unsigned vectors;             // of the set, or of the segment
    unsigned first;               // of this thread
    long long run = 0, rest = 0;  // run in which the segment starts, vectors into it
    long long passed = 0;         // vectors of the set before the segment
    long long step = 0;

    __device__ __forceinline__ Place(const ChannelArgs& args, long long set, unsigned skipped)
        : args(args),
          index(args, set),
          live(SETS == 1 || set < args.sets),
          vectors(live ? args.vectors : 0),
          first(skipped + threadIdx.x % THREADS) {}

    // Segment number `segment` of the set.
    __device__ __forceinline__ Place(const ChannelArgs& args, long long set, long long segment)
        : args(args), index(args, set), live(true), first(threadIdx.x) {
        constexpr long long kVectors = THREADS * PACKS;
        passed = segment * kVectors;
        vectors = min(args.vectors - passed, kVectors);
        if (args.runs > 1) run = passed / args.length.size;
        rest = passed - run * args.length.size;
    }

    __device__ __forceinline__ void walk(ChannelArray array) { step = args.run_step[array]; }
    __device__ __forceinline__ unsigned vector(int pack) const { return first + pack * kStride; }
    __device__ __forceinline__ long long column_of(unsigned vector) const {
        const long long local = rest + vector;
        const long long runs = args.length.quotient(local);
        return (run + runs) * step + (local - runs * args.length.size) * VEC;
    }
    __device__ __forceinline__ long long origin() const { return column_of(0); }
    __device__ __forceinline__ long long column(int pack) const { return column_of(vector(pack)); }
    __device__ __forceinline__ bool holds(int pack) const { return vector(pack) < vectors; }
};

// Which channel's weight and bias a pack takes.
template <class Norm, class Place>
struct PackChannel {
    const Place& place;
    long long before = 0, rest = 0;

    __device__ __forceinline__ explicit PackChannel(const Place& place) : place(place) {
        if constexpr (!Norm::kSetsAreOneChannel) {
            if (place.passed) before = place.passed / place.args.channel.size;
            rest = place.passed - before * place.args.channel.size;
            before += place.index.inner * place.args.set_channels;
        }
    }
    __device__ __forceinline__ long long of_set() const { return place.index.inner; }
    __device__ __forceinline__ long long of_pack(int i) const {
        return before + place.args.channel.quotient(rest + place.vector(i));
    }
};

// x becomes y. `coefficients(channel)` are made once for a set of one channel.
template <class Norm, typename T, class Shape, class F>
__device__ __forceinline__ void map_tile(RowTile<T, Shape>& x, F coefficients) {
    using A = Accumulator<T>;
    const PackChannel<Norm, Place<Shape>> channel(x.place);
    auto now = coefficients(Norm::kSetsAreOneChannel ? channel.of_set() : channel.of_pack(0));
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
        if (!x.place.holds(i)) continue;
        if (!Norm::kSetsAreOneChannel && i > 0) now = coefficients(channel.of_pack(i));
        A value[Shape::kVec];
        x.widened(i, value);
#pragma unroll
        for (int e = 0; e < Shape::kVec; ++e) value[e] = now.apply(value[e]);
        x.set(i, narrowed<T>(value));
    }
}

template <class Norm, typename T, class Shape>
__device__ __forceinline__ void normalize_set(const ChannelArgs& args, Place<Shape>& place,
                                              const Team<Shape>& team) {
    using A = Accumulator<T>;
    RowTile<T, Shape> x(place);
    place.walk(kChannelX);
    x.read(static_cast<const T*>(args.x) + (place.live ? place.index.base(args, kChannelX) : 0));
    const auto found = examine_row<Centred<A>>(x, team, args.numbers, [] {});
    if (!place.live) return;
    if (place.first == 0) store_found<Norm, T>(args, place.index.set, found);
    if (args.y == nullptr || !place.holds(0)) return;
    map_tile<Norm>(x, [&](long long channel) {
        return coefficients<T>(args, found.statistics, A(1), channel);
    });
    place.walk(kChannelY);
    x.write(static_cast<T*>(args.y) + place.index.base(args, kChannelY));
}

// SETS sets a CTA.
template <class Norm, typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    run_norm(const __grid_constant__ ChannelArgs args) {
    const long long set = (long long)blockIdx.x * Shape::kRows + threadIdx.x / Shape::kThreads;
    Place<Shape> place(args, set, 0u);
    normalize_set<Norm, T>(args, place, Team<Shape>());
}

// One set a cluster.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <class Norm, typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    __cluster_dims__(Shape::kCluster, 1, 1)
        run_norm_cluster(const __grid_constant__ ChannelArgs args) {
    const Team<Shape> team;
    Place<Shape> place(args, blockIdx.x / Shape::kCluster, team.rank * Shape::kThreads);
    normalize_set<Norm, T>(args, place, team);
}
#endif

// Segment `segment` of a set: its record, at its place among all.
template <typename T, class Shape>
__device__ __forceinline__ void record_segment(const ChannelArgs& args, long long set,
                                               long long segment) {
    using A = Accumulator<T>;
    Place<Shape> place(args, set, segment);
    const Team<Shape> team;
    RowTile<T, Shape> x(place);
    place.walk(kChannelX);
    x.read(static_cast<const T*>(args.x) + place.index.base(args, kChannelX), place.origin());

    const double count = double(place.vectors) * Shape::kVec;
    RowNumbers numbers = args.numbers;
    numbers.count = count;
    numbers.inverse = 1.0 / count;
    numbers.inverse32 = 1.0f / float(count);
    const auto found = examine_row<Centred<A>>(x, team, numbers, [] {});
    if (threadIdx.x == 0)
        static_cast<SegmentRecord*>(args.partial)[set * args.segments + segment] =
            segment_record<A>(found.record, count, found.centre, found.scale);
}

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    run_statistics(const __grid_constant__ ChannelArgs args) {
    const long long set = blockIdx.x / args.segments;
    record_segment<T, Shape>(args, set, blockIdx.x - set * args.segments);
}
