// Dense weights from packed words, one 128 x 128 block per thread block (EXL3_BITS).
//
// Eight warps decode one k16 step each. kInner stores the values. kOriginal and kEightBit transform both sides: the
// first four of the fourteen stages are one tensor-core product with the 16 x 16 matrix of signs, whose float16
// operands are exact and whose sums are fp32; the rest are fp32 butterflies in registers, five on each side of one
// exchange through shared memory. The two norms of 1 / sqrt(128) are one exact factor of 1 / 128, so the only rounding
// that could bias a gain is the last. kOutputs and kInputs transform one side: the same product, and three stages in
// registers, because a warp holds the eight tiles along that side.
#include <cuda_fp8.h>

#include <type_traits>

#include "reconstruct.h"
#include "transform.cuh"

namespace exl3 {
namespace {

constexpr int kBits = EXL3_BITS;
constexpr int kBlockTiles = kBlock / 16;
constexpr int kThreads = 32 * kSteps;
constexpr int kSideWarps = kSteps / 2;

// Thread blocks of `side_kernel` that a multiprocessor has registers for: the fastest measured.
constexpr int side_blocks(int kind) { return kind == kOutputs ? 7 : 6; }

EXL3_INLINE void round_pair(__half2& to, float low, float high) { to = __floats2half2_rn(low, high); }
EXL3_INLINE void round_pair(__nv_fp8x2_e4m3& to, float low, float high) {
    to = __nv_fp8x2_e4m3(make_float2(low, high));
}

EXL3_INLINE void butterfly(float& a, float& b) {
    const float sum = a + b;
    b = a - b;
    a = sum;
}

// The exchange holds output j's inputs in row j, 128 words, input i at i ^ spread(j): then neither the writing lanes
// (inputs 0-7 of outputs 0, 2, 4, 6) nor the reading ones (inputs 0-15 of outputs 0 and 1) meet in a bank.
EXL3_INLINE constexpr int spread(int j) { return ((j >> 1 & 3) << 3) ^ ((j & 1) << 4); }

// Rows g and g + 8 of the 16 x 16 sign matrix as an A fragment: -1 where the two indices share an odd number of bits.
EXL3_INLINE void sign_fragment(int lane, uint32_t (&a)[4]) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const int row = lane / 4 + q % 2 * 8, column = lane % 4 * 2 + q / 2 * 8;
        const uint32_t low = __popc(row & column) & 1 ? 0xBC00u : 0x3C00u;
        const uint32_t high = __popc(row & (column + 1)) & 1 ? 0xBC00u : 0x3C00u;
        a[q] = low | high << 16;
    }
}

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

// float16 results of a thread block on their way out, [outputs, inputs]; rows are padded by 16 bytes, which spreads a
// warp's stores over all banks.
template <int kHigh, int kAcross>
struct Staged {
    static constexpr int kStride = kAcross + 8;
    static constexpr int kBytes = kHigh * kStride * 2;
    __half* at;

    // Inputs i and i + 1 of output j.
    EXL3_INLINE void put(int i, int j, uint32_t pair) const {
        *reinterpret_cast<uint32_t*>(at + j * kStride + i) = pair;
    }

    template <int kWarps>
    EXL3_INLINE void store(const ReconstructArgs& args, int64_t first_input, int64_t first_output) const {
        __half* out = static_cast<__half*>(args.out) + first_output * args.k + first_input;
#pragma unroll
        for (int pass = 0; pass < kHigh * kAcross / 8 / (32 * kWarps); ++pass) {
            const int chunk = pass * 32 * kWarps + threadIdx.x;
            const int row = chunk / (kAcross / 8), column = chunk % (kAcross / 8) * 8;
            *reinterpret_cast<uint4*>(out + static_cast<int64_t>(row) * args.k + column) =
                *reinterpret_cast<const uint4*>(at + row * kStride + column);
        }
    }
};

using Whole = Staged<kBlock, kBlock>;
template <int kKind>
using Side = Staged<kKind == kInputs ? kBlock / 2 : kBlock, kKind == kInputs ? kBlock : kBlock / 2>;

template <int kCodebook>
__global__ void __launch_bounds__(kThreads, 4) inner_kernel(const __grid_constant__ ReconstructArgs args) {
    extern __shared__ __align__(16) uint8_t buffer[];
    const Whole staged{reinterpret_cast<__half*>(buffer)};
    const Block<kCodebook> block(args, blockIdx.x, blockIdx.y, threadIdx.x / 32);
    const int i = block.step * 16 + block.lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < kBlockTiles; ++t) {
        uint32_t a[4];
        block.decode_tile(t, a);
        const int j = t * 16 + block.lane / 4;
#pragma unroll
        for (int q = 0; q < 4; ++q) staged.put(i + q / 2 * 8, j + q % 2 * 8, a[q]);
    }
    __syncthreads();
    staged.store<kSteps>(args, blockIdx.x * kBlock, blockIdx.y * kBlock);
    if (args.overlap) wait_for_rotation();
}

