// Dense weights from packed words, one 128 x 128 block per thread block (EXL3_BITS).
//
// Eight warps decode one k16 step each. kInner stores the values. kOriginal and kEightBit transform both sides: six of
// the fourteen stages on tensor cores (tiles.cuh), three fp32 butterflies before an exchange through shared memory and
// five after it. The two norms of 1 / sqrt(128) are one exact factor of 1 / 128, so the only rounding that could bias a
// gain is the last. kOutputs and kInputs transform one side: six stages on tensor cores and one in registers, because a
// warp holds the eight tiles along that side.
#include <cuda_fp8.h>

#include <type_traits>

#include "reconstruct.h"
#include "tiles.cuh"
#include "transform.cuh"

namespace exl3 {
namespace {

constexpr int kBits = EXL3_BITS;
constexpr int kBlockTiles = kBlock / 16;
constexpr int kThreads = 32 * kSteps;
constexpr int kSideWarps = kSteps / 2;

EXL3_INLINE void round_pair(__half2& to, float low, float high) { to = __floats2half2_rn(low, high); }
EXL3_INLINE void round_pair(__nv_fp8x2_e4m3& to, float low, float high) {
    to = __nv_fp8x2_e4m3(make_float2(low, high));
}

// The exchange holds output j's inputs in row j, 128 words, input i at i ^ spread(j): then neither the writing lanes
// (inputs 0-7 of outputs 0, 2, 4, 6) nor the reading ones (inputs 0-15 of outputs 0 and 1) meet in a bank.
EXL3_INLINE constexpr int spread(int j) { return ((j >> 1 & 3) << 3) ^ ((j & 1) << 4); }

// Eight tiles of one warp: of the block's k16 step `step`, along the outputs; or of its tile column `step`, along the
// inputs.
template <int kCodebook, bool kAlongInputs = false>
struct Block {
    const ReconstructArgs& args;
    const int lane, step;
    uint32_t words[kBlockTiles][words_read(kBits)];
    const LaneWords<kBits> lane_words;

    EXL3_INLINE Block(const ReconstructArgs& a, int input_block, int output_block, int at)
        : args(a), lane(threadIdx.x % 32), step(at), lane_words(threadIdx.x % 32) {
        const int64_t across = static_cast<int64_t>(args.blocks) * kBlockTiles;
        const int64_t row = static_cast<int64_t>(input_block) * kSteps + (kAlongInputs ? 0 : step);
        const int64_t tile = row * across + (args.first_block + output_block) * kBlockTiles + (kAlongInputs ? step : 0);
        const int64_t stride = (kAlongInputs ? across : 1) * words_per_tile(kBits);
        const uint32_t* from[words_read(kBits)];
#pragma unroll
        for (int q = 0; q < words_read(kBits); ++q)
            from[q] = reinterpret_cast<const uint32_t*>(args.trellis) + tile * words_per_tile(kBits) +
                      lane_words.index[q];
#pragma unroll
        for (int t = 0; t < kBlockTiles; ++t)
#pragma unroll
            for (int q = 0; q < words_read(kBits); ++q) words[t][q] = __ldg(from[q] + t * stride);
    }

