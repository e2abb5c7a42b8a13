// Backward of the norms whose sets belong to one sample: group and instance norm.
//
//   xhat = (x - mean) * rstd
//   grad_x = rstd * (grad_out * weight - a - xhat * b)
//   a, b: means over the set of grad_out * weight and of grad_out * weight * xhat
//   grad_bias = sum grad_out,  grad_weight = sum grad_out * xhat,  over all samples
//
// Both need the same two sums of every channel of a sample. They are taken of units: pieces of a
// channel, `PACKS` vectors for each of `LANES` neighbouring threads. A set is its units, weighted;
// the units of a channel leave as records (group_merge.cuh).
//
//   group_gradient, ..._cluster   a set on chip: read once, written once; a record for each unit
//   group_gradient_samples        small sets of several samples; a record for each unit of them
//   group_gradient_single, _few   all samples by one CTA, one cluster: no records
//   group_gradient_sums           a share of a large set: its records
//   column_group_sums             channels last: a block of rows of a tile of columns, its records
//   run_map, column_map of StoredGroupGradient    grad_x (channel_map.cuh)
//
// Of ChannelArgs: `length` is a channel's vectors, `channel` its units, `runs` the samples,
// `segment_rows` those that share records, `segments` the shares of a set.
//
// Launch: group_gradient: grid = ceil(sets / SETS), or sets * CLUSTER; single, few: grid =
// inner_sets * SAMPLES, SAMPLES >= N; sums: grid = sets * segments; block = THREADS * SETS;
// 2 * SHARED packs a thread of dynamic shared memory. VEC divides S, and every channel of every
// array starts at a multiple of ACCESS elements.
// Arrays: channel_args.cuh. Precision: sums keep their rounding errors; each output is rounded
// once. How a sample is added up depends on the shape alone, never on the number of samples.
#pragma once

#include "group_merge.cuh"

// A thread holds UNITS * PACKS packs of each array, the last SHARED of them in shared memory.
template <int VEC, int ACCESS, int LANES, int PACKS, int UNITS, int SHARED, int THREADS, int SETS,
          int CLUSTER, int CTAS, bool SEGMENT>
struct GroupShape {
    static constexpr int kVec = VEC, kAccess = ACCESS;
    static constexpr int kUnitLanes = LANES;  // neighbours that share a unit
    static constexpr int kPacks = PACKS;      // of a unit in a thread
    static constexpr int kUnits = UNITS;      // of a thread
    static constexpr int kHeld = UNITS * PACKS - SHARED;
    static constexpr int kThreads = THREADS, kRows = SETS, kCluster = CLUSTER, kCtas = CTAS;
    static constexpr bool kSegment = SEGMENT;  // one share of a set
    static constexpr int kRecords = 4;
    static constexpr int kLanes = THREADS < 32 ? THREADS : 32;
    static constexpr int kWarps = THREADS / kLanes;
    static constexpr int kBlock = THREADS * SETS;
    static constexpr int kTeams = THREADS * CLUSTER / LANES;  // that share the units of a set
    static_assert(LANES <= kLanes && kHeld > 0,
                  "a team is part of a warp, with packs in registers");
};

// -- channels first -----------------------------------------------------------------------------

// The units of a set, or of one share of it, that this thread has part in.
template <class Shape>
struct Units {
    static constexpr int kLanes = Shape::kUnitLanes, kPacks = Shape::kPacks;

    const ChannelArgs& args;
    SetIndex index;
    bool live;
    long long first;                // unit of the set with which the share begins
    long long before;               // channels of the set before that unit's
    unsigned team;                  // number of this thread's team: of its first unit, in the share
    unsigned start[Shape::kUnits];  // first vector of this thread, from that channel on
    int left[Shape::kUnits];        // vectors of the unit's channel from there; none: below 1

    // `rank`: which CTA of those that share the set.
    __device__ __forceinline__ Units(const ChannelArgs& args, const SetIndex& index, unsigned rank,
                                     long long first)
        : args(args),
          index(index),
          live(index.live),
          first(first),
          before(0),
          team((rank * Shape::kThreads +
                (Shape::kRows == 1 ? threadIdx.x : threadIdx.x % Shape::kThreads)) /
               kLanes) {
        if (Shape::kSegment) before = first / args.channel.size;
        const unsigned vectors = of_channel(), units = args.channel.size;
#pragma unroll
        for (int k = 0; k < Shape::kUnits; ++k) {
            const unsigned channel = channel_of(k);
            const unsigned piece = rest() + unit_of(k) - channel * units;
            const unsigned vector = piece * (kLanes * kPacks) + threadIdx.x % kLanes;
            start[k] = channel * vectors + vector;
            left[k] = exists(channel) ? int(vectors - vector) : 0;
        }
    }

