// CUDA C as a host compiler takes it: what cunorm's kernels use of it, run with one fiber a thread.
//
// A warp runs until it has to wait for another one, the first warp first or the last one first, so
// that a missing barrier shows. The CTAs of a cluster run together, clusters one after the other.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

struct float2 {
    float x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct Dim3 {
    unsigned x, y = 1, z = 1;
};
static Dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace host {

constexpr size_t kStack = 128 << 10, kStatic = 48 << 10, kGuard = 4 << 10;
constexpr int kPoison = 0xFF;  // a NaN in every type

struct Barrier {
    unsigned arrived = 0, phase = 0;

    unsigned arrive(unsigned expected) {
        const unsigned mine = phase;
        if (++arrived == expected) arrived = 0, ++phase;
        return mine;
    }
};

struct Warp {
    Barrier barrier;
    int collective = 0;
    char slots[2][32][16];  // two sets: a fast lane may be one exchange ahead
};

// Full when what was expected has come; the next time begins then.
struct Mailbox {
    Barrier full;
    long long missing = 0;
    bool open = false, expecting = false;

    void expect(long long bytes) {
        expecting = true;
        receive(-bytes);
    }
    void receive(long long bytes) {
        missing -= bytes;
        if (!expecting || missing) return;
        expecting = false;
        full.arrive(1);
    }
};

struct Cta {
    Barrier barrier, of_teams[16];
    Mailbox mailbox;
    unsigned running;
    std::vector<Warp> warps;
    std::vector<uint4> memory;  // static shared memory, dynamic, then a guard

    char* shared() { return reinterpret_cast<char*>(memory.data()); }
};

struct Copy {
    void* to;
    const void* from;
    int bytes, group;
};

struct Fiber {
    ucontext_t context;  // to begin with
    jmp_buf place;       // later: a jump needs no system call
    bool begun = false;
    unsigned thread, rank;
    const Barrier* barrier = nullptr;  // that it waits at, in this phase
    unsigned phase = 0, cluster_phase = 0;
    bool done = false, arrived = false;
    std::vector<Copy> copies;
    int group = 0;

    // Those of groups before this one.
    void finish_copies(int before) {
        size_t done = 0;
        for (; done < copies.size() && copies[done].group < before; ++done)
            memcpy(copies[done].to, copies[done].from, copies[done].bytes);
        copies.erase(copies.begin(), copies.begin() + done);
    }
};

struct Launch {
    unsigned grid, block, cluster, shared;
    void (*kernel)(const void* args);
    const void* args;
};

static Launch launch;
static jmp_buf scheduler;
static std::vector<Cta> ctas;
static std::vector<Fiber> fibers;
static Fiber* current;
static Barrier cluster_barrier, sweep;
static size_t reserved;
static char message[160];  // of the first fault

static void fail(const char* what) {
    if (!message[0])
        snprintf(message, sizeof message, "%s (CTA %u, thread %u)", what, blockIdx.x, threadIdx.x);
}

static Cta& cta() { return ctas[current->rank]; }

static void wait(const Barrier& barrier, unsigned phase) {
    if (barrier.phase != phase) return;
    Fiber* const me = current;
    me->barrier = &barrier;
    me->phase = phase;
    if (_setjmp(me->place) == 0) _longjmp(scheduler, 1);
    me->barrier = nullptr;
}

// Until all that run together have had their turn.
static void let_others_run() { wait(sweep, sweep.phase); }

// The place of a __shared__ array in each CTA.
static size_t reserve(size_t bytes) {
    const size_t at = reserved;
    reserved += (bytes + 15) / 16 * 16;
    if (reserved > kStatic) fail("too many __shared__ arrays in one library");
    return reserved > kStatic ? 0 : at;
}

template <typename V, class F>
static auto exchange(V value, int collective, F result) {
    Warp& warp = cta().warps[current->thread / 32];
    const unsigned lane = current->thread % 32;
    auto& slots = warp.slots[warp.barrier.phase % 2];
    static_assert(sizeof(V) <= sizeof(slots[0]), "a slot holds it");
    if (warp.barrier.arrived == 0) warp.collective = collective;
    if (warp.collective != collective) fail("lanes of a warp call different collectives");
    memcpy(slots[lane], &value, sizeof(V));
    wait(warp.barrier, warp.barrier.arrive(32));
    return result(slots, lane);
}

static void run_fiber() {
    launch.kernel(launch.args);
    current->done = true;
    --cta().running;
    _longjmp(scheduler, 1);
}

static void start_cluster(char* stacks) {
    cluster_barrier = Barrier();
    ctas.assign(launch.cluster, Cta());
    for (Cta& each : ctas) {
        each.running = launch.block;
        each.warps.resize(launch.block / 32);
        each.memory.resize((kStatic + launch.shared + kGuard) / sizeof(uint4) + 1);  // rounded up
        memset(each.shared(), kPoison, each.memory.size() * sizeof(uint4));
    }
    fibers.assign(launch.block * launch.cluster, Fiber());
    for (size_t i = 0; i < fibers.size(); ++i) {
        Fiber& fiber = fibers[i];
        fiber.thread = i % launch.block;
        fiber.rank = i / launch.block;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks + i * kStack;
        fiber.context.uc_stack.ss_size = kStack;
        makecontext(&fiber.context, run_fiber, 0);
    }
}

// Until the fiber waits or is done.
__attribute__((noinline)) static void run_on(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

// Every fiber of a warp that need not wait, once: how many there were.
static unsigned step_warp(size_t warp, unsigned first) {
    unsigned moved = 0;
    for (size_t i = warp * 32; i < warp * 32 + 32; ++i) {
        Fiber& fiber = fibers[i];
        if (fiber.done || (fiber.barrier && fiber.barrier->phase == fiber.phase)) continue;
        current = &fiber;
        threadIdx.x = fiber.thread;
        blockIdx.x = first + fiber.rank;
        run_on(fiber);
        ++moved;
    }
    return moved;
}

static void run_cluster(unsigned first, bool backwards) {
    const size_t warps = fibers.size() / 32;
    bool moved = true;
    while (moved) {
        moved = false;
        for (size_t i = 0; i < warps; ++i)
            while (step_warp(backwards ? warps - 1 - i : i, first)) moved = true;
        ++sweep.phase;
    }
    for (const Cta& each : ctas)
        if (each.running) return fail("deadlock: threads wait for others that do not come");
}

static void check_cluster() {
    // A kernel may leave without a wait for its last arrival, but all threads have to arrive.
    bool halfway = cluster_barrier.arrived > 0, beyond = false;
    for (Cta& each : ctas) {
        halfway |= each.barrier.arrived > 0;
        for (const Barrier& barrier : each.of_teams) halfway |= barrier.arrived > 0;
        for (const Warp& warp : each.warps) halfway |= warp.barrier.arrived > 0;
        halfway |= each.mailbox.expecting || each.mailbox.missing;
        const char* const end = each.shared() + kStatic + launch.shared;
        for (size_t i = 0; i < kGuard; ++i) beyond |= end[i] != char(kPoison);
    }
    if (halfway) fail("some threads left before a barrier that others arrived at");
    if (beyond) fail("dynamic shared memory written past its end");
}

// Null, or what went wrong.
static const char* run(const Launch& wanted, bool backwards) {
    launch = wanted;
    message[0] = 0;
    gridDim.x = launch.grid;
    blockDim.x = launch.block;
    if (launch.block % 32 || launch.grid % launch.cluster) return "grid or block not whole";
    // Kept, since the next launch would otherwise wait for its pages again.
    static std::unique_ptr<char[]> stacks;
    static unsigned room;
    if (const unsigned fibers = launch.block * launch.cluster; room < fibers) {
        stacks.reset(new char[fibers * kStack]);
        room = fibers;
    }
    for (unsigned first = 0; first < launch.grid && !message[0]; first += launch.cluster) {
        start_cluster(stacks.get());
        run_cluster(first, backwards);
        check_cluster();
    }
    return message[0] ? message : nullptr;
}

}  // namespace host

// A kernel by the type of its parameter.
template <typename Args>
static inline void call_kernel(void (*kernel)(Args), const void* args) {
    kernel(*static_cast<const Args*>(args));
}

// What the build puts in place of `__shared__ TYPE NAME[COUNT]` and `extern __shared__`.
#define HOST_SHARED(TYPE, NAME, COUNT)                                        \
    static const size_t NAME##_place = host::reserve(sizeof(TYPE) * (COUNT)); \
    TYPE* const NAME = reinterpret_cast<TYPE*>(host::cta().shared() + NAME##_place)
#define HOST_DYNAMIC_SHARED(TYPE, NAME) \
    TYPE* const NAME = reinterpret_cast<TYPE*>(host::cta().shared() + host::kStatic)

static inline void __syncthreads() {
    host::Barrier& barrier = host::cta().barrier;
    host::wait(barrier, barrier.arrive(host::launch.block));
}

template <typename V>
static inline V __shfl_xor_sync(unsigned, V value, int distance, int width) {
    return host::exchange(value, distance * 64 + width, [=](auto& slots, unsigned lane) {
        V other;
        memcpy(&other, slots[lane ^ distance], sizeof(V));
        return other;
    });
}

template <typename V>
static inline V __shfl_sync(unsigned, V value, unsigned from, int width) {
    return host::exchange(value, 4096 + width, [=](auto& slots, unsigned lane) {
        V other;
        memcpy(&other, slots[lane / width * width + from % width], sizeof(V));
        return other;
    });
}

static inline bool __any_sync(unsigned, bool mine) {
    return host::exchange(mine, -1, [](auto& slots, unsigned) {
        bool any = false;
        for (const auto& slot : slots) any |= slot[0] != 0;
        return any;
    });
}

template <typename To, typename From>
static inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}
static inline int __float_as_int(float value) { return bit_cast<int>(value); }
static inline float __int_as_float(int bits) { return bit_cast<float>(bits); }
static inline float __uint_as_float(unsigned bits) { return bit_cast<float>(bits); }
static inline long long __double_as_longlong(double value) { return bit_cast<long long>(value); }
static inline double __longlong_as_double(long long bits) { return bit_cast<double>(bits); }

template <typename T>
static inline T __ldg(const T* from) {
    return *from;
}

template <typename T>
static inline void __stcs(T* to, T value) {
    *to = value;
}

static inline void __threadfence() {}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (((unsigned long long)high << 32 | low) >> by % 32);
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return (((unsigned long long)high << 32 | low) << by % 32) >> 32;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }

// A macro, since newer C libraries have a function of this name.
static inline float host_rsqrtf(float value) { return float(1.0 / sqrt(double(value))); }
#define rsqrtf host_rsqrtf

// As in CUDA, of a number and a NaN: the number.
template <typename A, typename B>
static inline auto max(A a, B b) -> std::common_type_t<A, B> {
    if constexpr (std::is_floating_point_v<A>) return fmax(a, b);
    return std::common_type_t<A, B>(a) > std::common_type_t<A, B>(b) ? a : b;
}
template <typename A, typename B>
static inline auto min(A a, B b) -> std::common_type_t<A, B> {
    if constexpr (std::is_floating_point_v<A>) return fmin(a, b);
    return std::common_type_t<A, B>(a) < std::common_type_t<A, B>(b) ? a : b;
}
