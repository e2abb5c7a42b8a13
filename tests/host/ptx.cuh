// In place of the kernels' file of this name: the same functions without PTX.
#pragma once

namespace ptx {

inline void take_turn() {}

template <typename T>
inline T* opaque_global(T* pointer) {
    return pointer;
}

template <typename Word>
inline void store(Word* global, Word word) {
    if (reinterpret_cast<size_t>(global) % sizeof(Word))
        host::fail("store to an address that is no multiple of its size");
    *global = word;
}

// Nobody comes here together with others: who does is up to the hardware.
struct Neighbours {
    unsigned below, above;

    Neighbours(bool has_below, bool has_above) : below(has_below), above(has_above) {}
};
struct Together {
    bool with(unsigned) const { return false; }
    unsigned of_below(unsigned) const { return 0; }
    Neighbours around(const void*, unsigned) const { return {false, false}; }
};

// As late as the hardware may: before copies_wait the slot holds what it held.
template <bool>
inline void copy_async(uint4* shared, const uint4* global) {
    if (reinterpret_cast<size_t>(shared) % 16 || reinterpret_cast<size_t>(global) % 16)
        host::fail("copy_async at an address that is no multiple of 16");
    host::current->copies.push_back({shared, global, 16, host::current->group});
}
inline void copy_first_async(uint4* shared, const uint4* global, unsigned bytes) {
    host::current->copies.push_back({shared, global, int(bytes), host::current->group});
}
template <int BYTES>
inline void copy_part(void* shared, const void* global) {
    if (reinterpret_cast<size_t>(shared) % BYTES || reinterpret_cast<size_t>(global) % BYTES)
        host::fail("copy_part at an address that is no multiple of its size");
    host::current->copies.push_back({shared, global, BYTES, host::current->group});
}
inline void copies_commit() { ++host::current->group; }
inline void copies_wait() { host::current->finish_copies(host::current->group + 1); }
template <int LEFT>
inline void copies_wait_but() {
    host::current->finish_copies(host::current->group - LEFT);
}
inline void copies_wait_but(int left) {
    host::current->finish_copies(host::current->group - left);
}

inline void barrier(int number, int threads) {
    host::Barrier& barrier = host::cta().of_teams[number];
    host::wait(barrier, barrier.arrive(threads));
}

inline void prefetch(const void*) {}
inline void known(const void*) {}

inline unsigned cluster_rank() { return host::current->rank; }

inline void cluster_arrive() {
    host::Fiber& me = *host::current;
    if (me.arrived) host::fail("cluster_arrive twice without a wait");
    me.arrived = true;
    me.cluster_phase = host::cluster_barrier.arrive(host::fibers.size());
}
inline void cluster_wait() {
    if (!host::current->arrived) host::fail("cluster_wait without cluster_arrive");
    host::wait(host::cluster_barrier, host::current->cluster_phase);
    host::current->arrived = false;
}

inline void cluster_arrive_relaxed() { cluster_arrive(); }

// The box itself is kept outside shared memory: one for each CTA.
using Mailbox = unsigned long long;

inline void open_mailbox(Mailbox*) {
    if (threadIdx.x != 0) host::fail("open_mailbox by another thread than the first");
    host::cta().mailbox.open = true;
}
inline void expect(Mailbox*, unsigned bytes) { host::cta().mailbox.expect(bytes); }
inline void await(Mailbox*, unsigned times) {
    if (times > host::cta().mailbox.full.phase) host::fail("await before the time before is over");
    host::wait(host::cta().mailbox.full, times);
}

template <typename R>
inline void send(R* local, unsigned rank, const R& value, Mailbox*) {
    host::Cta& other = host::ctas[rank];
    if (other.running == 0) host::fail("send to a CTA that has left");
    if (!other.mailbox.open) host::fail("send to a mailbox that is not open");
    const size_t place = reinterpret_cast<char*>(local) - host::cta().shared();
    memcpy(other.shared() + place, &value, sizeof(R));
    other.mailbox.receive(sizeof(R));
}

}  // namespace ptx
