// In place of the kernels' file of this name: CTAs run one after the other, in their order, or some of
// them together.
#pragma once

namespace order {

constexpr unsigned kLeave = 1u << 16;
inline unsigned arrive(unsigned* arrived, unsigned count = 1) {
    *arrived += count;
    return *arrived - count;
}
inline bool replace(unsigned* word, unsigned from, unsigned to) {
    if (*word != from) return false;
    *word = to;
    return true;
}
// Whether it comes true while those that run together have some turns. Whoever is to come else has
// not started, and the CTA leaves.
template <class F>
inline bool comes_true(F f) {
    for (int turns = 0; turns < 40; ++turns) {
        if (f()) return true;
        if (host::launch.cluster == 1) return false;
        host::let_others_run();
    }
    return false;
}
inline bool wait_for(const unsigned* arrived, unsigned wanted, long long) {
    return comes_true([=] { return *arrived % kLeave >= wanted; });
}
using Signal = unsigned long long;
inline void raise(Signal* signal, Signal number) { *signal = number; }
inline bool is_raised(const Signal* signal, Signal number) { return *signal == number; }
inline bool await(const Signal* signal, Signal number, long long) {
    return comes_true([=] { return *signal == number; });
}
inline bool take(Signal* signal, Signal number) {
    if (*signal != number) return false;
    *signal = ~number;
    return true;
}
template <typename R>
inline R load_fresh(const R* from) {
    return *from;
}

}  // namespace order
