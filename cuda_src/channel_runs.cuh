// Channels-first norms: a set is read once, kept on chip while its statistics settle, and written
// once; or, where it is too large for that, cut into segments whose records are merged
// (channel_merge.cuh).
//
// Launch: run_norm: grid = ceil(sets / SETS) CTAs, or sets * CLUSTER; run_statistics: grid = sets *
// segments; block = THREADS * SETS; SHARED * block packs of dynamic shared memory, and TABLE: a
// weight and a bias for each channel of a set, of which there are no more than block. VEC
// divides S;
// every run of every array starts at a multiple of ACCESS elements.
// Arrays: channel_args.cuh. Precision: arithmetic in A, each output rounded once.
#pragma once

#include "channel_args.cuh"

template <int VEC, int ACCESS, int PACKS, int SHARED, int THREADS, int SETS, int CLUSTER, int CTAS,
          bool ONE_RUN, bool SEGMENT, bool TABLE>
struct RunShape : RowShape<VEC, ACCESS, PACKS, SHARED, THREADS, SETS, CLUSTER, kLate, CTAS, false,
                           SEGMENT, ACCESS> {
    static constexpr bool kOneRun = ONE_RUN;  // a set lies in one sample
    static constexpr bool kTable = TABLE;     // of the weights and biases of a set in shared memory
    static constexpr bool kAssigns = false;
    static constexpr bool kRagged = false;
    static constexpr int kRecords = 4;  // eight do not fit 64 registers, beside what is held
};

// Which set, and which of its vectors, this thread works on; `step` is that of the array that is
// being walked. As Place in row_tile.cuh.
template <int VEC, int ACCESS, int PACKS, int SHARED, int THREADS, int SETS, int CLUSTER, int CTAS,
          bool ONE_RUN, bool SEGMENT, bool TABLE>
struct Place<
    RunShape<VEC, ACCESS, PACKS, SHARED, THREADS, SETS, CLUSTER, CTAS, ONE_RUN, SEGMENT, TABLE>> {
    static constexpr unsigned kStride = THREADS * CLUSTER;

    const ChannelArgs& args;
    SetIndex index;
    bool live;
    unsigned vectors;             // of the set, or of the segment
    unsigned first;               // of this thread
    long long run = 0, rest = 0;  // run in which the segment starts, vectors into it
    long long passed = 0;         // vectors of the set before the segment
    long long step = 0;

    // All of the set.
    using Set = typename RowNumberOf<SETS == 1>::type;
    __device__ __forceinline__ Place(const ChannelArgs& args, Set set, unsigned skipped)
        : args(args),
          index(args, set),
          live(index.live),
          vectors(live ? args.brief.vectors : 0),
          first(skipped + (SETS == 1 ? threadIdx.x : threadIdx.x % THREADS)) {}

    // Segment number `segment` of the set.
    __device__ __forceinline__ Place(const ChannelArgs& args, long long set, long long segment)
        : args(args), index(args, set), live(true), first(threadIdx.x) {
        constexpr long long kVectors = THREADS * PACKS;
        passed = segment * kVectors;
        vectors = min(args.vectors - passed, kVectors);
        if (!ONE_RUN && args.runs > 1) run = passed / args.length.size;
        rest = passed - run * args.length.size;
    }

    __device__ __forceinline__ void walk(ChannelArray array) {
        step = array == kChannelX ? args.brief.x_step : args.run_step[array];
    }
    // Where the set starts in the array that is walked.
    __device__ __forceinline__ long long base() const {
        const long long length = SEGMENT ? args.length.size : args.brief.length.size;
        return index.outer * step + index.inner * (length * VEC);
    }
    __device__ __forceinline__ unsigned vector(int pack) const { return first + pack * kStride; }
    __device__ __forceinline__ long long column_of(unsigned vector) const {
        if constexpr (ONE_RUN) return (rest + vector) * VEC;
        if constexpr (!SEGMENT) {
            const Divisor& length = args.brief.length;
            const unsigned runs = length.quotient(vector, args.brief.length_shift);
            return runs * step + (vector - runs * length.size) * VEC;
        }
        const long long local = rest + vector;
        const long long runs = args.length.quotient(local);
        return (run + runs) * step + (local - runs * args.length.size) * VEC;
    }
    __device__ __forceinline__ long long origin() const { return column_of(0); }
    // Of one run in two terms, so that the packs of an array need one address between them.
    __device__ __forceinline__ long long column(int pack) const {
        if constexpr (ONE_RUN) return column_of(first) + pack * (long long)(kStride * VEC);
        return column_of(vector(pack));
    }
    __device__ __forceinline__ bool holds(int pack) const { return vector(pack) < vectors; }
};

