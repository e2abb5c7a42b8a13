// Batch norm by strips of neighbouring channels on chip: read once, written once. Launch and
// movement: channel_strips.cuh. Channels whose sums cannot be trusted are taken again from what is
// on chip.
#pragma once

#include "channel_strips.cuh"

// The sums of a thread about the centres of its channels. Of 16-bit values the distances are added
// up, whose sum is as good as the spread; of others the values themselves, without a rounding
// error.
template <typename T, class Shape, typename A = Accumulator<T>>
struct StripSums {
    using Record = typename Centred<A>::Record;
    static constexpr int kVec = Shape::kVec;
    static constexpr bool kOfDistances = sizeof(T) == 2;
    Pair<A> exact[kOfDistances ? 1 : kVec] = {};
    double sum[2] = {}, squares[2] = {};
    A part[kOfDistances ? kVec : 1] = {}, part_squares[kVec] = {};

    __device__ __forceinline__ void add(const A (&x)[kVec], const A (&centre)[kVec]) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
            const A distance = x[e] - centre[e];
            if constexpr (kOfDistances)
                part[e] += distance;
            else
                exact[e].add(x[e]);
            part_squares[e] = fma(distance, distance, part_squares[e]);
        }
    }
    __device__ __forceinline__ void settle(unsigned split) {
        add_split(squares, part_squares, split);
        if constexpr (kOfDistances) add_split(sum, part, split);
#pragma unroll
        for (int e = 0; e < kVec; ++e) part_squares[e] = part[kOfDistances ? e : 0] = 0;
    }
    __device__ __forceinline__ void to(Record (&records)[2], unsigned split) {
        if constexpr (!kOfDistances) {
            double each[kVec];
#pragma unroll
            for (int e = 0; e < kVec; ++e) each[e] = wide(exact[e]);
            add_split(sum, each, split);
        }
        records[0] = {sum[0], squares[0]};
        records[1] = {sum[1], squares[1]};
    }
    // From the total of a channel's records to its record.
    static __device__ __forceinline__ Record of_values(const Record& total, double count,
                                                       A centre) {
        return {kOfDistances ? fma(count, double(centre), total.sum) : total.sum, total.squares};
    }
};

// Values near the means of a thread's two channels, from samples and positions far from each other.
// On their way.
template <typename T, class Shape>
struct StripNear {
    using A = Accumulator<T>;
    Pack<T, 1> element[2][4];

    __device__ __forceinline__ StripNear(const ChannelArgs& args, const StripPlace<Shape>& place) {
        const T* at =
            static_cast<const T*>(args.x) + (place.first_channel() + place.channel) * place.length;
        const unsigned next = (place.next_channel() - place.channel) * place.length;
        const long long quarter = place.rows / 4 * args.brief.x_step + place.length / 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            element[0][i] = load<1, 1>(at);
            element[1][i] = load<1, 1>(at + next);
            at += quarter;
        }
    }
    // Of values that are equal, that value.
    __device__ __forceinline__ A value(int which) const {
        A quarter[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            quarter[i] = A(0.25) * widen<A>(part_of<T>(opaque(element[which][i]), 0));
        return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
    }
};

template <typename T>
struct StripSmalls {
    Fetched<T> weight, bias;
    FetchedRunning<T> running;

    StripSmalls() = default;
    __device__ __forceinline__ StripSmalls(const ChannelArgs& args, long long channel)
        : weight(args, kWeight, channel), bias(args, kBias, channel), running(args, channel) {}

    template <typename A>
    __device__ __forceinline__ Coefficients<A> coefficients(
        const ChannelArgs& args, const Findings<Centred<A>, A>& found) const {
        return Coefficients<A>::of(found.statistics, found.scale, weight.value(args, kWeight, A(1)),
                                   bias.value(args, kBias, A(0)));
    }
};

// `about`: what the record was taken about, and `scale` multiplied by.
template <typename A>
__device__ __forceinline__ Findings<Centred<A>, A> strip_findings(
    const ChannelArgs& args, const typename Centred<A>::Record& record, A about, A scale) {
    Findings<Centred<A>, A> found;
    found.record = record;
    found.centre = about;
    found.scale = found.unit = scale;
    found.statistics = Centred<A>::finish(record, args.numbers, about, found.unit, found.verdict);
    return found;
}

// The sums of one pass over what is on chip, in double: f(element, centre) of every element.
template <typename T, class Shape, typename A, class F>
__device__ __forceinline__ double strip_total(const StripRecords<Moments<double>, Shape>& records,
                                              const StripReader<T, Shape>& rows, const A* centres,
                                              F f) {
    const StripPlace<Shape>& place = records.place;
    const double first = centres[place.channel], next = centres[place.next_channel()];
    StripReader<T, Shape> x = rows;
    double sum[2] = {};
#pragma unroll 1
    for (int rest = place.left; rest > 0; rest -= int(place.ty)) {
        A value[Shape::kVec];
        double each[Shape::kVec];
        x.next(value);
#pragma unroll
        for (int e = 0; e < Shape::kVec; ++e)
            each[e] = f(double(value[e]), e < place.split ? first : next);
        add_split(sum, each, place.split);
    }
    const Moments<double> mine[2] = {{sum[0], 0}, {sum[1], 0}};
    records.leave(mine);
    __syncthreads();
    const StripOwner<Shape> owner;
    return owner ? records.total(owner.channel).sum : 0;
}

