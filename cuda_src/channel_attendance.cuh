// CTAs that wait for each other's records: who has arrived, who has left, who does whose work.
//
// CTAs start in the order of their numbers wherever that has been looked at, but nothing rests on
// it, nor on how many fit the GPU together with whatever else it runs: a CTA that has waited for
// long leaves, and the last one to arrive does its work as well.
//
// Launch: clear_attendance first, a thread for each word.
#pragma once

#include "channel_args.cuh"

constexpr long long kPatience = 20000;  // looks at a word, of 100 ns and more each

// Of the `members` CTAs of one of `units` things, in words that are zero before the launch.
struct Attendance {
    enum Seat { kTaken, kLeft, kClaimed };

    unsigned members;   // below order::kLeave
    unsigned* arrived;  // how many are there, plus kLeave for who has left
    unsigned* seat;     // of a member: a Seat

    __device__ __forceinline__ Attendance(void* words, long long units, unsigned members,
                                          long long unit)
        : members(members),
          arrived(static_cast<unsigned*>(words) + unit),
          seat(static_cast<unsigned*>(words) + units + unit * members) {}

    // By one thread, when its record is there. Whether the CTA stays; `last`: for the last one to
    // arrive 1 and how many have left, for the others 0.
    __device__ __forceinline__ bool stays(unsigned member, unsigned& last) const {
        const unsigned before = order::arrive(arrived);
        const bool is_last = before % order::kLeave + 1 == members;
        last = is_last ? 1 + before / order::kLeave : 0;
        if (is_last || order::wait_for(arrived, members, kPatience)) return true;
        order::replace(seat + member, kTaken, kLeft);
        if (order::arrive(arrived, order::kLeave) % order::kLeave < members) return false;
        return order::replace(seat + member, kLeft, kTaken);  // they are all there after all
    }
    // Takes over the work of a CTA that has left.
    __device__ __forceinline__ bool claim(unsigned member) const {
        return order::replace(seat + member, kLeft, kClaimed);
    }
};

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    clear_attendance(const __grid_constant__ ChannelArgs args) {
    ptx::take_turn();
    const unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i < args.kept.words) static_cast<unsigned*>(args.progress)[i] = 0;
}
