// In place of the kernels' file of this name: the same functions without PTX.
#pragma once

namespace ptx {

// As late as the hardware may: before copies_wait the slot holds what it held.
inline void copy_async(uint4* shared, const uint4* global) {
    if (reinterpret_cast<size_t>(shared) % 16 || reinterpret_cast<size_t>(global) % 16)
        host::fail("copy_async at an address that is no multiple of 16");
    host::current->copies.emplace_back(shared, global);
}
inline void copies_wait() {
    for (const auto& [shared, global] : host::current->copies) *shared = *global;
    host::current->copies.clear();
}

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

template <typename R>
inline void store_remote(R* local, unsigned rank, const R& value) {
    host::Cta& other = host::ctas[rank];
    if (other.running == 0) host::fail("store_remote to a CTA that has left");
    const size_t place = reinterpret_cast<char*>(local) - host::cta().shared();
    memcpy(other.shared() + place, &value, sizeof(R));
}

}  // namespace ptx