// Channels that are not sound are taken again, in double: nothing leaves its range, and nothing is
// lost to an offset. What is left for their elements is to be multiplied by a power of two.
template <class Norm, typename T, class Shape>
__device__ __noinline__ void examine_strip_again(const ChannelArgs& args) {
    using A = Accumulator<T>;
    using Table = StripTable<Coefficients<A>, A, Shape>;
    using Record = typename Centred<A>::Record;
    const StripPlace<Shape> place(args);
    const StripRows<T, Shape> x(args, place, args.x, args.brief.x_step, 0);
    const StripRecords<Record, Shape> records(x, 1);
    const StripReader<T, Shape> rows(x);
    const StripOwner<Shape> owner;
    Table& table = Table::get();
    const RowNumbers& numbers = args.numbers;

    const double sum =
        strip_total<T>(records, rows, table.centre, [](double value, double) { return value; });
    const A centre = A(quotient(sum, numbers.count, numbers.inverse));
    __syncthreads();
    if (owner && owner.first()) table.centre[owner.channel] = centre;
    __syncthreads();
    const double squares = strip_total<T>(
        records, rows, table.centre,
        [](double value, double centre) { return (value - centre) * (value - centre); });
    if (!owner || table.sound[owner.channel]) return;
    A scale = A(1);
    if (!in_range<A>(squares, eps_of<A>(numbers))) {
        // No element is larger.
        const double largest = fabs(double(centre)) + sqrt(squares);
        scale = range_scale<A>(Range<A>::magnitude_bits(A(fmin(largest, double(0x1.8p+127f)))));
    }
    const Record record{sum * scale, squares * scale * scale};
    const auto found = strip_findings<A>(args, record, centre * scale, scale);
    if (!owner.first()) return;
    const StripSmalls<T> smalls(args, owner.of_all());
    table.by[owner.channel] = smalls.coefficients(args, found);
    store_found<Norm, T>(args, owner.of_all(), found, smalls.running);
}

template <class Norm, typename T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtas)
    strip_norm(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    using A = Accumulator<T>;
    using Table = StripTable<Coefficients<A>, A, Shape>;
    using Record = typename Centred<A>::Record;
    constexpr int kVec = Shape::kVec;
    const StripPlace<Shape> place(args);
    StripRows<T, Shape> x(args, place, args.x, args.brief.x_step, 0);
#pragma unroll 1
    for (int i = 0; i < Shape::kAhead; ++i) {
        x.copy();
        ptx::copies_commit();
    }
    const StripNear<T, Shape> near(args, place);
    const StripOwner<Shape> owner;
    StripSmalls<T> smalls;
    if (owner) smalls = StripSmalls<T>(args, owner.of_all());
    Table& table = Table::get();
    const StripRecords<Record, Shape> records(x, 1);

    const A first_centre = near.value(0), next_centre = near.value(1);
    if (place.speaks()) table.centre[place.channel] = first_centre;
    if (threadIdx.x == 0) table.all_sound = true;
    {
        A centre[kVec];
#pragma unroll
        for (int e = 0; e < kVec; ++e) centre[e] = e < place.split ? first_centre : next_centre;
        StripSums<T, Shape> sums;
        StripReader<T, Shape> rows(x);
        int rounds = 0;
        place.for_each_row(
            [&] {
                if (++rounds > Shape::kRounds) {
                    sums.settle(place.split);
                    rounds = 1;
                }
                x.copy();
                ptx::copies_commit();
                ptx::copies_wait_but<Shape::kAhead>();
            },
            [&] {
                A value[kVec];
                rows.next(value);
                sums.add(value, centre);
            });
        sums.settle(place.split);
        Record mine[2];
        sums.to(mine, place.split);
        records.leave(mine);
    }
    __syncthreads();
    Findings<Centred<A>, A> found;
    if (owner) {
        const A centre = table.centre[owner.channel];
        const Record record = StripSums<T, Shape>::of_values(records.total(owner.channel),
                                                             args.numbers.count, centre);
        found = strip_findings<A>(args, record, centre, A(1));
        if (!NeedsRescue<T>::value && found.verdict == Verdict::kOutOfRange)
            found.verdict = Verdict::kSound;
        const bool sound = found.verdict == Verdict::kSound;
        if (owner.first()) {
            table.by[owner.channel] = smalls.coefficients(args, found);
            table.sound[owner.channel] = sound;
            if (!sound) table.all_sound = false;
        }
    }
    __syncthreads();
    if (owner && owner.first() && table.sound[owner.channel])
        store_found<Norm, T>(args, owner.of_all(), found, smalls.running);
    if (!table.all_sound) {
        examine_strip_again<Norm, T, Shape>(args);
        __syncthreads();
    }
    Coefficients<A> by[kVec];
    table.of_elements(place, by);
    StripReader<T, Shape> rows(x);
    StripWriter<T, Shape> y(args, place);
    place.for_each_row([] {},
                       [&] {
                           A value[kVec];
                           rows.next(value);
#pragma unroll
                           for (int e = 0; e < kVec; ++e) value[e] = by[e].apply(value[e]);
                           y.next(value);
                       });
}