    EXL3_INLINE void decode_tile(int t, uint32_t (&a)[4]) const {
        decode<kBits, kCodebook>(words[t], lane_words.drop, args.opaque, a);
    }
};

EXL3_INLINE uint32_t transposed(uint32_t pair) {
    uint32_t turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

// A thread block's results on their way out, [kRows outputs, kWidth inputs].
template <int kWarps, int kRows, int kWidth>
EXL3_INLINE void store_block(const Staged<kWidth>& staged, const ReconstructArgs& args, int64_t first_input,
                             int64_t first_output) {
    constexpr int kChunks = kWidth / 8, kAtOnce = 32 * kWarps / kChunks;
    const int row = threadIdx.x / kChunks, input = threadIdx.x % kChunks * 8;
    const __half* from = staged.at + row * Staged<kWidth>::kStride + input;
    __half* to = static_cast<__half*>(args.out) + (first_output + row) * args.k + first_input + input;
    const int64_t stride = static_cast<int64_t>(kAtOnce) * args.k;
#pragma unroll
    for (int pass = 0; pass < kRows / kAtOnce; ++pass)
        store_wide(to + pass * stride,
                   *reinterpret_cast<const uint4*>(from + pass * kAtOnce * Staged<kWidth>::kStride));
}

template <int kCodebook>
__global__ void __launch_bounds__(kThreads, 4) inner_kernel(const __grid_constant__ ReconstructArgs args) {
    extern __shared__ __align__(16) uint8_t buffer[];
    const Staged<kBlock> staged{reinterpret_cast<__half*>(buffer)};
    const Block<kCodebook> block(args, blockIdx.x, blockIdx.y, threadIdx.x / 32);
    const int i = block.step * 16 + block.lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < kBlockTiles; ++t) {
        uint32_t a[4];
        block.decode_tile(t, a);
        const int j = t * 16 + block.lane / 4;
#pragma unroll
        for (int q = 0; q < 4; ++q) staged.put(j + q % 2 * 8, i + q / 2 * 8, a[q]);
    }
    __syncthreads();
    store_block<kSteps, kBlock>(staged, args, blockIdx.x * kBlock, blockIdx.y * kBlock);
    if (args.overlap) wait_for_rotation();
}

// One side transformed, of half a block: 64 inputs and 128 outputs, or the reverse.
template <int kKind>
struct Side {
    static constexpr bool kAlongInputs = kKind == kInputs;
    static constexpr int kRows = kAlongInputs ? kBlock / 2 : kBlock, kWidth = kAlongInputs ? kBlock : kBlock / 2;
    static constexpr int kStagedBytes = kRows * Staged<kWidth>::kRowBytes, kBytes = kStagedBytes + kBlock * 4;
    static constexpr int kBlocks = 6;  // per multiprocessor: with seven, registers are spilled
};

template <int kCodebook, int kKind>
__global__ void __launch_bounds__(32 * kSideWarps, Side<kKind>::kBlocks)
    side_kernel(const __grid_constant__ ReconstructArgs args) {
    using S = Side<kKind>;
    extern __shared__ __align__(16) uint8_t buffer[];
    const Staged<S::kWidth> staged{reinterpret_cast<__half*>(buffer)};
    float* scales = reinterpret_cast<float*>(buffer + S::kStagedBytes);
    const int input_block = S::kAlongInputs ? blockIdx.x : blockIdx.x / 2;
    const int output_block = S::kAlongInputs ? blockIdx.y / 2 : blockIdx.y;
    const int warp = threadIdx.x / 32, half_block = (S::kAlongInputs ? blockIdx.y : blockIdx.x) % 2;
    const Block<kCodebook, S::kAlongInputs> block(args, input_block, output_block, half_block * kSideWarps + warp);
    const __half* scale = S::kAlongInputs ? args.suh + input_block * kBlock : args.svh + output_block * kBlock;
    scales[threadIdx.x] = __half2float(scale[threadIdx.x]) * kNorm;
    const Signs signs(block.lane);
    uint32_t a[kBlockTiles][4];
#pragma unroll
    for (int t = 0; t < kBlockTiles; ++t) block.decode_tile(t, a[t]);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float v[kBlockTiles][4];
        if constexpr (S::kAlongInputs) {
            signs.along_columns(a, half, v);
        } else {
            uint32_t turned[kBlockTiles][2];
#pragma unroll
            for (int t = 0; t < kBlockTiles; ++t)
#pragma unroll
                for (int q = 0; q < 2; ++q) turned[t][q] = transposed(a[t][2 * half + q]);
            signs.along_rows(turned, v);
        }
#pragma unroll
        for (int t = 0; t < kBlockTiles; t += 2) {
            uint32_t pairs[4];
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const float* at = scales + (t + q / 2) * 16 +
                                  (S::kAlongInputs ? half * 8 + block.lane % 4 * 2 : q % 2 * 8 + block.lane / 4);
                const float2 by = S::kAlongInputs ? *reinterpret_cast<const float2*>(at) : make_float2(*at, *at);
                const float* sums = &v[t + q / 2][q % 2 * 2];
                pairs[q] = bits_of(__floats2half2_rn(sums[0] * by.x, sums[1] * by.y));
            }
            staged.template put_tiles<S::kAlongInputs>((S::kAlongInputs ? warp : t) * 16,
                                                       (S::kAlongInputs ? t : warp) * 16 + half * 8, pairs);
        }
    }
    __syncthreads();
    store_block<kSideWarps, S::kRows>(staged, args, blockIdx.x * S::kWidth, blockIdx.y * S::kRows);
    if (args.overlap) wait_for_rotation();
}

