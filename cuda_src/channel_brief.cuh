// Channels-first norms of sets that a CTA has in registers, straight on: no branch between the
// loads and the output.
//
// A set is normalized before it is asked whether it may be: where it may not, its CTA starts again
// with what run_norm does, as a function that stands aside. Arrays, precision and bits are those of
// channel_runs.cuh.
//
// Launch: as run_norm, without packs in shared memory; 32 bits number all elements, x and y have
// the same steps, sets of one run follow each other, and small arrays are contiguous, of the types
// of Smalls.
#pragma once

#include "channel_runs.cuh"

// Which set, and which of its vectors, this thread works on. Past the last set: the last one again.
template <class Shape>
struct BriefPlace {
    unsigned set, vectors, first;
    bool live;

    __device__ __forceinline__ explicit BriefPlace(const ChannelArgs& args)
        : vectors(args.brief.vectors),
          first(Shape::kRows == 1 ? threadIdx.x : threadIdx.x % Shape::kThreads) {
        const unsigned asked = unsigned(set_of_thread<Shape>());
        live = Shape::kRows == 1 || asked < args.brief.sets;
        set = live ? asked : args.brief.sets - 1;
    }

    __device__ __forceinline__ unsigned vector(int pack) const {
        return first + pack * Shape::kThreads;
    }
    __device__ __forceinline__ bool holds(int pack) const { return vector(pack) < vectors; }
    // Where the set starts.
    __device__ __forceinline__ unsigned base(const ChannelArgs& args) const {
        const unsigned step = Shape::kOneRun ? vectors : args.brief.length.size;
        return set * (step * Shape::kVec);
    }
    __device__ __forceinline__ unsigned offset(const ChannelArgs& args, unsigned vector) const {
        if constexpr (Shape::kOneRun) return vector * Shape::kVec;
        const unsigned runs = args.brief.length.quotient(vector, args.brief.length_shift);
        const unsigned rest = vector - runs * args.brief.length.size;
        return runs * unsigned(args.brief.x_step) + rest * Shape::kVec;
    }
};

// The packs of a thread; zeros for those that are not of the set.
template <typename T, class Shape>
struct BriefTile {
    static constexpr int kVec = Shape::kVec, kPacks = Shape::kPacks;
    static constexpr int kExactSum = RowTile<T, Shape>::kExactSum;
    using A = Accumulator<T>;

    const BriefPlace<Shape>& place;
    unsigned at[kPacks];
    Pack<T, kVec> held[kPacks];

    __device__ __forceinline__ BriefTile(const ChannelArgs& args, const BriefPlace<Shape>& place,
                                         const T* set)
        : place(place) {
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
            at[i] = place.offset(args, place.vector(i));
            held[i] = {};
            if (place.holds(i)) held[i] = begin_load<Shape::kAccess, kVec>(set + at[i]);
        }
    }
    // Of what has been read, which is waited for where packs are shifted.
    __device__ __forceinline__ void finish_packs(const T* set) {
#pragma unroll
        for (int i = 0; i < kPacks; ++i)
            if (place.holds(i)) held[i] = finish_load<Shape::kAccess>(held[i], set + at[i]);
    }

    __device__ __forceinline__ void widened(int i, A (&values)[kVec]) const {
        widen_pack(opaque(held[i]), values);
    }
    template <class F>
    __device__ __forceinline__ void for_each_pack(F f) const {
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
            A values[kVec];
            widened(i, values);
            f(i, values);
        }
    }
    // f(i, values) makes of pack i what takes its place.
    template <class F>
    __device__ __forceinline__ void map(F f) {
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
            A values[kVec];
            widened(i, values);
            f(i, values);
            held[i] = narrowed<T>(values);
        }
    }
    __device__ __forceinline__ void write(T* set) const {
#pragma unroll
        for (int i = 0; i < kPacks; ++i)
            if (place.live && place.holds(i)) store<Shape::kAccess, kVec>(set + at[i], held[i]);
    }
};

template <typename T, class Shape, typename A>
__device__ __forceinline__ A centre_of(const BriefTile<T, Shape>& x, int pack, A centre) {
    return x.place.holds(pack) ? centre : A(0);
}

// Types of weight and bias, and of running statistics that are moved; void where there are none.
template <typename P_, typename R_>
struct Smalls {
    using P = P_;
    using R = R_;
};