    // What is read before x is in the first line of the arguments, for a set on chip.
    __device__ __forceinline__ unsigned of_channel() const {
        return Shape::kSegment ? unsigned(args.length.size) : args.brief.length.size;
    }
    __device__ __forceinline__ bool exists(unsigned channel) const {
        if (Shape::kSegment) return before + channel < args.set_channels;
        return channel * args.brief.length.size < args.brief.vectors;
    }
    // Number of a unit from the first of the share on.
    __device__ __forceinline__ unsigned unit_of(int k) const { return team + k * Shape::kTeams; }
    // Units of the first channel that belong to shares before this one.
    __device__ __forceinline__ unsigned rest() const {
        return Shape::kSegment ? unsigned(first - before * args.channel.size) : 0u;
    }
    // Channel of a unit, from that of the first on. Units that a set on chip has are few.
    __device__ __forceinline__ unsigned channel_of(int k) const {
        if (Shape::kSegment) return args.channel.quotient((long long)rest() + unit_of(k));
        return args.channel.quotient_near(unit_of(k));
    }
    __device__ __forceinline__ bool holds(int k, int i) const {
        return live && i * kLanes < left[k];
    }
    // Where this thread's first pack of a unit lies in an array of which the share starts at
    // `base`, and where the others do from there. The compiler must take the one as it is: it would
    // work it out anew for every pack. (Of a pointer it would forget that it is to global memory.)
    __device__ __forceinline__ long long first_pack(long long base, int k) const {
        base += (long long)start[k] * Shape::kVec;
        asm volatile("" : "+l"(base));
        return base;
    }
    static __device__ __forceinline__ size_t offset(int i) {
        return size_t(i) * kLanes * Shape::kVec;
    }
    __device__ __forceinline__ long long channel(int k) const {
        return index.inner * args.set_channels + before + channel_of(k);
    }
    // Where the share's first channel starts.
    __device__ __forceinline__ long long base(ChannelArray array, long long sample) const {
        const long long step = array == kChannelX ? args.brief.x_step : args.run_step[array];
        const long long of_set = Shape::kSegment ? args.vectors : args.brief.vectors;
        return sample * step + (index.inner * of_set + before * args.length.size) * Shape::kVec;
    }
    __device__ __forceinline__ long long record(int k) const {
        return (index.outer * args.channels + index.inner * args.set_channels) * args.channel.size +
               first + unit_of(k);
    }
};

// The packs of x and grad_out that one thread holds, in their stored type.
template <typename T, class Shape>
struct UnitPacks {
    static constexpr int kVec = Shape::kVec, kHeld = Shape::kHeld;
    static constexpr bool kCopies = Shape::kAccess * sizeof(T) == 16;
    using Slots = Arrivals<Shape::kUnits * Shape::kPacks - kHeld>;
    using A = Accumulator<T>;
    using P = Pack<T, kVec>;

    P held[2][kHeld];

    static __device__ __forceinline__ P* slot(int array, int pack) {
        extern __shared__ uint4 slots[];
        return reinterpret_cast<P*>(slots) + (2 * (pack - kHeld) + array) * Shape::kBlock +
               threadIdx.x;
    }
    __device__ __forceinline__ P get(int array, int pack) const {
        return pack < kHeld ? held[array][pack] : *slot(array, pack);
    }