// A value near the mean of a set, from four elements far from each other, since neighbours are
// often alike: of four runs, or of the quarters of one. On their way.
template <typename T, class Shape>
struct NearMean {
    using A = Accumulator<T>;

    // One, where registers are full.
    static constexpr unsigned kElements = Shape::kShared > 0 ? 1 : 4;
    Pack<T, 1> element[kElements];

    // `length`: vectors of a run; `step`: from one run to the next.
    template <typename Step>
    __device__ __forceinline__ NearMean(const T* set, unsigned vectors, unsigned length,
                                        Step step) {
#pragma unroll
        for (unsigned i = 0; i < kElements; ++i) {
            if constexpr (Shape::kOneRun)
                element[i] = load<1, 1>(set + i * (vectors / 4 * Shape::kVec));
            else
                element[i] = load<1, 1>(set + (i * length < vectors ? i * step : 0));
        }
    }
    // Of values that are equal, that value.
    __device__ __forceinline__ A value() const {
        if constexpr (kElements == 1) return widen<A>(part_of<T>(opaque(element[0]), 0));
        A quarter[kElements];
#pragma unroll
        for (unsigned i = 0; i < kElements; ++i)
            quarter[i] = A(0.25) * widen<A>(part_of<T>(opaque(element[i]), 0));
        return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
    }
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
        if constexpr (Norm::kSetsAreOneChannel) return of_set();
        return before + place.args.channel.quotient(rest + place.vector(i));
    }
};

// Weight and bias of the packs of a set, read while x is on its way: to registers, four packs at a
// time, or where there is a table, to shared memory before the threads of the set next agree.
template <class Norm, typename T, class Shape>
struct PackAffine {
    using A = Accumulator<T>;
    static constexpr bool kTable = Shape::kTable && !Norm::kSetsAreOneChannel;
    static constexpr int kEach = Norm::kSetsAreOneChannel ? 1 : Shape::kPacks;  // of them differ
    static constexpr int kKept = kTable ? 0 : kEach < 4 ? kEach : 4;

    struct alignas(2 * sizeof(A)) Affine {
        A weight, bias;
    };

    const PackChannel<Norm, Place<Shape>> channel;
    Fetched<T> weight[kKept + kTable], bias[kKept + kTable];

    __device__ __forceinline__ explicit PackAffine(const Place<Shape>& place) : channel(place) {
        if constexpr (kTable) {
            fill();
        } else {
#pragma unroll
            for (int i = 0; i < kKept; ++i) fetch(i);
        }
    }

    static __device__ __forceinline__ Affine* table() {
        extern __shared__ uint4 slots[];
        return reinterpret_cast<Affine*>(reinterpret_cast<Pack<T, Shape::kVec>*>(slots) +
                                         Shape::kShared * Shape::kBlock);
    }
    // Not a loop: what one reads of the arguments, the compiler reads before x.
    __device__ __forceinline__ void fill() const {
        const ChannelArgs& args = channel.place.args;
        const unsigned i = threadIdx.x;
        if (i >= args.set_channels) return;
        const Fetched<T> of_weight(args, kWeight, channel.before + i),
            of_bias(args, kBias, channel.before + i);
        table()[i] = {of_weight.value(args, kWeight, A(1)), of_bias.value(args, kBias, A(0))};
    }
    __device__ __forceinline__ void fetch(int i) {
        if (!channel.place.holds(i)) return;
        const long long of_pack = channel.of_pack(i);
        weight[i % kKept] = Fetched<T>(channel.place.args, kWeight, of_pack);
        bias[i % kKept] = Fetched<T>(channel.place.args, kBias, of_pack);
    }

