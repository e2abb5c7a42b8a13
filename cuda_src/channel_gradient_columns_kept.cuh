// Backward of batch norm, channels last, in one launch: x and grad_out stay on chip as far as there
// is room. Mathematics and precision: channel_gradient.cuh; launch: channel_columns_kept.cuh.
#pragma once

#include "channel_columns_kept.cuh"
#include "channel_gradient.cuh"

template <typename T>
struct KeptColumnGradients {
    using A = Accumulator<T>;
    using Record = GradientSums<A>;
    template <class Shape>
    using Values = GradientCoefficients<A>;

    template <int LANES>
    static __device__ __forceinline__ Record join(const Record* records, const ColumnIndex& at) {
        Record mine[kJoined];
        fetch_records<LANES>(mine, records, at, Record{wide(A(0)), wide(A(0))});
        Record sums = mine[0];
#pragma unroll
        for (int i = 1; i < kJoined; ++i) sums = sums + mine[i];
        return Lanes<LANES>().combined(sums, Plus());
    }

    template <class Shape>
    struct Held {
        static constexpr int kVec = Shape::kVec;
        KeptBlock<T, Shape, 2> block;

        // By column; before any record says that a gradient may be written over the weight.
        static __device__ __forceinline__ GivenColumn<A>* given(const ChannelArgs& args) {
            return static_cast<GivenColumn<A>*>(args.coefficients);
        }
        __device__ __forceinline__ Record examine(const ChannelArgs& args,
                                                  const ColumnPlace<Shape>& place,
                                                  const BlockRows<Shape>& rows) {
            auto fetching = block.begin(args, place, rows);
            const auto fetch = [&]() -> GivenColumn<A> {
                const long long channel = place.own_column();
                const Fetched<T> mean(args, kMean, channel), rstd(args, kRstd, channel),
                    weight(args, kWeight, channel);
                const A scale = rstd.value(args, kRstd, A(0));
                const GivenColumn<A> found{mean.value(args, kMean, A(0)), scale,
                                           scale * weight.value(args, kWeight, A(1)), A(0)};
                if (place.block == 0) given(args)[channel] = found;
                return found;
            };
            ColumnGradient<T, Shape> gradient(share_columns<Shape>(place.owns(args), fetch));
            block.for_each(
                args, place, rows, fetching,
                [&](const HeldRows<T, Shape>(&both)[2]) { gradient.add(both[0], both[1]); },
                [&] { gradient.settle(); });
            return gradient.total(place.owns(args));
        }
        __device__ __forceinline__ void forget() { block.count = 0; }

        __device__ __forceinline__ void conclude(const ChannelArgs& args,
                                                 const ColumnPlace<Shape>& place,
                                                 const Crew<Shape>& crew,
                                                 GradientCoefficients<A> (&by)[kVec]) const {
            conclude_columns<KeptColumnGradients>(
                place, crew, by, [&](const Record& sums, unsigned column) {
                    const auto of_column = order::load_fresh(given(args) + column);
                    if (place.block == 0) store_sums<T>(args, column, sums);
                    auto mine = gradient_coefficients(args.numbers, of_column.mean, of_column.rstd,
                                                      A(1), sums);
                    mine.factor = of_column.factor;
                    return mine;
                });
        }
        __device__ __forceinline__ void write(const ChannelArgs& args,
                                              const ColumnPlace<Shape>& place,
                                              const BlockRows<Shape>& rows,
                                              const GradientCoefficients<A> (&by)[kVec]) const {
            const OutputWalk<T, Shape> y(args, place);
            block.for_each_again(args, place, rows,
                                 [&](const HeldRows<T, Shape>(&both)[2], unsigned number) {
                                     y.write(both[0], number, [&](int i, A(&value)[kVec]) {
                                         A gradient[kVec];
                                         both[1].widened(i, gradient);
#pragma unroll
                                         for (int e = 0; e < kVec; ++e)
                                             value[e] = by[e].apply(value[e], gradient[e]);
                                     });
                                 });
        }
    };
};
