// The entry points of the prefill routes: reconstruct weights, rotate rows, finish rotated sums, quantize rows to E4M3.
#include <cuda_fp8.h>

#include "reconstruct.h"
#include "tiles.cuh"
#include "transform.cuh"

namespace exl3 {
namespace {

constexpr float kLargestE4M3 = 448.0f;

constexpr int kTileRows = 16;  // of one warp
constexpr int kTileWarps = 4;  // of a thread block, which serves one block of 128 inputs
constexpr int kTileThreads = 32 * kTileWarps;

// Eight consecutive elements, times eight scales, rounded to float16.
EXL3_INLINE uint4 scaled(const __half* x, const uint4& scales) {
    const uint4 from = *reinterpret_cast<const uint4*>(x);
    return make_uint4(bits_of(__hmul2(halves_of(from.x), halves_of(scales.x))),
                      bits_of(__hmul2(halves_of(from.y), halves_of(scales.y))),
                      bits_of(__hmul2(halves_of(from.z), halves_of(scales.z))),
                      bits_of(__hmul2(halves_of(from.w), halves_of(scales.w))));
}

template <typename In>
EXL3_INLINE uint4 scaled(const In* x, const uint4& scales) {
    const uint32_t by[4] = {scales.x, scales.y, scales.z, scales.w};
    float v[2][4];
    load_four(x, v[0]), load_four(x + 4, v[1]);
    uint32_t to[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const float2 scale = __half22float2(halves_of(by[q]));
        to[q] = bits_of(__floats2half2_rn(v[q / 2][q % 2 * 2] * scale.x, v[q / 2][q % 2 * 2 + 1] * scale.y));
    }
    return make_uint4(to[0], to[1], to[2], to[3]);
}

// Writes RN16(RN16(x suh) H), row-major. A warp transforms sixteen rows as the A fragments of eight tiles.
template <typename In>
__global__ void __launch_bounds__(kTileThreads)
    rotate_rows_kernel(const In* x, int64_t row_stride, const __half* suh, __half* rotated, int rows, int k) {
    constexpr int kStride = Staged<kBlock>::kStride;
    __shared__ __align__(16) __half buffer[kTileWarps * kTileRows * kStride];
    let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_row = (blockIdx.y * kTileWarps + warp) * kTileRows, row = first_row + lane / 16;
    const int column = blockIdx.x * kBlock + lane % 16 * 8;
    const Staged<kBlock> staged{buffer + warp * kTileRows * kStride};
    __half* own = staged.at + lane / 16 * kStride + lane % 16 * 8;
    const uint4 scales = *reinterpret_cast<const uint4*>(suh + column);
    const In* from = x + row * row_stride + column;
#pragma unroll
    for (int r = 0; r < kTileRows; r += 2)
        *reinterpret_cast<uint4*>(own + r * kStride) =
            row + r < rows ? scaled(from + r * row_stride, scales) : make_uint4(0, 0, 0, 0);
    __syncwarp();
    uint32_t a[kBlockTiles][4];
    const uint32_t fragment =
        static_cast<uint32_t>(__cvta_generic_to_shared(staged.at + lane % 16 * kStride + lane / 16 * 8));
#pragma unroll
    for (int t = 0; t < kBlockTiles; ++t)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[t][0]), "=r"(a[t][1]), "=r"(a[t][2]), "=r"(a[t][3])
                     : "r"(fragment + t * 32)
                     : "memory");
    __syncwarp();
    const Signs signs(lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float v[kBlockTiles][4];
        signs.along_columns(a, half, v);
#pragma unroll
        for (int t = 0; t < kBlockTiles; t += 2) {
            uint32_t pairs[4];
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const float* sums = &v[t + q / 2][q % 2 * 2];
                pairs[q] = bits_of(__floats2half2_rn(sums[0] * kNorm, sums[1] * kNorm));
            }
            staged.put_tiles<true>(0, t * 16 + half * 8, pairs);
        }
    }
    __syncwarp();
    __half* to = rotated + static_cast<int64_t>(row) * k + column;
#pragma unroll
    for (int r = 0; r < kTileRows; r += 2)
        if (row + r < rows)
            store_wide(to + static_cast<int64_t>(r) * k, *reinterpret_cast<const uint4*>(own + r * kStride));
}

template <typename Out, typename Bias, int kRows>
__global__ void unrotate_kernel(const float* sums, const __half* svh, const Bias* bias, Out* y, int64_t row_stride,
                                int rows, int columns) {
    const int warp = (blockIdx.x * kRowThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int blocks = columns / kBlock;
    const int first_row = warp / blocks * kRows, first_column = warp % blocks * kBlock;
    float v[kRows][4], scale[4], added[4] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r)
        if (first_row + r < rows)
            load_four(sums + static_cast<int64_t>(first_row + r) * columns + first_column + lane * 4, v[r]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int column = first_column + lane + across(i);
        scale[i] = __half2float(svh[column]);
        if (bias != nullptr) added[i] = to_float(bias[column]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        if (first_row + r >= rows) return;
        hadamard_across(v[r]);
        Out* to = y + (first_row + r) * row_stride + first_column + lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[r][i] *= scale[i];
            if (bias != nullptr) v[r][i] += added[i];
            round_to(to[across(i)], v[r][i]);
        }
    }
}