    __device__ __forceinline__ void read_pack(int array, int pack, const T* from) {
        if constexpr (kCopies) {
            if (pack >= kHeld) return copy_async<false>(slot(array, pack), from);
        }
        const P mine = load<Shape::kAccess, kVec>(from);
        if (pack < kHeld)
            held[array][pack] = mine;
        else
            *slot(array, pack) = mine;
    }
    // Starts to read.
    __device__ __forceinline__ void read(const Units<Shape>& units, long long sample) {
        const long long in_x = units.base(kChannelX, sample);
        const long long in_grad_out = units.base(kGradOut, sample);
#pragma unroll
        for (int k = 0; k < Shape::kUnits; ++k) {
            const T* const of_x = static_cast<const T*>(units.args.x) + units.first_pack(in_x, k);
            const T* const of_grad_out =
                static_cast<const T*>(units.args.grad_out) + units.first_pack(in_grad_out, k);
#pragma unroll
            for (int i = 0; i < Shape::kPacks; ++i) {
                const int pack = k * Shape::kPacks + i;
                if (units.holds(k, i)) {
                    read_pack(0, pack, of_x + units.offset(i));
                    read_pack(1, pack, of_grad_out + units.offset(i));
                }
                Slots::begun(pack - kHeld);
            }
        }
    }
    __device__ __forceinline__ void widened(int pack, A (&x)[kVec], A (&grad_out)[kVec]) const {
        if constexpr (sizeof(T) == 2) {  // as RowTile::widened
            widen_pack(opaque(get(0, pack)), x);
            widen_pack(opaque(get(1, pack)), grad_out);
        } else {
            widen_pack(get(0, pack), x);
            widen_pack(get(1, pack), grad_out);
        }
    }
};

// What one thread has of a unit.
template <typename A>
struct UnitSums {
    Pair<A> sum, product;

    template <int VEC>
    __device__ __forceinline__ void add(const A (&x)[VEC], const A (&grad_out)[VEC], A mean,
                                        A power) {
        A part[2] = {}, part_product[2] = {};
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            part[e % 2] += grad_out[e];
            part_product[e % 2] = fma(grad_out[e], (x[e] - mean) * power, part_product[e % 2]);
        }
        sum.add(part[0] + part[1]);
        product.add(part_product[0] + part_product[1]);
    }
    __device__ __forceinline__ void add(const UnitSums& other) {
        sum.add(other.sum.hi);
        sum.lo += other.sum.lo;
        product.add(other.product.hi);
        product.lo += other.product.lo;
    }
    __device__ __forceinline__ GradientSums<A> wide() const {
        return {::wide(sum), ::wide(product)};
    }
};

template <typename T, class Shape, typename A = Accumulator<T>>
__device__ __forceinline__ void add_units(const Units<Shape>& units,
                                          const UnitPacks<T, Shape>& packs, A mean, A rstd,
                                          UnitSums<A> (&sums)[Shape::kUnits]) {
    const Factored<A> by(rstd);  // the terms are rounded once less
#pragma unroll
    for (int k = 0; k < Shape::kUnits; ++k) {
        sums[k] = {};
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            const int pack = k * Shape::kPacks + i;
            // Registers first, as RowTile::for_each_pack.
            UnitPacks<T, Shape>::Slots::await(pack - Shape::kHeld);
            if (!units.holds(k, i)) continue;
            A x[Shape::kVec], grad_out[Shape::kVec];
            packs.widened(pack, x, grad_out);
            sums[k].add(x, grad_out, mean, by.power);
        }
        sums[k].product = sums[k].product * by.factor;
    }
}

template <typename T, class Shape>
__device__ __forceinline__ void write_units(const Units<Shape>& units,
                                            const UnitPacks<T, Shape>& packs, long long sample,
                                            const GroupCoefficients<Accumulator<T>>& by,
                                            const Accumulator<T> (&weight)[Shape::kUnits]) {
    using A = Accumulator<T>;
    const long long in_y = units.base(kChannelY, sample);
#pragma unroll
    for (int k = 0; k < Shape::kUnits; ++k) {
        T* const of_unit = static_cast<T*>(units.args.y) + units.first_pack(in_y, k);
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            if (!units.holds(k, i)) continue;
            A x[Shape::kVec], grad_out[Shape::kVec];
            packs.widened(k * Shape::kPacks + i, x, grad_out);
#pragma unroll
            for (int e = 0; e < Shape::kVec; ++e) x[e] = by.apply(x[e], grad_out[e], weight[k]);
            store<Shape::kAccess, Shape::kVec>(of_unit + units.offset(i), narrowed<T>(x));
        }
    }
}

// store(k, record) by one thread for each unit. All lanes of a warp take part.
template <class Shape, typename A, class F>
__device__ __forceinline__ void make_records(const Units<Shape>& units,
                                             const UnitSums<A> (&sums)[Shape::kUnits], F store) {
#pragma unroll
    for (int k = 0; k < Shape::kUnits; ++k) {
        const GradientSums<A> all = Lanes<Shape::kUnitLanes>().combined(sums[k].wide(), Plus());
        if (threadIdx.x % Shape::kUnitLanes == 0 && units.holds(k, 0)) store(k, all);
    }
}
template <class Shape, typename A>
__device__ __forceinline__ void store_records(const ChannelArgs& args, const Units<Shape>& units,
                                              const UnitSums<A> (&sums)[Shape::kUnits]) {
    make_records(units, sums, [&](int k, const GradientSums<A>& record) {
        static_cast<GradientSums<A>*>(args.partial)[units.record(k)] = record;
    });
}

