// Channels-first norms: a set is read once, kept on chip while its statistics settle, and written
// once; or, where it is too large for that, cut into segments whose records are merged
// (channel_merge.cuh).
//
// Launch: run_norm: grid = ceil(sets / SETS) CTAs, or sets * CLUSTER; run_statistics: grid = sets *
// segments; block = THREADS * SETS; SHARED * block packs of dynamic shared memory, and TABLE: a
// weight and a bias for each channel of a set, of which there are no more than block. VEC divides
// S; or a set, if it is one run, where CROSSING; or neither, by ENDS. Every run of every array
// starts at a multiple of ACCESS elements; where the ends are MASKED, every sample does. Where VEC
// divides no run, args.length of sets of one run is in elements; where CROSSING, args.kept.channel
// is. Arrays: channel_args.cuh. Precision: arithmetic in A, each output rounded once.
#pragma once

#include "channel_args.cuh"

// How runs that VEC does not divide lie in vectors: from the first element on, the last one has
// fewer; or as memory is aligned, so that the first one lacks some, too, and a run that starts late
// in a vector may take one more.
enum class Ends { kWhole, kRagged, kMasked };

template <int VEC, int ACCESS, int PACKS, int SHARED, int THREADS, int SETS, int CLUSTER, int CTAS,
          bool ONE_RUN, bool SEGMENT, bool TABLE, Ends ENDS, bool CROSSING>
struct RunShape : RowShape<VEC, ACCESS, PACKS, SHARED, THREADS, SETS, CLUSTER, kLate, CTAS, false,
                           SEGMENT, ACCESS> {
    static constexpr bool kOneRun = ONE_RUN;  // a set lies in one sample
    static constexpr bool kTable = TABLE;     // of the weights and biases of a set in shared memory
    static constexpr bool kAssigns = false;
    static constexpr bool kRagged = ENDS == Ends::kRagged;
    static constexpr bool kMasked = ENDS == Ends::kMasked;
    static constexpr bool kCrossing = CROSSING;  // a vector may have elements of several channels
    static constexpr int kRecords = 4;  // eight do not fit 64 registers, beside what is held
    static_assert(ONE_RUN || !(CROSSING || kRagged), "runs of one channel");
};

// Which set, and which of its vectors, this thread works on; `step` is that of the array that is
// being walked. As Place in row_tile.cuh.
template <int VEC, int ACCESS, int PACKS, int SHARED, int THREADS, int SETS, int CLUSTER, int CTAS,
          bool ONE_RUN, bool SEGMENT, bool TABLE, Ends ENDS, bool CROSSING>