    __device__ __forceinline__ Coefficients<A> of_pack(int i, const Centred<A>& statistics) {
        const ChannelArgs& args = channel.place.args;
        if constexpr (kTable) {
            const Affine of_pack = table()[args.channel.quotient_near(channel.place.vector(i))];
            return Coefficients<A>::of(statistics, A(1), of_pack.weight, of_pack.bias);
        } else {
            const A of_weight = weight[i % kKept].value(args, kWeight, A(1));
            const A of_bias = bias[i % kKept].value(args, kBias, A(0));
            if (i + kKept < kEach) fetch(i + kKept);
            return Coefficients<A>::of(statistics, A(1), of_weight, of_bias);
        }
    }
};

// x becomes y. `coefficients(i)`: of pack i, asked once for a set of one channel.
template <class Norm, typename T, class Shape, class F>
__device__ __forceinline__ void map_tile(RowTile<T, Shape>& x, F coefficients) {
    using A = Accumulator<T>;
    auto now = coefficients(0);
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
        if (!x.place.holds(i)) continue;
        if (!Norm::kSetsAreOneChannel && i > 0) now = coefficients(i);
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
    const T* const from = static_cast<const T*>(args.x) + (place.live ? place.base() : 0);
    x.read_packs(from);
    const NearMean<T, Shape> near(from, place.vectors, args.brief.length.size, place.step);
    PackAffine<Norm, T, Shape> affine(place);
    constexpr bool kFull = Shape::kShared > 0;  // the registers are
    FetchedRunning<T> old;
    if (place.live && place.first == 0) {
        if constexpr (kFull)
            prefetch_running<Norm, T>(args, place.index.set);
        else
            old = fetch_running<Norm, T>(args, place.index.set);
    }
    x.near = near.value();  // not before all is on its way
    const auto found = examine_row<Centred<A>>(x, team, args.numbers, [] {});
    if (!place.live) return;
    if (args.y != nullptr && place.holds(0)) {
        map_tile<Norm>(x, [&](int i) { return affine.of_pack(i, found.statistics); });
        place.walk(kChannelY);
        x.write(static_cast<T*>(args.y) + place.base());
    }
    if (place.first != 0) return;
    if constexpr (kFull) old = fetch_running<Norm, T>(args, place.index.set);
    store_found<Norm, T>(args, place.index.set, found, old);
}

// Where a CTA has SETS sets.
template <class Shape>
__device__ __forceinline__ auto set_of_thread() {
    using Set = typename Place<Shape>::Set;
    if constexpr (Shape::kRows == 1) return Set(blockIdx.x);
    return Set(blockIdx.x) * Shape::kRows + threadIdx.x / Shape::kThreads;
}

// SETS sets a CTA.
template <class Norm, typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    run_norm(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    Place<Shape> place(args, set_of_thread<Shape>(), 0u);
    normalize_set<Norm, T>(args, place, Team<Shape>());
}

// One set a cluster.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <class Norm, typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    __cluster_dims__(Shape::kCluster, 1, 1)
        run_norm_cluster(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    const Team<Shape> team;
    Place<Shape> place(args, blockIdx.x / Shape::kCluster, team.rank * Shape::kThreads);
    normalize_set<Norm, T>(args, place, team);
}
#endif

// The record of a segment, to place `number` among all; the scale of what is held then.
template <typename T, class Shape>
__device__ __forceinline__ Accumulator<T> record_tile(const ChannelArgs& args, RowTile<T, Shape>& x,
                                                      unsigned vectors, long long number) {
    using A = Accumulator<T>;
    const Team<Shape> team;
    const double count = double(vectors) * Shape::kVec;
    RowNumbers numbers = args.numbers;
    numbers.count = count;
    numbers.inverse = 1.0 / count;
    numbers.inverse32 = 1.0f / float(count);
    const auto found = examine_row<Centred<A>>(x, team, numbers, [] {});
    if (threadIdx.x == 0)
        static_cast<SegmentRecord*>(args.partial)[number] =
            segment_record<A>(found.record, count, found.centre, found.scale);
    return found.scale;
}

template <typename T, class Shape>
__device__ __forceinline__ void record_segment(const ChannelArgs& args, long long set,
                                               long long segment) {
    Place<Shape> place(args, set, segment);
    RowTile<T, Shape> x(place);
    place.walk(kChannelX);
    x.read(static_cast<const T*>(args.x) + place.index.base(args, kChannelX), place.origin());
    record_tile(args, x, place.vectors, set * args.segments + segment);
}

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    run_statistics(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    const long long set = blockIdx.x / args.segments;
    record_segment<T, Shape>(args, set, blockIdx.x - set * args.segments);
}
