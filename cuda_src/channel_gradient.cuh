// Backward of the norms whose sets are channels: two sums of a channel, then grad_x.
//
//   sum = sum grad_out,  product = sum grad_out * xhat,  xhat = (x - mean) * rstd
//   grad_x = weight * rstd * (grad_out - sum / n - xhat * product / n)
//   grad_bias = sum,  grad_weight = product
//
// With frozen statistics the last two terms are left out, and grad_x leaves with the first pass.
//
//   run_gradient, column_gradient            a channel (a tile of channels) in registers
//   run_gradient_sums, column_gradient_sums  a segment (a block of rows): two sums a channel
//   gradient_merge                           those sums in a fixed order
//   run_map, column_map of StoredGradient    grad_x (channel_map.cuh)
//
// Launches as those of channel_runs.cuh, channel_tiles.cuh and channel_merge.cuh.
// Arrays: channel_args.cuh. Precision: sums keep their rounding errors; each output is rounded
// once.
#pragma once

#include "channel_map.cuh"
#include "channel_merge.cuh"
#include "channel_runs.cuh"

// The sum, and in the place of the squares the product.
template <typename A>
using GradientSums = Moments<Wide<A>>;

// What makes an element of grad_x.
template <typename A>
struct alignas(4 * sizeof(A) < 16 ? 4 * sizeof(A) : 16) GradientCoefficients {
    A mean, through_mean, through_rstd, factor;

    __device__ __forceinline__ A apply(A x, A grad_out) const {
        return fma(mean - x, through_rstd, grad_out - through_mean) * factor;
    }
};

template <typename T>
struct StoredGradient {
    using A = Accumulator<T>;
    static constexpr bool kTakesGradient = true, kFromEnd = true;
    static __device__ __forceinline__ GradientCoefficients<A> at(const ChannelArgs& args,
                                                                 long long outer,
                                                                 long long channel) {
        return static_cast<const GradientCoefficients<A>*>(
            args.coefficients)[outer * args.coefficient_step + channel];
    }
    static __device__ __forceinline__ A apply(const GradientCoefficients<A>& by, A x, A grad_out) {
        return by.apply(x, grad_out);
    }
};

template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ void set_gradient(const ChannelArgs& args, void* base, int which,
                                             long long channel, A value) {
    if (base == nullptr) return;
    if (args.out_is_wide[which])
        static_cast<A*>(base)[channel] = value;
    else
        static_cast<T*>(base)[channel] = narrow<T>(value);
}

template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ void store_sums(const ChannelArgs& args, long long channel,
                                           const GradientSums<A>& sums) {
    set_gradient<T>(args, args.mean_out, 0, channel, A(leading(sums.squares)));
    set_gradient<T>(args, args.rstd_out, 1, channel, A(leading(sums.sum)));
}

template <typename A>
__device__ __forceinline__ GradientCoefficients<A> gradient_coefficients(
    const RowNumbers& numbers, A mean, A rstd, A weight, const GradientSums<A>& sums) {
    return {mean, A(leading(sums.sum) * numbers.inverse),
            A(leading(sums.squares) * numbers.inverse * double(rstd)), rstd * weight};
}
template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ GradientCoefficients<A> gradient_coefficients(
    const ChannelArgs& args, long long channel, const GradientSums<A>& sums) {
    const Fetched<T> mean(args, kMean, channel), rstd(args, kRstd, channel),
        weight(args, kWeight, channel);
    return gradient_coefficients(args.numbers, mean.value(args, kMean, A(0)),
                                 rstd.value(args, kRstd, A(0)), weight.value(args, kWeight, A(1)),
                                 sums);
}

// -- channels first -----------------------------------------------------------------------------

// grad_out; its slots follow those of x.
template <typename T, class Shape>
using GradientTile = RowTile<T, Shape, 1>;

template <typename T, class Shape, typename A = Accumulator<T>>
__device__ __forceinline__ GradientSums<A> sums_of_tile(const RowTile<T, Shape>& x,
                                                        const GradientTile<T, Shape>& grad_out,
                                                        A mean, A rstd, const Team<Shape>& team) {
    constexpr int kVec = Shape::kVec;
    Pair<A> sum{0, 0}, product{0, 0};
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
        grad_out.await(i);
        if (!x.holds(i)) continue;
        A value[kVec], gradient[kVec], part[2] = {}, part_product[2] = {};
        x.widened(i, value);
        grad_out.widened(i, gradient);
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
            part[e % 2] += gradient[e];
            part_product[e % 2] = fma(gradient[e], (value[e] - mean) * rstd, part_product[e % 2]);
        }
        sum.add(part[0] + part[1]);
        product.add(part_product[0] + part_product[1]);
    }
    return team.agree(GradientSums<A>{wide(sum), wide(product)}, Plus(), Itself());
}