// One thread block per row: scale = largest magnitude / 448 (or the given one), values = RN(x / scale) in E4M3.
template <typename In>
__global__ void quantize_kernel(const In* x, int64_t row_stride, const float* given_scale, float* scales,
                                __nv_fp8x4_e4m3* out, int k) {
    __shared__ float largest[kRowThreads / 32];
    const In* from = x + blockIdx.x * row_stride;
    float scale;
    if (given_scale != nullptr) {
        scale = *given_scale;
    } else {
        float most = 0.0f;
        for (int i = threadIdx.x * 4; i < k; i += kRowThreads * 4) {
            float v[4];
            load_four(from + i, v);
            most = fmaxf(most, fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
        }
        for (int distance = 16; distance > 0; distance /= 2)
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, distance));
        if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = most;
        __syncthreads();
        for (int w = 0; w < kRowThreads / 32; ++w) most = fmaxf(most, largest[w]);
        scale = most > 0.0f ? most / kLargestE4M3 : 1.0f;
        if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    }
    __nv_fp8x4_e4m3* to = out + static_cast<int64_t>(blockIdx.x) * (k / 4);
    for (int i = threadIdx.x * 4; i < k; i += kRowThreads * 4) {
        float v[4];
        load_four(from + i, v);
        to[i / 4] = __nv_fp8x4_e4m3(make_float4(v[0] / scale, v[1] / scale, v[2] / scale, v[3] / scale));
    }
}

}  // namespace
}  // namespace exl3

using namespace exl3;

extern "C" {

// Writes columns first_column .. first_column + columns - 1 of a [k, n] weight as `kind` (see Kind), [columns, k].
int exl3_reconstruct(const void* trellis, const void* suh, const void* svh, const void* norm, void* out, int kind,
                     int first_column, int columns, int k, int n, int bits, int codebook, int overlap, void* stream) {
    ReconstructArgs args;
    args.trellis = static_cast<const uint8_t*>(trellis);
    args.suh = static_cast<const __half*>(suh);
    args.svh = static_cast<const __half*>(svh) + first_column;
    args.norm = static_cast<const float*>(norm);
    args.out = out;
    args.first_block = first_column / kBlock;
    args.blocks = n / kBlock;
    args.k = k;
    args.overlap = overlap != 0;
    switch (bits) {
#define EXL3_CASE(K) \
    case K: return launch_reconstruct<K>(args, kind, codebook, columns / kBlock, static_cast<cudaStream_t>(stream));
        EXL3_CASE(1) EXL3_CASE(2) EXL3_CASE(3) EXL3_CASE(4) EXL3_CASE(5) EXL3_CASE(6) EXL3_CASE(7) EXL3_CASE(8)
#undef EXL3_CASE
        default: return cudaErrorInvalidValue;
    }
}

// rotated = RN16(RN16(x suh) H), [rows, k].
int exl3_rotate_rows(const void* x, int x_type, int64_t row_stride, const void* suh, void* rotated, int rows, int k,
                     void* stream) {
    return with_type(x_type, [&](auto* in) {
        using In = std::remove_pointer_t<decltype(in)>;
        constexpr int kRows = kTileWarps * kTileRows;
        return launch(rotate_rows_kernel<In>, dim3(k / kBlock, (rows + kRows - 1) / kRows), kTileThreads, 0, false,
                      static_cast<cudaStream_t>(stream), static_cast<const In*>(x), row_stride,
                      static_cast<const __half*>(suh), static_cast<__half*>(rotated), rows, k);
    });
}

// y = (sums H) svh + bias for contiguous fp32 sums [rows, columns]; svh, bias and y start at the slice's first column.
int exl3_unrotate(const void* sums, const void* svh, const void* bias, int bias_type, void* y, int y_type,
                  int64_t row_stride, int rows, int columns, void* stream) {
    return with_type(y_type, [&](auto* out) {
        return with_type(bias_type, [&](auto* added) {
            using Out = std::remove_pointer_t<decltype(out)>;
            using Bias = std::remove_pointer_t<decltype(added)>;
            const int64_t blocks = columns / kBlock;
            return with_rows_per_warp(rows * blocks, [&](auto per_warp) {
                constexpr int kRows = decltype(per_warp)::value;
                return launch(unrotate_kernel<Out, Bias, kRows>,
                              dim3(warps_to_blocks((rows + kRows - 1) / kRows * blocks)), kRowThreads, 0, false,
                              static_cast<cudaStream_t>(stream), static_cast<const float*>(sums),
                              static_cast<const __half*>(svh), static_cast<const Bias*>(bias), static_cast<Out*>(y),
                              row_stride, rows, columns);
            });
        });
    });
}

// `given_scale` is a float on the device or null for one scale per row.
int exl3_quantize(const void* x, int x_type, int64_t row_stride, const void* given_scale, void* scales, void* out,
                  int rows, int k, void* stream) {
    return with_type(x_type, [&](auto* in) {
        using In = std::remove_pointer_t<decltype(in)>;
        return launch(quantize_kernel<In>, dim3(rows), kRowThreads, 0, false, static_cast<cudaStream_t>(stream),
                      static_cast<const In*>(x), row_stride, static_cast<const float*>(given_scale),
                      static_cast<float*>(scales), static_cast<__nv_fp8x4_e4m3*>(out), k);
    });
}

}  // extern "C"