// Element i of a small array, on its way; `absent` where there is none. NOW: the compiler may not
// put it off, as it does where few loads stand around it.
template <typename P, bool NOW>
struct BriefSmall {
    static constexpr bool kGiven = true;
    Pack<P, 1> pack;

    BriefSmall() = default;
    __device__ __forceinline__ BriefSmall(const ChannelArgs& args, Small which, unsigned i) {
        const P* const from = static_cast<const P*>(args.small[which]) + i;
        pack = load<1, 1>(from);
        if constexpr (NOW) ptx::known(from);
    }
    template <typename A>
    __device__ __forceinline__ A value(A) const {
        return widen<A>(part_of<P>(pack, 0));
    }
};
template <bool NOW>
struct BriefSmall<void, NOW> {
    static constexpr bool kGiven = false;

    BriefSmall() = default;
    __device__ __forceinline__ BriefSmall(const ChannelArgs&, Small, unsigned) {}
    template <typename A>
    __device__ __forceinline__ A value(A absent) const {
        return absent;
    }
};

// Weight and bias: of the set, of every pack, or where several warps share a set of several
// channels, in a table.
template <class Norm, typename T, class Smalls, class Shape>
struct BriefAffine {
    using A = Accumulator<T>;
    using General = PackAffine<Norm, T, Shape>;
    using Affine = typename General::Affine;
    static constexpr int kEach = Norm::kSetsAreOneChannel ? 1 : Shape::kPacks;
    static constexpr int kKept = General::kTable ? 1 : kEach;

    const ChannelArgs& args;
    const BriefPlace<Shape>& place;
    BriefSmall<typename Smalls::P, General::kTable> weight[kKept], bias[kKept];

    __device__ __forceinline__ BriefAffine(const ChannelArgs& args, const BriefPlace<Shape>& place,
                                           unsigned inner)
        : args(args), place(place) {
        if constexpr (General::kTable) {
            const unsigned channels = unsigned(args.set_channels);
            if (threadIdx.x >= channels) return;
            fetch(0, inner * channels + threadIdx.x);
            General::table()[threadIdx.x] = affine(0);
        } else if constexpr (Norm::kSetsAreOneChannel) {
            fetch(0, inner);
        } else {
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                if (place.holds(i)) fetch(i, inner * unsigned(args.set_channels) + channel(i));
        }
    }
    __device__ __forceinline__ unsigned channel(int pack) const {
        return args.channel.quotient_near(place.vector(pack));
    }
    __device__ __forceinline__ void fetch(int i, unsigned channel) {
        weight[i] = {args, kWeight, channel};
        bias[i] = {args, kBias, channel};
    }
    __device__ __forceinline__ Affine affine(int i) const {
        return {weight[i].value(A(1)), bias[i].value(A(0))};
    }
    __device__ __forceinline__ Coefficients<A> of_pack(int i, const Centred<A>& statistics) const {
        Affine by;
        if constexpr (General::kTable)
            by = General::table()[place.holds(i) ? channel(i) : 0];
        else
            by = affine(i % kKept);
        return Coefficients<A>::of(statistics, A(1), by.weight, by.bias);
    }
};

// Running statistics of a channel, on their way.
template <typename T, class Smalls>
struct BriefRunning {
    using A = Accumulator<T>;
    using R = typename Smalls::R;
    using Old = BriefSmall<R, false>;
    Old mean, variance;

    __device__ __forceinline__ BriefRunning(const ChannelArgs& args, unsigned channel)
        : mean(args, kRunningMean, channel), variance(args, kRunningVar, channel) {}
};

// What is known of a set that has not been multiplied, to be stored by its first thread when y is
// on its way. All work it out, right or not: between the instructions that make y it takes no time.
template <typename T, class Smalls>
struct BriefResults {
    using A = Accumulator<T>;
    using R = typename Smalls::R;

    A mean, rstd;
    SetMoments moments;
    A running_mean, running_variance;