template <typename T, class Shape, class F>
__device__ __forceinline__ void write_gradient(const ChannelArgs& args, Place<Shape>& place,
                                               RowTile<T, Shape>& x,
                                               const GradientTile<T, Shape>& grad_out, F f) {
    using A = Accumulator<T>;
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
        if (!x.holds(i)) continue;
        A value[Shape::kVec], gradient[Shape::kVec];
        x.widened(i, value);
        grad_out.widened(i, gradient);
#pragma unroll
        for (int e = 0; e < Shape::kVec; ++e) value[e] = f(value[e], gradient[e]);
        x.set(i, narrowed<T>(value));
    }
    place.walk(kChannelY);
    x.write(static_cast<T*>(args.y) + place.base());
}

template <typename T, class Shape>
__device__ __forceinline__ void read_both(const ChannelArgs& args, Place<Shape>& place,
                                          RowTile<T, Shape>& x, GradientTile<T, Shape>& grad_out) {
    place.walk(kChannelX);
    x.read_packs(static_cast<const T*>(args.x) + place.base());
    place.walk(kGradOut);
    grad_out.read_packs(static_cast<const T*>(args.grad_out) + place.base());
    place.walk(kChannelX);
    x.finish_packs();
    place.walk(kGradOut);
    grad_out.finish_packs();
}

template <typename T, class Shape>
__device__ __forceinline__ void differentiate_set(const ChannelArgs& args, Place<Shape>& place,
                                                  const Team<Shape>& team) {
    using A = Accumulator<T>;
    RowTile<T, Shape> x(place);
    GradientTile<T, Shape> grad_out(place);
    read_both(args, place, x, grad_out);
    const long long channel = place.live ? place.index.set : 0;
    const Fetched<T> of_mean(args, kMean, channel), of_rstd(args, kRstd, channel),
        of_weight(args, kWeight, channel);
    const A mean = of_mean.value(args, kMean, A(0)), rstd = of_rstd.value(args, kRstd, A(0));
    const GradientSums<A> sums = sums_of_tile(x, grad_out, mean, rstd, team);
    if (!place.live) return;
    const GradientCoefficients<A> by =
        gradient_coefficients(args.numbers, mean, rstd, of_weight.value(args, kWeight, A(1)), sums);
    const bool frozen = args.frozen();
    write_gradient(args, place, x, grad_out, [&](A value, A gradient) {
        return frozen ? gradient * by.factor : by.apply(value, gradient);
    });
    if (place.first == 0) store_sums<T>(args, channel, sums);
}

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    run_gradient(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    Place<Shape> place(args, set_of_thread<Shape>(), 0u);
    differentiate_set<T>(args, place, Team<Shape>());
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    __cluster_dims__(Shape::kCluster, 1, 1)
        run_gradient_cluster(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    const Team<Shape> team;
    Place<Shape> place(args, blockIdx.x / Shape::kCluster, team.rank * Shape::kThreads);
    differentiate_set<T>(args, place, team);
}
#endif

// Segment `segment` of a channel: its sums, at their place among all, and with frozen statistics
// its grad_x.
template <typename T, class Shape>
__device__ __forceinline__ void sum_segment(const ChannelArgs& args, long long set,
                                            long long segment) {
    using A = Accumulator<T>;
    Place<Shape> place(args, set, segment);
    const Team<Shape> team;
    RowTile<T, Shape> x(place);
    GradientTile<T, Shape> grad_out(place);
    read_both(args, place, x, grad_out);
    const A mean = small<T>(args, kMean, set, A(0));
    const A rstd = small<T>(args, kRstd, set, A(0));
    const GradientSums<A> sums = sums_of_tile(x, grad_out, mean, rstd, team);
    if (threadIdx.x == 0)
        static_cast<GradientSums<A>*>(args.partial)[set * args.segments + segment] = sums;
    if (!args.frozen()) return;
    const A factor = rstd * small<T>(args, kWeight, set, A(1));
    write_gradient(args, place, x, grad_out, [&](A, A gradient) { return gradient * factor; });
}

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    run_gradient_sums(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    const long long set = blockIdx.x / args.segments;
    sum_segment<T, Shape>(args, set, blockIdx.x - set * args.segments);
}

// -- channels last ------------------------------------------------------------------------------

// What the sums of a column, and grad_x with frozen statistics, are taken with.
template <typename A>
struct alignas(4 * sizeof(A) < 16 ? 4 * sizeof(A) : 16) GivenColumn {
    A mean, rstd, factor, unused;
};

template <typename T, class Shape>
struct ColumnGradient {
    using A = Accumulator<T>;
    static constexpr int kVec = Shape::kVec;
    A mean[kVec], rstd[kVec];
    Pair<A> sum[kVec] = {}, product[kVec] = {};
    A part[kVec] = {}, part_product[kVec] = {};

    // `given`: that of a thread's column e at e * kTx.
    __device__ __forceinline__ explicit ColumnGradient(const GivenColumn<A>* given) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
            mean[e] = given[e * Shape::kTx].mean;
            rstd[e] = given[e * Shape::kTx].rstd;
        }
    }

    __device__ __forceinline__ void add(const HeldRows<T, Shape>& x,
                                        const HeldRows<T, Shape>& grad_out) {
#pragma unroll
        for (int i = 0; i < Shape::kPacks; ++i) {
            if (i >= x.packs) continue;
            A value[kVec], gradient[kVec];
            x.widened(i, value);
            grad_out.widened(i, gradient);
#pragma unroll
            for (int e = 0; e < kVec; ++e) {
                part[e] += gradient[e];
                part_product[e] = fma(gradient[e], (value[e] - mean[e]) * rstd[e], part_product[e]);
            }
        }
    }
    __device__ __forceinline__ void settle() {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
            sum[e].add(part[e]);
            product[e].add(part_product[e]);
            part[e] = part_product[e] = 0;
        }
    }

    // Of the column that this thread looks after.
    __device__ __forceinline__ GradientSums<A> total(bool owns) const {
        GradientSums<A> mine[kVec];
#pragma unroll
        for (int e = 0; e < kVec; ++e) mine[e] = {wide(sum[e]), wide(product[e])};
        gather_columns<Shape>(mine, Plus());
        __syncthreads();
        if (!owns) return mine[0];
        return total_of_column<Shape, GradientSums<A>>(threadIdx.x, Plus());
    }
};