template <int kCodebook, int kKind>
__global__ void __launch_bounds__(kThreads, 2) original_kernel(const __grid_constant__ ReconstructArgs args) {
    extern __shared__ __align__(16) float exchange[];
    {
        const Block<kCodebook> block(args, blockIdx.x, blockIdx.y, threadIdx.x / 32);
        const Signs signs(block.lane);
        uint32_t inputs[2][kBlockTiles][2];  // outputs 0-7 and 8-15 of the tiles
#pragma unroll
        for (int t = 0; t < kBlockTiles; ++t) {
            uint32_t a[4];
            block.decode_tile(t, a);
#pragma unroll
            for (int q = 0; q < 4; ++q) inputs[q % 2][t][q / 2] = a[q];
        }
        float v[2][kBlockTiles][4];
        signs.along_rows(inputs[0], v[0]);
        signs.along_rows(inputs[1], v[1]);
#pragma unroll
        for (int t = 0; t < kBlockTiles; ++t) {
#pragma unroll
            for (int c = 0; c < 4; ++c) butterfly(v[0][t][c], v[1][t][c]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                butterfly(v[half][t][0], v[half][t][1]);
                butterfly(v[half][t][2], v[half][t][3]);
            }
        }
        // Element c of a fragment: input + 8 (c / 2), output + c % 2; the spread depends on lane and c alone.
        const int input = block.step * 16 + block.lane / 4, output = block.lane % 4 * 2;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int row = output + c % 2;
            float* to = exchange + row * kBlock + ((input + c / 2 * 8) ^ spread(row));
#pragma unroll
            for (int t = 0; t < kBlockTiles; ++t)
#pragma unroll
                for (int half = 0; half < 2; ++half) to[(t * 16 + half * 8) * kBlock] = v[half][t][c];
        }
    }
    __syncthreads();
    // This thread's 64 elements: inputs i + 16 s and i + 16 s + 1, outputs j + 2 u. Bit 0 of j and bit 1 of u swap
    // neighbouring steps s in the exchange.
    const int i = threadIdx.x % 8 * 2;
    const int j = threadIdx.x / 8 % 2 + threadIdx.x / 16 % 2 * 8 + threadIdx.x / 32 * 16;
    float v[kSteps][4][2];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        const int swap = 16 * ((j & 1) ^ (u / 2));
        const float* even = exchange + (j + 2 * u) * kBlock + (i ^ (u % 2 * 8)) + swap;
        const float* odd = even - 2 * swap;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const float2 pair = *reinterpret_cast<const float2*>((s % 2 ? odd : even) + 16 * s);
            v[s][u][0] = pair.x, v[s][u][1] = pair.y;
        }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            butterfly(v[s][0][e], v[s][1][e]);
            butterfly(v[s][2][e], v[s][3][e]);
            butterfly(v[s][0][e], v[s][2][e]);
            butterfly(v[s][1][e], v[s][3][e]);
        }
#pragma unroll
    for (int distance = 1; distance < kSteps; distance *= 2)
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
            if (!(s & distance))
#pragma unroll
                for (int u = 0; u < 4; ++u)
#pragma unroll
                    for (int e = 0; e < 2; ++e) butterfly(v[s][u][e], v[s + distance][u][e]);

    const float input_norm = (kKind == kEightBit ? args.norm[0] : 1.0f) / kBlock;
    const float output_norm = kKind == kEightBit ? args.norm[1] : 1.0f;
    using Pair = std::conditional_t<kKind == kOriginal, __half2, __nv_fp8x2_e4m3>;
    const int first_input = blockIdx.x * kBlock + i;
    float output_scale[4];
    Pair* out[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        const int column = blockIdx.y * kBlock + j + 2 * u;
        output_scale[u] = __half2float(args.svh[column]) * output_norm;
        out[u] = static_cast<Pair*>(args.out) + (static_cast<int64_t>(column) * args.k + first_input) / 2;
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        const __half2 scale = *reinterpret_cast<const __half2*>(args.suh + first_input + 16 * s);
        const float first = __low2float(scale) * input_norm, second = __high2float(scale) * input_norm;
#pragma unroll
        for (int u = 0; u < 4; ++u)
            round_pair(out[u][8 * s], v[s][u][0] * (first * output_scale[u]), v[s][u][1] * (second * output_scale[u]));
    }
}

template <typename Kernel>
cudaError_t launch_blocks(Kernel kernel, const ReconstructArgs& args, dim3 grid, int warps, int shared,
                          cudaStream_t stream) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    return error != cudaSuccess ? error : launch(kernel, grid, 32 * warps, shared, args.overlap, stream, args);
}

template <int kCodebook>
cudaError_t launch_kind(const ReconstructArgs& args, int kind, int slice_blocks, cudaStream_t stream) {
    const int down = args.k / kBlock, across = slice_blocks;
    const dim3 grid(down, across);
    constexpr int exchange = kBlock * kBlock * 4, whole = kBlock * Staged<kBlock>::kRowBytes;
    switch (kind) {
        case kInner:
            return launch_blocks(inner_kernel<kCodebook>, args, grid, kSteps, whole, stream);
        case kOriginal:
            return launch_blocks(original_kernel<kCodebook, kOriginal>, args, grid, kSteps, exchange, stream);
        case kEightBit:
            return launch_blocks(original_kernel<kCodebook, kEightBit>, args, grid, kSteps, exchange, stream);
        case kOutputs:
            return launch_blocks(side_kernel<kCodebook, kOutputs>, args, dim3(2 * down, across), kSideWarps,
                                 Side<kOutputs>::kBytes, stream);
        case kInputs:
            return launch_blocks(side_kernel<kCodebook, kInputs>, args, dim3(down, 2 * across), kSideWarps,
                                 Side<kInputs>::kBytes, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace

template <>
cudaError_t launch_reconstruct<EXL3_BITS>(const ReconstructArgs& args, int kind, int codebook, int slice_blocks,
                                          cudaStream_t stream) {
    switch (codebook) {
        case kThreeInst: return launch_kind<kThreeInst>(args, kind, slice_blocks, stream);
        case kMcg: return launch_kind<kMcg>(args, kind, slice_blocks, stream);
        case kMul1: return launch_kind<kMul1>(args, kind, slice_blocks, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace exl3
