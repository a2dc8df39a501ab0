// Pieces that the small kernels share: element types, four elements at a time, and the Hadamard transform of one warp.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "launch.h"

namespace exl3 {

constexpr float kNorm = 0.088388347648f;  // 1 / sqrt(128)
constexpr int kRowThreads = 256;          // of a kernel in which a warp serves one row and one block of 128

enum DType { kHalf = 0, kBFloat16 = 1, kFloat = 2 };

EXL3_INLINE float to_float(__half v) { return __half2float(v); }
EXL3_INLINE float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
EXL3_INLINE float to_float(float v) { return v; }
EXL3_INLINE void round_to(__half& to, float v) { to = __float2half_rn(v); }
EXL3_INLINE void round_to(__nv_bfloat16& to, float v) { to = __float2bfloat16_rn(v); }
EXL3_INLINE void round_to(float& to, float v) { to = v; }

// Four consecutive elements, moved by one instruction: addresses are multiples of four elements.
template <typename T>
struct alignas(4 * sizeof(T)) Four {
    T at[4];
};

template <typename T>
EXL3_INLINE void load_four(const T* from, float (&v)[4]) {
    const Four<T> four = *reinterpret_cast<const Four<T>*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = to_float(four.at[i]);
}

template <typename T>
EXL3_INLINE void store_four(T* to, const float (&v)[4]) {
    Four<T> four;
#pragma unroll
    for (int i = 0; i < 4; ++i) round_to(four.at[i], v[i]);
    *reinterpret_cast<Four<T>*>(to) = four;
}

// 128 numbers in one warp, four consecutive ones per lane: butterflies of stride 1, 2, 4, ... 64, then the norm.
EXL3_INLINE void hadamard(float (&v)[4]) {
    const int lane = threadIdx.x % 32;
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], distance);
            v[i] = lane & distance ? other - v[i] : v[i] + other;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= kNorm;
}

// The same transform, the same sums, with half of the shuffles: registers and lanes trade places between the stages, and
// v[i] ends as element lane + across(i).
EXL3_INLINE constexpr int across(int i) { return i / 2 * 32 + i % 2 * 64; }

EXL3_INLINE void hadamard_across(float (&v)[4]) {
    const int lane = threadIdx.x % 32;
    const auto add_subtract = [&](int a, int b) {
        const float sum = v[a] + v[b];
        v[b] = v[a] - v[b];
        v[a] = sum;
    };
    const auto trade = [&](int a, int b, int distance) {
        const bool upper = lane & distance;
        const float got = __shfl_xor_sync(0xFFFFFFFFu, upper ? v[a] : v[b], distance);
        if (upper) {
            v[a] = got;
        } else {
            v[b] = got;
        }
    };
#pragma unroll
    for (int distance = 1; distance <= 16; distance *= 4) {
        add_subtract(0, 1), add_subtract(2, 3), add_subtract(0, 2), add_subtract(1, 3);
        trade(0, 1, distance), trade(2, 3, distance);
        if (distance < 16) trade(0, 2, 2 * distance), trade(1, 3, 2 * distance);
    }
    add_subtract(0, 1), add_subtract(2, 3);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= kNorm;
}

// The end of every route that works in the rotated basis: transform, svh and bias in fp32, one rounding.
template <typename Out, typename Bias>
EXL3_INLINE void finish(float (&v)[4], const __half* svh, const Bias* bias, Out* y, int column) {
    hadamard(v);
    float scale[4];
    load_four(svh + column, scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= scale[i];
    if (bias != nullptr) {
        float added[4];
        load_four(bias + column, added);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] += added[i];
    }
    store_four(y, v);
}

// Where a kernel has many more warps than run at once, each serves four rows: more loads in flight, less arithmetic.
constexpr int64_t kManyWarps = 16384;

template <typename F>
cudaError_t with_rows_per_warp(int64_t warps, F f) {
    return warps < kManyWarps ? f(std::integral_constant<int, 1>()) : f(std::integral_constant<int, 4>());
}

inline int warps_to_blocks(int64_t warps) { return static_cast<int>((warps * 32 + kRowThreads - 1) / kRowThreads); }

// Calls f with a null pointer of the element type.
template <typename F>
cudaError_t with_type(int type, F f) {
    switch (type) {
        case kHalf: return f(static_cast<__half*>(nullptr));
        case kBFloat16: return f(static_cast<__nv_bfloat16*>(nullptr));
        case kFloat: return f(static_cast<float*>(nullptr));
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace exl3
