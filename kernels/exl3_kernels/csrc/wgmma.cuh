// Hopper's asynchronous tensor-core product for one warpgroup: D[64, N] += A[64, 16] B[16, N], A in registers (each
// warp the fragment of mma.m16n8k16), B in shared memory, inputs contiguous in rows of 128 bytes with the 128-byte
// swizzle.
#pragma once

#include "decode.cuh"

namespace exl3 {

EXL3_INLINE uint64_t swizzled_operand(uint32_t shared) {
    constexpr uint64_t kSwizzle128 = 1ull << 62, kEightRows = 1024 >> 4;
    return kSwizzle128 | kEightRows << 32 | 1ull << 16 | (shared & 0x3FFFF) >> 4;
}

EXL3_INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
EXL3_INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
EXL3_INLINE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Of a warpgroup whose thread blocks are alone on their multiprocessor: registers per thread from here on.
template <int kRegisters>
EXL3_INLINE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
EXL3_INLINE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// `add` 0 discards the old D.
template <int kRows>
EXL3_INLINE void wgmma(float (&d)[kRows / 2], const uint32_t (&a)[4], uint64_t b, int add);

// Sums as operands.
#define EXL3_SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EXL3_SUMS8(i) EXL3_SUMS4(i), EXL3_SUMS4(i + 4)
#define EXL3_SUMS32(i) EXL3_SUMS8(i), EXL3_SUMS8(i + 8), EXL3_SUMS8(i + 16), EXL3_SUMS8(i + 24)

template <>
EXL3_INLINE void wgmma<64>(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
        : EXL3_SUMS32(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

template <>
EXL3_INLINE void wgmma<128>(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;}"
        : EXL3_SUMS32(0), EXL3_SUMS32(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

template <>
EXL3_INLINE void wgmma<192>(float (&d)[96], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %101, 0; wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
        "}, {%96, %97, %98, %99}, %100, p, 1, 1, 0;}"
        : EXL3_SUMS32(0), EXL3_SUMS32(32), EXL3_SUMS32(64)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

template <>
EXL3_INLINE void wgmma<256>(float (&d)[128], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, 0;}"
        : EXL3_SUMS32(0), EXL3_SUMS32(32), EXL3_SUMS32(64), EXL3_SUMS32(96)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

#undef EXL3_SUMS4
#undef EXL3_SUMS8
#undef EXL3_SUMS32

}  // namespace exl3