template <typename T, class Shape>
__device__ __forceinline__ const GivenColumn<Accumulator<T>>* given_columns(
    const ChannelArgs& args, const ColumnPlace<Shape>& place) {
    using A = Accumulator<T>;
    return share_columns<Shape>(place.owns(args), [&]() -> GivenColumn<A> {
        const long long channel = channel_of(args, place.own_column());
        const A rstd = small<T>(args, kRstd, channel, A(0));
        const A weight = args.frozen() ? small<T>(args, kWeight, channel, A(1)) : A(1);
        return {small<T>(args, kMean, channel, A(0)), rstd, rstd * weight, A(0)};
    });
}

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    column_gradient(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    constexpr int kVec = Shape::kVec;
    const ColumnPlace<Shape> place(args, blockIdx.x);
    HeldRows<T, Shape> x, grad_out;
    x.read(args, place, kChannelX);
    grad_out.read(args, place, kGradOut);
    ColumnGradient<T, Shape> gradient(given_columns<T>(args, place));
    gradient.add(x, grad_out);
    gradient.settle();
    const bool owns = place.owns(args);
    const GradientSums<A> sums = gradient.total(owns);
    GradientCoefficients<A> by[kVec];
    share_columns<Shape>(owns, by, [&] {
        const auto mine = gradient_coefficients<T>(args, place.own_column(), sums);
        store_sums<T>(args, place.own_column(), sums);  // maybe over the weight
        return mine;
    });
    if (!place.active) return;
    const bool frozen = args.frozen();
    x.write(place.template address<T>(args, args.y, kChannelY),
            Shape::kTy * args.run_step[kChannelY], [&](int i, A(&value)[kVec]) {
                A dy[kVec];
                grad_out.widened(i, dy);
#pragma unroll
                for (int e = 0; e < kVec; ++e)
                    value[e] = frozen ? dy[e] * by[e].factor : by[e].apply(value[e], dy[e]);
            });
}

// One batch of a block in registers, the next one on its way.
template <typename T, class Shape>
struct GradientStream {
    using A = Accumulator<T>;
    static constexpr int kVec = Shape::kVec;
    const BlockRows<Shape>& rows;
    RowWalk<T, Shape> x_walk, gradient_walk;
    HeldRows<T, Shape> x[2], grad_out[2];
    const GivenColumn<A>* given = nullptr;  // needed with frozen statistics
    T* y;
    long long y_step, y_leap;
    unsigned next = 0;