// The set of one sample; `keep` takes its unit sums.
template <typename T, class Shape, class F>
__device__ __forceinline__ void differentiate_sample(const ChannelArgs& args,
                                                     const Units<Shape>& units, long long sample,
                                                     const Team<Shape>& team, F keep) {
    using A = Accumulator<T>;
    UnitPacks<T, Shape> packs;
    packs.read(units, sample);
    const long long set = units.live ? sample * args.brief.inner_sets.size + units.index.inner : 0;
    const A mean = statistic<A>(args, kMean, set), rstd = statistic<A>(args, kRstd, set);
    Fetched<T> on_its_way[Shape::kUnits];
#pragma unroll
    for (int k = 0; k < Shape::kUnits; ++k)
        on_its_way[k] = Fetched<T>(args, kWeight, units.holds(k, 0) ? units.channel(k) : 0);
    UnitSums<A> sums[Shape::kUnits];
    add_units(units, packs, mean, rstd, sums);
    A weight[Shape::kUnits];
#pragma unroll
    for (int k = 0; k < Shape::kUnits; ++k) weight[k] = on_its_way[k].value(args, kWeight, A(1));
    GradientSums<A> mine = weighted(sums[0].wide(), weight[0]);
#pragma unroll
    for (int k = 1; k < Shape::kUnits; ++k) mine = mine + weighted(sums[k].wide(), weight[k]);
    const auto by = team.agree(mine, Plus(), [&](const GradientSums<A>& all) {
        return GroupCoefficients<A>::of(args, mean, rstd, all);
    });
    keep(sums);  // before the output: then they take no registers there
    write_units(units, packs, sample, by, weight);
}

template <typename T, class Shape>
__device__ __forceinline__ void differentiate_set(const ChannelArgs& args,
                                                  const Units<Shape>& units,
                                                  const Team<Shape>& team) {
    using A = Accumulator<T>;
    differentiate_sample<T>(
        args, units, units.index.outer, team,
        [&](const UnitSums<A>(&sums)[Shape::kUnits]) { store_records(args, units, sums); });
}

// SETS sets a CTA.
template <class Shape>
__device__ __forceinline__ Units<Shape> units_of_cta(const ChannelArgs& args) {
    if (Shape::kRows == 1) return Units<Shape>(args, SetIndex(args, blockIdx.x), 0, 0);
    const long long set = (long long)blockIdx.x * Shape::kRows + threadIdx.x / Shape::kThreads;
    return Units<Shape>(args, SetIndex(args, set), 0, 0);
}

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    group_gradient(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    differentiate_set<T>(args, units_of_cta<Shape>(args), Team<Shape>());
}

// A group of few samples, SAMPLES a cluster: the parameters' gradients leave with them.
template <typename T, class Shape, int SAMPLES>
__device__ __forceinline__ void differentiate_group(const ChannelArgs& args, unsigned sample) {
    using A = Accumulator<T>;
    using Sums = GradientSums<A>;
    using ptx::Mailbox;
    static_assert(Shape::kRows == 1 && Shape::kCluster == 1, "a CTA a set");
    constexpr unsigned kMost = Shape::kTeams * Shape::kUnits;
    __shared__ Sums records[SAMPLES * kMost];  // in the CTA of the first sample
    __shared__ Mailbox box[1];
    if (SAMPLES > 1) {
        if (threadIdx.x == 0) ptx::open_mailbox(box);
        ptx::cluster_arrive_relaxed();
        if (sample * args.brief.inner_sets.size >= args.brief.sets) return;
    }
    const SetIndex index(sample, blockIdx.x / SAMPLES, args.brief.inner_sets.size);
    const Units<Shape> units(args, index, 0, 0);
    const auto keep = [&](const UnitSums<A>(&sums)[Shape::kUnits]) {
        if constexpr (SAMPLES > 1) ptx::cluster_wait();  // all mailboxes are open
        make_records(units, sums, [&](int k, const Sums& record) {
            Sums* const to = &records[sample * kMost + units.unit_of(k)];
            if constexpr (SAMPLES > 1)
                ptx::send(to, 0, record, box);
            else
                *to = record;
        });
    };
    differentiate_sample<T>(args, units, sample, Team<Shape>(), keep);
    if (sample > 0) return;
    if constexpr (SAMPLES > 1) {
        if (threadIdx.x == 0)
            ptx::expect(box, args.runs * args.set_channels * args.channel.size * sizeof(Sums));
        ptx::await(box, 0);
    } else {
        __syncthreads();
    }
    const unsigned of_channel = args.channel.size, count = of_channel * unsigned(args.runs);
    for (unsigned c = threadIdx.x / 32; c < args.set_channels; c += Shape::kBlock / 32) {
        Sums sums{wide(A(0)), wide(A(0))};
        for (unsigned i = threadIdx.x % 32; i < count; i += 32) {
            const unsigned n = args.channel.quotient(i);
            sums = sums + records[n * kMost + c * of_channel + (i - n * of_channel)];
        }
        sums = Lanes<32>().combined(sums, Plus());
        if (threadIdx.x % 32 == 0) store_sums<T>(args, index.inner * args.set_channels + c, sums);
    }
}

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    group_gradient_single(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    differentiate_group<T, Shape, 1>(args, 0);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <typename T, class Shape, int SAMPLES>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas) __cluster_dims__(SAMPLES, 1, 1)
    group_gradient_few(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    differentiate_group<T, Shape, SAMPLES>(args, ptx::cluster_rank());
}
#endif

