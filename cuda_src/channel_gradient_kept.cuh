// Backward of batch norm where a channel's x and grad_out are kept on chip by CTAs that wait for
// each other: read once, written once. Mathematics and precision: channel_gradient.cuh; launch:
// channel_kept.cuh.
#pragma once

#include "channel_gradient.cuh"
#include "channel_kept.cuh"

template <typename T>
struct KeptGradient {
    using A = Accumulator<T>;

    template <class Shape>
    struct Held;

    template <class Shape>
    static __device__ __forceinline__ GradientCoefficients<A> conclude(const ChannelArgs& args,
                                                                       const Held<Shape>& held,
                                                                       long long set, bool leaves) {
        const GradientSums<A> sums = merged_sums<T, Shape::kBlock, 1>(args, set, true);
        if (leaves && threadIdx.x == 0) store_sums<T>(args, set, sums);
        return gradient_coefficients(args.numbers, held.mean, held.rstd, held.weight, sums);
    }

    template <class Shape>
    static __device__ void rewrite(const ChannelArgs& args, Place<Shape>& place, unsigned set,
                                   long long, const GradientCoefficients<A>& by) {
        const KeptSet<T> at(args, set);
#pragma unroll 1
        for (int i = 0; i < Shape::kPacks && place.holds(i); ++i) {
            A value[Shape::kVec], gradient[Shape::kVec];
            place.walk(kChannelX);
            widen_pack(load<Shape::kAccess, Shape::kVec>(at.x(args) + place.column(i)), value);
            place.walk(kGradOut);
            widen_pack(load<Shape::kAccess, Shape::kVec>(at.grad_out(args) + place.column(i)),
                       gradient);
#pragma unroll
            for (int e = 0; e < Shape::kVec; ++e) value[e] = by.apply(value[e], gradient[e]);
            place.walk(kChannelY);
            store<Shape::kAccess, Shape::kVec>(at.y(args) + place.column(i), narrowed<T>(value));
        }
    }

    template <class Shape>
    struct Held {
        Place<Shape>& place;
        RowTile<T, Shape> x;
        GradientTile<T, Shape> grad_out;
        A mean, rstd, weight;  // before a record says that the gradient may be written over it

        __device__ __forceinline__ explicit Held(Place<Shape>& place)
            : place(place), x(place), grad_out(place) {}

        __device__ __forceinline__ void read(const ChannelArgs& args, unsigned set) {
            const KeptSet<T> at(args, set);
            place.walk(kChannelX);
            x.read_packs(at.x(args));
            place.walk(kGradOut);
            grad_out.read_packs(at.grad_out(args));
        }
        __device__ __forceinline__ void record(const ChannelArgs& args, unsigned set,
                                               long long number) {
            mean = small<T>(args, kMean, set, A(0));
            rstd = small<T>(args, kRstd, set, A(0));
            weight = small<T>(args, kWeight, set, A(1));
            const GradientSums<A> sums = sums_of_tile(x, grad_out, mean, rstd, Team<Shape>());
            if (threadIdx.x == 0) static_cast<GradientSums<A>*>(args.partial)[number] = sums;
        }
        __device__ __forceinline__ void write(const ChannelArgs& args,
                                              const GradientCoefficients<A>& by, unsigned set,
                                              unsigned next) {
            T* const y = KeptSet<T>(args, set).y(args);
            const bool more = next < args.sets;
            const KeptSet<T> then(args, more ? next : set);
            const T* const of_x = then.x(args);
            const T* const of_grad = then.grad_out(args);
#pragma unroll
            for (int i = 0; i < Shape::kPacks; ++i) {
                if (place.holds(i)) {
                    A value[Shape::kVec], gradient[Shape::kVec];
                    x.widened(i, value);
                    grad_out.widened(i, gradient);
#pragma unroll
                    for (int e = 0; e < Shape::kVec; ++e)
                        value[e] = by.apply(value[e], gradient[e]);
                    place.walk(kChannelY);
                    store<Shape::kAccess, Shape::kVec>(y + place.column(i), narrowed<T>(value));
                    if (more) {
                        place.walk(kChannelX);
                        x.read_pack(i, of_x);
                        place.walk(kGradOut);
                        grad_out.read_pack(i, of_grad);
                    }
                }
                grad_out.begun(i);
            }
        }
    };
};