    __device__ __forceinline__ GradientStream(const ChannelArgs& args,
                                              const ColumnPlace<Shape>& place,
                                              const BlockRows<Shape>& rows)
        : rows(rows), x_walk(args, place, kChannelX), gradient_walk(args, place, kGradOut) {
        y = place.active && args.frozen() ? place.template address<T>(args, args.y, kChannelY)
                                          : nullptr;
        y_step = Shape::kTy * args.run_step[kChannelY];
        y_leap = args.segment_rows * args.run_step[kChannelY];
        read(0);
        read(1);
    }
    __device__ __forceinline__ void read(int half) {
        const int packs = rows.packs(next++);
        x_walk.read(x[half], packs);
        gradient_walk.read(grad_out[half], packs);
    }
    // With frozen statistics grad_x leaves at once.
    __device__ __forceinline__ void take(int half, ColumnGradient<T, Shape>& gradient) {
        gradient.add(x[half], grad_out[half]);
        if (y == nullptr) return;
        grad_out[half].write(y, y_step, [&](int, A(&dy)[kVec]) {
#pragma unroll
            for (int e = 0; e < kVec; ++e) dy[e] *= given[e * Shape::kTx].factor;
        });
        y += y_leap;
    }
    __device__ __forceinline__ void take_all(ColumnGradient<T, Shape>& gradient) {
        const unsigned batches = rows.batches();
#pragma unroll 1
        for (unsigned i = 0; i < batches; i += 2) {
            take(0, gradient);
            read(0);
            take(1, gradient);
            read(1);
            if (i / 2 % Shape::kRounds == Shape::kRounds - 1) gradient.settle();
        }
        if constexpr (Shape::kRounds > 1) gradient.settle();
    }
};

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kCtas)
    column_gradient_sums(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    const ColumnPlace<Shape> place(args, blockIdx.x);
    const BlockRows<Shape> rows(args, place.block);
    GradientStream<T, Shape> stream(args, place, rows);
    stream.given = given_columns<T>(args, place);
    ColumnGradient<T, Shape> gradient(stream.given);
    stream.take_all(gradient);
    const bool owns = place.owns(args);
    const GradientSums<A> sums = gradient.total(owns);
    if (owns)
        static_cast<GradientSums<A>*>(
            args.partial)[(place.plane * args.segments + place.block) * args.vectors +
                          place.own_column()] = sums;
}

// -- both ---------------------------------------------------------------------------------------

// As merged_set.
template <typename T, int THREADS, int TOGETHER, typename A = Accumulator<T>>
__device__ __forceinline__ GradientSums<A> merged_sums(const ChannelArgs& args, long long set,
                                                       bool live) {
    const Team<MergeShape<THREADS>> team;
    const unsigned me = threadIdx.x % THREADS;
    const RecordIndex at(args, set, live);
    const auto* const records = static_cast<const GradientSums<A>*>(args.partial);
    GradientSums<A> sums{wide(A(0)), wide(A(0))};
    for (unsigned first = me; first < at.count; first += TOGETHER * THREADS) {
        GradientSums<A> mine[TOGETHER];  // on their way
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            if (first + i * THREADS < at.count)
                mine[i] = order::load_fresh(records + at(first + i * THREADS));
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            if (first + i * THREADS < at.count) sums = sums + mine[i];
    }
    return team.agree(sums, Plus(), Itself());
}

template <typename T, int THREADS>
__device__ __forceinline__ void merge_gradient(const ChannelArgs& args, long long set, bool live) {
    using A = Accumulator<T>;
    constexpr int kTogether = sizeof(A) < sizeof(double) ? 4 : 2;
    const GradientSums<A> sums = merged_sums<T, THREADS, kTogether>(args, set, live);
    if (!live || threadIdx.x % THREADS != 0) return;
    if (args.coefficients)
        static_cast<GradientCoefficients<A>*>(args.coefficients)[set] =
            gradient_coefficients<T>(args, set, sums);
    store_sums<T>(args, set, sums);  // maybe over the weight
}

template <typename T, int THREADS>
__global__ void __launch_bounds__(kMergeBlock)
    gradient_merge(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    constexpr int kSets = kMergeBlock / THREADS;
    const long long set = (long long)blockIdx.x * kSets + threadIdx.x / THREADS;
    merge_gradient<T, THREADS>(args, set, kSets == 1 || set < args.sets);
}