// Samples one after the other, their records together: those of short channels would be larger
// than the channels.
template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    group_gradient_samples(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    const Team<Shape> team;
    Units<Shape> units = units_of_cta<Shape>(args);
    const bool exists = units.live;
    const long long begin = units.index.outer * args.segment_rows;
    UnitSums<A> sums[Shape::kUnits] = {};
#pragma unroll 1
    for (long long i = 0; i < args.segment_rows; ++i) {
        units.live = exists && begin + i < args.runs;
        if (i > 0) team.settle();
        differentiate_sample<T>(args, units, begin + i, team,
                                [&](const UnitSums<A>(&of_sample)[Shape::kUnits]) {
#pragma unroll
                                    for (int k = 0; k < Shape::kUnits; ++k)
                                        sums[k].add(of_sample[k]);
                                });
    }
    units.live = exists;
    store_records(args, units, sums);
}

// One set a cluster, one sample.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    __cluster_dims__(Shape::kCluster, 1, 1)
        group_gradient_cluster(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    const Team<Shape> team;
    const SetIndex index(args, blockIdx.x / Shape::kCluster);  // a CTA has one set
    const Units<Shape> units(args, index, team.rank, 0);
    differentiate_set<T>(args, units, team);
}
#endif

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    group_gradient_sums(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    const long long set = blockIdx.x / args.segments;
    const long long share = blockIdx.x - set * args.segments;
    const Units<Shape> units(args, SetIndex(args, set), 0, share * (Shape::kTeams * Shape::kUnits));
    UnitPacks<T, Shape> packs;
    packs.read(units, units.index.outer);
    UnitSums<A> sums[Shape::kUnits];
    add_units(units, packs, statistic<A>(args, kMean, set), statistic<A>(args, kRstd, set), sums);
    store_records(args, units, sums);
    const long long thread = (long long)blockIdx.x * Shape::kBlock + threadIdx.x;
    for (long long c = thread; c < args.channels; c += (long long)gridDim.x * Shape::kBlock)
        keep_weight<T>(args, c);
}

// -- channels last ------------------------------------------------------------------------------

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    column_group_sums(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    const ColumnPlace<Shape> place(args, blockIdx.x);
    const BlockRows<Shape> rows(args, place.block);
    GradientStream<T, Shape> stream(args, place, rows);
    stream.given = share_columns<Shape>(place.owns(args), [&]() -> GivenColumn<A> {
        const long long set =
            place.plane * args.inner_sets + place.own_column() / args.set_channels;
        const A mean = statistic<A>(args, kMean, set), rstd = statistic<A>(args, kRstd, set);
        if (place.plane == 0 && place.block == 0) keep_weight<T>(args, place.own_column());
        return {mean, rstd, A(0), A(0)};
    });
    ColumnGradient<T, Shape> gradient(stream.given);
    stream.take_all(gradient);
    const bool owns = place.owns(args);
    const GradientSums<A> sums = gradient.total(owns);
    if (owns)
        static_cast<GradientSums<A>*>(
            args.partial)[(place.plane * args.segments + place.block) * args.vectors +
                          place.own_column()] = sums;
}