    __device__ __forceinline__ BriefResults(const ChannelArgs& args,
                                            const Findings<Centred<A>, A>& found,
                                            const BriefRunning<T, Smalls>& old) {
        const RowNumbers& numbers = args.numbers;
        mean = found.statistics.mean.hi + found.statistics.mean.lo;
        rstd = found.statistics.rstd * found.unit;
        const Wide<A> wide_mean = Centred<A>::mean_of(found.record, numbers.count, numbers.inverse);
        const double squares =
            Centred<A>::spread(found.record, wide_mean, found.centre, numbers.count);
        moments = {leading(wide_mean), squares * args.unbiased};
        running_mean = moved(args, old.mean.value(A(0)), moments.mean);
        running_variance = moved(args, old.variance.value(A(0)), moments.variance);
    }
    static __device__ __forceinline__ A moved(const ChannelArgs& args, A old, double value) {
        const double before = as_running<T>(args, old);
        return as_running<T>(args, A((1.0 - args.momentum) * before + args.momentum * value));
    }

    __device__ __forceinline__ void store(const ChannelArgs& args, unsigned set) const {
        if (args.mean_out) static_cast<A*>(args.mean_out)[set] = mean;
        if (args.rstd_out) static_cast<A*>(args.rstd_out)[set] = rstd;
        if (args.moments) static_cast<SetMoments*>(args.moments)[set] = moments;
        if constexpr (BriefRunning<T, Smalls>::Old::kGiven) {
            static_cast<R*>(args.small[kRunningMean])[set] = narrow<R>(running_mean);
            static_cast<R*>(args.small[kRunningVar])[set] = narrow<R>(running_variance);
        }
    }
};

// The first step of examine_row. Where it does not do, the verdict says so.
template <typename T, class Shape, typename A = Accumulator<T>>
__device__ __forceinline__ Findings<Centred<A>, A> examine_brief(const BriefTile<T, Shape>& x,
                                                                 const Team<Shape>& team,
                                                                 const RowNumbers& numbers,
                                                                 A near) {
    Findings<Centred<A>, A> found;
    found.scale = A(1);
    found.centre = near;
    const auto conclude = [&](const typename Centred<A>::Record& record) {
        Conclusion<Centred<A>, A> set;
        set.unit = A(1);
        set.statistics = Centred<A>::finish(record, numbers, found.centre, set.unit, set.verdict);
        if (!NeedsRescue<T>::value && set.verdict == Verdict::kOutOfRange)
            set.verdict = Verdict::kSound;
        found.record = record;
        return set;
    };
    static_cast<Conclusion<Centred<A>, A>&>(found) =
        team.agree(Centred<A>::of_values(x, near), Plus(), conclude);
    return found;
}

template <class Norm, typename T, class Shape>
__device__ __noinline__ void start_set_again(const ChannelArgs& args) {
    if constexpr (Shape::kWarps > 1) __syncthreads();  // the table has been read
    Place<Shape> place(args, set_of_thread<Shape>(), 0u);
    normalize_set<Norm, T>(args, place, Team<Shape>());
}

template <class Norm, typename T, class Smalls, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    run_norm_brief(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    const BriefPlace<Shape> place(args);
    const T* const from = static_cast<const T*>(args.x) + place.base(args);
    BriefTile<T, Shape> x(args, place, from);
    const NearMean<T, Shape> near(from, place.vectors, args.brief.length.size,
                                  unsigned(args.brief.x_step));
    const unsigned above = Norm::kSetsAreChannels
                               ? 0
                               : args.brief.inner_sets.quotient(place.set, args.brief.inner_shift);
    const unsigned inner = place.set - above * args.brief.inner_sets.size;
    const BriefAffine<Norm, T, Smalls, Shape> affine(args, place, inner);
    const BriefRunning<T, Smalls> old(args, inner);

    x.finish_packs(from);
    const Team<Shape> team;
    const auto found = examine_brief(x, team, args.numbers, near.value());
    const BriefResults<T, Smalls> results(args, found, old);
    x.map([&](int i, A(&value)[Shape::kVec]) {
        const Coefficients<A> by = affine.of_pack(i, found.statistics);
#pragma unroll
        for (int e = 0; e < Shape::kVec; ++e) value[e] = by.apply(value[e]);
    });
    if (team.any(found.verdict != Verdict::kSound)) {
        start_set_again<Norm, T, Shape>(args);
        return;
    }
    x.write(static_cast<T*>(args.y) + place.base(args));
    if (place.live && place.first == 0) results.store(args, place.set);
}
