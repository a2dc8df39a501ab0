// Hopper's bulk copies into the shared memory of a cluster, and the barriers that count their bytes.
//
// A barrier's phase ends when its arrivals and its announced bytes are in. A thread waits for the phase of a parity,
// which it flips at every use.
#pragma once

#include "decode.cuh"

namespace exl3 {

// One thread of a converged warp, in a form that the compiler knows to be one thread: operands of the copies below lie
// in registers of the warp.
EXL3_INLINE bool elected() {
    uint32_t is;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(is));
    return is;
}

EXL3_INLINE void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Arrives, and announces bytes that copies will bring.
EXL3_INLINE void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the barrier that lies at the same address in thread block `rank` of the cluster. It says that this thread
// has read, not written: an arrival that publishes writes to the cluster waits a microsecond for all memory.
EXL3_INLINE void barrier_arrive_at(uint32_t barrier, int rank) {
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

EXL3_INLINE void barrier_wait(uint32_t barrier, int parity) {
    uint32_t done;
    do {
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// Makes initialised barriers known to the cluster's other thread blocks at the next `cluster_sync`.
EXL3_INLINE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Waits for every thread of the cluster; no other memory is published.
EXL3_INLINE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

EXL3_INLINE void bulk_copy(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// Into the same address of every thread block in `ranks` (a bit each), whose barriers count the bytes.
EXL3_INLINE void bulk_copy_to(uint16_t ranks, uint32_t shared, const void* global, int bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier), "h"(ranks)
        : "memory");
}

}  // namespace exl3
