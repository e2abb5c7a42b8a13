// Backward of batch norm by strips of neighbouring channels on chip, x and grad_out both: launch
// and movement as in channel_strips.cuh, mathematics and precision as in channel_gradient.cuh.
#pragma once

#include "channel_gradient.cuh"
#include "channel_strips.cuh"

// Mean and rstd of a channel, on their way.
template <typename T>
struct StripGiven {
    using A = Accumulator<T>;
    Fetched<T> mean, rstd;

    __device__ __forceinline__ StripGiven(const ChannelArgs& args, long long channel)
        : mean(args, kMean, channel), rstd(args, kRstd, channel) {}
    __device__ __forceinline__ A mean_of(const ChannelArgs& args) const {
        return mean.value(args, kMean, A(0));
    }
    __device__ __forceinline__ A rstd_of(const ChannelArgs& args) const {
        return rstd.value(args, kRstd, A(0));
    }
};

template <typename T, class Shape, typename A = Accumulator<T>>
struct StripGradient {
    static constexpr int kVec = Shape::kVec;
    A mean[kVec], rstd[kVec];
    double sum[2] = {}, product[2] = {};
    A part[kVec] = {}, part_product[kVec] = {};

    __device__ __forceinline__ StripGradient(const ChannelArgs& args, const StripGiven<T>& first,
                                             const StripGiven<T>& next, unsigned split) {
        const A means[2] = {first.mean_of(args), next.mean_of(args)};
        const A rstds[2] = {first.rstd_of(args), next.rstd_of(args)};
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
            mean[e] = e < split ? means[0] : means[1];
            rstd[e] = e < split ? rstds[0] : rstds[1];
        }
    }
    __device__ __forceinline__ void add(const A (&x)[kVec], const A (&grad_out)[kVec]) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
            part[e] += grad_out[e];
            part_product[e] = fma(grad_out[e], (x[e] - mean[e]) * rstd[e], part_product[e]);
        }
    }
    __device__ __forceinline__ void settle(unsigned split) {
        add_split(sum, part, split);
        add_split(product, part_product, split);
#pragma unroll
        for (int e = 0; e < kVec; ++e) part[e] = part_product[e] = 0;
    }
    __device__ __forceinline__ void to(GradientSums<A> (&records)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) records[i] = {sum[i], product[i]};
    }
};

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtas)
    strip_gradient(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    using Table = StripTable<GradientCoefficients<A>, A, Shape>;
    constexpr int kVec = Shape::kVec;
    const StripPlace<Shape> place(args);
    StripRows<T, Shape> x(args, place, args.x, args.brief.x_step, 0);
    StripRows<T, Shape> grad_out(args, place, args.grad_out, args.run_step[kGradOut], 1);
#pragma unroll 1
    for (int i = 0; i < Shape::kAhead; ++i) {
        x.copy();
        grad_out.copy();
        ptx::copies_commit();
    }
    const StripGiven<T> of_first(args, place.first_channel() + place.channel),
        of_next(args, place.first_channel() + place.next_channel());
    const StripOwner<Shape> owner;
    const long long own = owner ? owner.of_all() : place.first_channel();
    const Fetched<T> weight(args, kWeight, own);  // before its gradient is written over it
    const StripGiven<T> given(args, own);
    Table& table = Table::get();
    const StripRecords<GradientSums<A>, Shape> records(x, 2);
    {
        StripGradient<T, Shape> gradient(args, of_first, of_next, place.split);
        StripReader<T, Shape> x_rows(x), gradient_rows(grad_out);
        int rounds = 0;
        place.for_each_row(
            [&] {
                if (++rounds > Shape::kRounds) {
                    gradient.settle(place.split);
                    rounds = 1;
                }
                x.copy();
                grad_out.copy();
                ptx::copies_commit();
                ptx::copies_wait_but<Shape::kAhead>();
            },
            [&] {
                A value[kVec], dy[kVec];
                x_rows.next(value);
                gradient_rows.next(dy);
                gradient.add(value, dy);
            });
        gradient.settle(place.split);
        GradientSums<A> mine[2];
        gradient.to(mine);
        records.leave(mine);
    }
    __syncthreads();
    if (owner) {
        const GradientSums<A> sums = records.total(owner.channel);
        if (owner.first()) {
            table.by[owner.channel] =
                gradient_coefficients(args.numbers, given.mean_of(args), given.rstd_of(args),
                                      weight.value(args, kWeight, A(1)), sums);
            store_sums<T>(args, own, sums);
        }
    }
    __syncthreads();
    GradientCoefficients<A> by[kVec];
    table.of_elements(place, by);
    StripReader<T, Shape> x_rows(x), gradient_rows(grad_out);
    StripWriter<T, Shape> grad_x(args, place);
    place.for_each_row([] {},
                       [&] {
                           A value[kVec], dy[kVec];
                           x_rows.next(value);
                           gradient_rows.next(dy);
#pragma unroll
                           for (int e = 0; e < kVec; ++e) value[e] = by[e].apply(value[e], dy[e]);
                           grad_x.next(value);
                       });
}