struct Place<RunShape<VEC, ACCESS, PACKS, SHARED, THREADS, SETS, CLUSTER, CTAS, ONE_RUN, SEGMENT,
                      TABLE, ENDS, CROSSING>> {
    static constexpr unsigned kStride = THREADS * CLUSTER;
    static constexpr bool kRagged = ENDS == Ends::kRagged, kMasked = ENDS == Ends::kMasked;

    const ChannelArgs& args;
    SetIndex index;
    bool live;
    unsigned vectors;             // of the set, or of the segment
    unsigned first;               // of this thread
    long long run = 0, rest = 0;  // run in which the segment starts, vectors into it
    long long passed = 0;         // vectors of the set before the segment
    long long step = 0;
    // Where VEC does not divide runs: elements of the first run's first vector that are before it;
    // and elements of a run; of one run, with those before it, from a segment's first vector on.
    unsigned lead = 0, end = 0;

    // All of the set.
    using Set = typename RowNumberOf<SETS == 1>::type;
    __device__ __forceinline__ Place(const ChannelArgs& args, Set set, unsigned skipped)
        : args(args),
          index(args, set),
          live(index.live),
          vectors(live ? args.brief.vectors : 0),
          first(skipped + (SETS == 1 ? threadIdx.x : threadIdx.x % THREADS)) {
        align();
    }

    // Segment number `segment` of the set.
    __device__ __forceinline__ Place(const ChannelArgs& args, long long set, long long segment)
        : args(args), index(args, set), live(true), first(threadIdx.x) {
        constexpr long long kVectors = THREADS * PACKS;
        passed = segment * kVectors;
        vectors = min(args.vectors - passed, kVectors);
        if (!ONE_RUN && args.runs > 1) run = passed / args.length.size;
        rest = passed - run * args.length.size;
        align();
    }
    __device__ __forceinline__ void align() {
        if constexpr (ENDS == Ends::kWhole) return;
        if (kMasked) lead = unsigned(index.inner) * unsigned(length()) % VEC;
        const long long of_segment = length() + (ONE_RUN ? lead - passed * VEC : 0);
        end = min(max(of_segment, 0ll), 1ll << 31);  // the last one may have none
    }
    // The same of a run, in all arrays.
    __device__ __forceinline__ unsigned lead_of(long long run) const {
        if constexpr (!kMasked || ONE_RUN) return lead;
        return (lead + unsigned(run) * unsigned(step)) % VEC;
    }

    __device__ __forceinline__ void walk(ChannelArray array) {
        step = array == kChannelX ? args.brief.x_step : args.run_step[array];
    }
    // Elements of a run.
    __device__ __forceinline__ long long length() const {
        if constexpr (kMasked && !ONE_RUN) return args.inner_step;
        const long long length = SEGMENT ? args.length.size : args.brief.length.size;
        return ENDS == Ends::kWhole ? length * VEC : length;
    }
    // Where the set starts in the array that is walked.
    __device__ __forceinline__ long long base() const {
        return index.outer * step + index.inner * length();
    }
    __device__ __forceinline__ unsigned vector(int pack) const { return first + pack * kStride; }
    __device__ __forceinline__ long long column_of(unsigned vector) const {
        if constexpr (ONE_RUN) return (rest + vector) * VEC - (long long)lead;
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
    // An element of the same run, a few before its end.
    __device__ __forceinline__ long long start() const {
        if constexpr (ENDS == Ends::kWhole) return origin();
        const long long last = max(length() - VEC, 0ll);
        return run * step + min(max(rest * VEC - (long long)lead_of(run), 0ll), last);
    }
    // Of one run in two terms, so that the packs of an array need one address between them.
    __device__ __forceinline__ long long column(int pack) const {
        if constexpr (ONE_RUN) return column_of(first) + pack * (long long)(kStride * VEC);
        if constexpr (kMasked) return Spot(*this, pack).column();
        return column_of(vector(pack));
    }
    __device__ __forceinline__ bool holds(int pack) const { return vector(pack) < vectors; }
    // Elements of the vectors before a pack: of one run, those of the segment.
    __device__ __forceinline__ unsigned elements_before(int pack) const {
        return vector(pack) * VEC;
    }
    // As Place in row_tile.cuh.
    __device__ __forceinline__ unsigned elements(int pack) const {
        const unsigned before = elements_before(pack);
        return end > before ? min(end - before, unsigned(VEC)) : 0;
    }
    // Where ends are masked, a pack: worked out anew each time if there are several, for want of
    // registers to keep those of all.
    struct Spot {
        const Place& place;
        unsigned vector, runs = 0;  // runs: before its own
        unsigned before, lead;      // elements of vectors before it in its run; lead of that

        __device__ __forceinline__ Spot(const Place& place, int pack)
            : place(place),
              vector((PACKS > 2 ? opaque(place.first) : place.first) + pack * kStride) {
            if constexpr (ONE_RUN) {
                before = vector * VEC;
            } else {
                const Divisor& length = place.args.brief.length;
                const unsigned local = unsigned(place.rest) + vector;
                runs = length.quotient(local, place.args.brief.length_shift);
                before = (local - runs * length.size) * VEC;
            }
            lead = place.lead_of(place.run + runs);
        }
        __device__ __forceinline__ Span span() const {
            if (vector >= place.vectors) return {0, 0};
            const bool starts = before == 0 && (!ONE_RUN || place.passed == 0);
            const unsigned end = ONE_RUN ? place.end : place.end + lead;
            return {starts ? lead : 0, end > before ? min(end - before, unsigned(VEC)) : 0};
        }
        __device__ __forceinline__ long long column() const {
            const long long of_run = ONE_RUN ? place.rest * VEC : (place.run + runs) * place.step;
            return of_run + before - (long long)lead;
        }
        // Whether it is of the very last run.
        __device__ __forceinline__ bool ends_array() const {
            return !ONE_RUN && place.index.inner + 1 == place.args.inner_sets &&
                   place.run + runs + 1 == place.args.runs;
        }
    };
    __device__ __forceinline__ ptx::Neighbours neighbours(int pack) const {
        constexpr unsigned kLanes = THREADS < 32 ? THREADS : 32;
        const unsigned lane = threadIdx.x % kLanes;
        const bool last = lane == kLanes - 1;
        return {lane > 0, !last && elements_before(pack) + 2 * VEC <= end};
    }
    // Elements of the vectors: of the segment, or of the set.
    __device__ __forceinline__ double count() const {
        if constexpr (ENDS == Ends::kWhole) return double(vectors) * VEC;
        return double(elements_of_first(rest + vectors) - elements_of_first(rest));
    }
    // Of so many vectors from the start of the run on.
    __device__ __forceinline__ long long elements_of_first(long long vectors) const {
        const long long runs = ONE_RUN ? 0 : args.length.quotient(vectors);
        const long long of_last =
            (vectors - runs * args.length.size) * VEC - (long long)lead_of(run + runs);
        return runs * length() + min(max(of_last, 0ll), length());
    }
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
    static constexpr bool kCrossing = Shape::kCrossing && !Norm::kSetsAreOneChannel;
    static constexpr int kEach = Norm::kSetsAreOneChannel ? 1 : Shape::kPacks;  // of them differ
    static constexpr int kKept = kTable || kCrossing ? 0 : kEach < 4 ? kEach : 4;

    struct alignas(2 * sizeof(A)) Affine {
        A weight, bias;
    };

    const PackChannel<Norm, Place<Shape>> channel;
    Fetched<T> weight[kKept ? kKept : 1], bias[kKept ? kKept : 1];

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
        // Of one channel whichever packs are held.
        if (kEach == 1 ? channel.place.first >= channel.place.vectors : !channel.place.holds(i))
            return;
        const long long of_pack = channel.of_pack(i);
        weight[i % kKept] = Fetched<T>(channel.place.args, kWeight, of_pack);
        bias[i % kKept] = Fetched<T>(channel.place.args, kBias, of_pack);
    }

    // f(e, coefficients): for every element of a pack that has those of several channels.
    template <class F>
    __device__ __forceinline__ void for_each_element(int i, const Centred<A>& statistics,
                                                     F f) const {
        const ChannelArgs& args = channel.place.args;
        const unsigned length = args.kept.channel.size;
        const unsigned lead = channel.place.lead, before = channel.place.elements_before(i);
        unsigned of_set = channel_of(args, max(before, lead) - lead);
        unsigned next = (of_set + 1) * length + lead - before;  // element of the next channel
        Affine now = affine_of(args, of_set);
#pragma unroll
        for (unsigned e = 0; e < Shape::kVec; ++e) {
            if (e == next) {
                ++of_set;
                next += length;
                if (of_set < unsigned(args.set_channels)) now = affine_of(args, of_set);
            }
            f(e, Coefficients<A>::of(statistics, A(1), now.weight, now.bias));
        }
    }
    // Of the set, that of an element.
    static __device__ __forceinline__ unsigned channel_of(const ChannelArgs& args,
                                                          unsigned element) {
        const Divisor& by = args.kept.channel;
        return by.size == 1 ? element : __umulhi(element, by.multiplier) >> args.kept.channel_shift;
    }
    __device__ __forceinline__ Affine affine_of(const ChannelArgs& args, unsigned of_set) const {
        if constexpr (kTable) return table()[of_set];
        return {small<T>(args, kWeight, channel.before + of_set, A(1)),
                small<T>(args, kBias, channel.before + of_set, A(0))};
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

// x becomes y. Coefficients are asked for once for a set of one channel, else for every pack, or
// every element.
template <class Norm, typename T, class Shape, class Affine, typename A = Accumulator<T>>
__device__ __forceinline__ void map_tile(RowTile<T, Shape>& x, Affine& affine,
                                         const Centred<A>& statistics) {
    Coefficients<A> now;
    if constexpr (!Affine::kCrossing) now = affine.of_pack(0, statistics);
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
        if (!x.holds(i)) continue;
        A value[Shape::kVec];
        if constexpr (Affine::kCrossing) {
            x.widened(i, value);
            affine.for_each_element(i, statistics, [&](unsigned e, const Coefficients<A>& by) {
                value[e] = by.apply(value[e]);
            });
        } else {
            if (!Norm::kSetsAreOneChannel && i > 0) now = affine.of_pack(i, statistics);
            x.widened(i, value);
#pragma unroll
            for (int e = 0; e < Shape::kVec; ++e) value[e] = now.apply(value[e]);
        }
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
    const unsigned whole =
        Shape::kMasked && Shape::kOneRun ? unsigned(place.length()) / Shape::kVec : place.vectors;
    const NearMean<T, Shape> near(from, whole, args.brief.length.size, place.step);
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
    if (args.y != nullptr && place.first < place.vectors) {
        map_tile<Norm>(x, affine, found.statistics);
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

// The record of a segment of `count` elements, to place `number` among all; the scale of what is
// held then.
template <typename T, class Shape>
__device__ __forceinline__ Accumulator<T> record_tile(const ChannelArgs& args, RowTile<T, Shape>& x,
                                                      double count, long long number) {
    using A = Accumulator<T>;
    const Team<Shape> team;
    RowNumbers numbers = args.numbers;
    numbers.count = max(count, 1.0);  // a last vector may have no elements
    numbers.inverse = 1.0 / numbers.count;
    numbers.inverse32 = 1.0f / float(numbers.count);
    const auto found = examine_row<Centred<A>>(x, team, numbers, [] {});
    if (threadIdx.x == 0) {
        SegmentRecord record =
            segment_record<A>(found.record, numbers.count, found.centre, found.scale);
        record.count = count;
        static_cast<SegmentRecord*>(args.partial)[number] = record;
    }
    return found.scale;
}

template <typename T, class Shape>
__device__ __forceinline__ void record_segment(const ChannelArgs& args, long long set,
                                               long long segment) {
    Place<Shape> place(args, set, segment);
    RowTile<T, Shape> x(place);
    place.walk(kChannelX);
    x.read(static_cast<const T*>(args.x) + place.base(), place.start());
    record_tile(args, x, place.count(), set * args.segments + segment);
}

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    run_statistics(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    const long long set = blockIdx.x / args.segments;
    record_segment<T, Shape>(args, set, blockIdx.x - set * args.segments);
}