// One side transformed, of half a block: 64 inputs and 128 outputs, or the reverse.
template <int kCodebook, int kKind>
__global__ void __launch_bounds__(32 * kSideWarps, side_blocks(kKind))
    side_kernel(const __grid_constant__ ReconstructArgs args) {
    constexpr bool kAlongInputs = kKind == kInputs;
    extern __shared__ __align__(16) uint8_t buffer[];
    const Side<kKind> staged{reinterpret_cast<__half*>(buffer)};
    float* scales = reinterpret_cast<float*>(buffer + Side<kKind>::kBytes);
    const int input_block = kAlongInputs ? blockIdx.x : blockIdx.x / 2;
    const int output_block = kAlongInputs ? blockIdx.y / 2 : blockIdx.y;
    const int warp = threadIdx.x / 32, half_block = (kAlongInputs ? blockIdx.y : blockIdx.x) % 2;
    const Block<kCodebook, kAlongInputs> block(args, input_block, output_block, half_block * kSideWarps + warp);
    const __half* scale = kAlongInputs ? args.suh + input_block * kBlock : args.svh + output_block * kBlock;
    scales[threadIdx.x] = __half2float(scale[threadIdx.x]) * kNorm;
    uint32_t a[kBlockTiles][4], signs[4];
    sign_fragment(block.lane, signs);
#pragma unroll
    for (int t = 0; t < kBlockTiles; ++t) block.decode_tile(t, a[t]);
    __syncthreads();
    const int input = block.lane % 4 * 2 + (kAlongInputs ? 0 : warp * 16);
    const int output = block.lane / 4 + (kAlongInputs ? warp * 16 : 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // inputs 0-7 and 8-15 of the tiles
        float v[kBlockTiles][4];            // [tile][2 x outputs 0-7 or 8-15, + input % 2]
#pragma unroll
        for (int t = 0; t < kBlockTiles; ++t) {
            if constexpr (kAlongInputs) {
                mma_first(v[t], a[t], signs[half], signs[half + 2]);
            } else {
                mma_first(v[t], signs, transposed(a[t][2 * half]), transposed(a[t][2 * half + 1]));
            }
        }
#pragma unroll
        for (int distance = 1; distance < kBlockTiles; distance *= 2)
#pragma unroll
            for (int t = 0; t < kBlockTiles; ++t)
                if (!(t & distance))
#pragma unroll
                    for (int c = 0; c < 4; ++c) butterfly(v[t][c], v[t + distance][c]);
#pragma unroll
        for (int t = 0; t < kBlockTiles; ++t)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = input + half * 8 + (kAlongInputs ? t * 16 : 0);
                const int j = output + r * 8 + (kAlongInputs ? 0 : t * 16);
                const float first = scales[kAlongInputs ? i : j], second = kAlongInputs ? scales[i + 1] : first;
                staged.put(i, j, bits_of(__floats2half2_rn(v[t][2 * r] * first, v[t][2 * r + 1] * second)));
            }
    }
    __syncthreads();
    staged.template store<kSideWarps>(args, blockIdx.x * (kAlongInputs ? kBlock : kBlock / 2),
                                      blockIdx.y * (kAlongInputs ? kBlock / 2 : kBlock));
    if (args.overlap) wait_for_rotation();
}

template <int kCodebook, int kKind>
__global__ void __launch_bounds__(kThreads, 2) original_kernel(const __grid_constant__ ReconstructArgs args) {
    extern __shared__ __align__(16) float exchange[];
    {
        const Block<kCodebook> block(args, blockIdx.x, blockIdx.y, threadIdx.x / 32);
        uint32_t signs[4];
        sign_fragment(block.lane, signs);
        float v[kBlockTiles][2][4];
#pragma unroll
        for (int t = 0; t < kBlockTiles; ++t) {
            uint32_t a[4];
            block.decode_tile(t, a);
            mma_first(v[t][0], signs, a[0], a[2]);  // outputs 0-7 of the tile
            mma_first(v[t][1], signs, a[1], a[3]);  // outputs 8-15
#pragma unroll
            for (int c = 0; c < 4; ++c) butterfly(v[t][0][c], v[t][1][c]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                butterfly(v[t][half][0], v[t][half][1]);
                butterfly(v[t][half][2], v[t][half][3]);
            }
        }
#pragma unroll
        for (int distance = 1; distance < kBlockTiles; distance *= 2)
#pragma unroll
            for (int t = 0; t < kBlockTiles; ++t)
                if (!(t & distance))
#pragma unroll
                    for (int c = 0; c < 8; ++c) butterfly(v[t][c / 4][c % 4], v[t + distance][c / 4][c % 4]);
        // Element c of a fragment: input + 8 (c / 2), output + c % 2; the spread depends on lane and c alone.
        const int input = block.step * 16 + block.lane / 4, output = block.lane % 4 * 2;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int row = output + c % 2;
            float* to = exchange + row * kBlock + ((input + c / 2 * 8) ^ spread(row));
#pragma unroll
            for (int t = 0; t < kBlockTiles; ++t)
#pragma unroll
                for (int half = 0; half < 2; ++half) to[(t * 16 + half * 8) * kBlock] = v[t][half][c];
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
    constexpr int exchange = kBlock * kBlock * 4, scales = kBlock * 4;
    switch (kind) {
        case kInner:
            return launch_blocks(inner_kernel<kCodebook>, args, grid, kSteps, Whole::kBytes, stream);
        case kOriginal:
            return launch_blocks(original_kernel<kCodebook, kOriginal>, args, grid, kSteps, exchange, stream);
        case kEightBit:
            return launch_blocks(original_kernel<kCodebook, kEightBit>, args, grid, kSteps, exchange, stream);
        case kOutputs:
            return launch_blocks(side_kernel<kCodebook, kOutputs>, args, dim3(2 * down, across), kSideWarps,
                                 Side<kOutputs>::kBytes + scales, stream);
        case kInputs:
            return launch_blocks(side_kernel<kCodebook, kInputs>, args, dim3(down, 2 * across), kSideWarps,
                                 Side<kInputs>::kBytes + scales, stream);
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
