// Dense weights from packed words, one 128 x 128 block per thread block (EXL3_BITS).
//
// Eight warps decode one k16 step each. kInner stores the values. The other kinds transform both sides: the first four
// of the fourteen stages are one tensor-core product with the 16 x 16 matrix of signs, whose float16 operands are
// exact and whose sums are fp32; the rest are fp32 butterflies in registers, five on each side of one exchange through
// shared memory. The two norms of 1 / sqrt(128) are one exact factor of 1 / 128, so the only rounding that could bias
// a gain is the last.
#include <cuda_fp8.h>

#include <type_traits>

#include "reconstruct.h"

namespace exl3 {
namespace {

constexpr int kBits = EXL3_BITS;
constexpr int kBlockTiles = kBlock / 16;
constexpr int kThreads = 32 * kSteps;
constexpr int kInnerStride = kBlock + 8;  // halves: rows of 272 bytes spread a warp's stores over all banks

constexpr int shared_bytes(int kind) {
    return kind == kInner ? kBlock * kInnerStride * 2 : kBlock * kBlock * 4;
}

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

template <int kCodebook>
struct Block {
    const ReconstructArgs& args;
    const int lane, step;
    uint32_t words[kBlockTiles][words_read(kBits)];
    const LaneWords<kBits> lane_words;

    EXL3_INLINE explicit Block(const ReconstructArgs& a)
        : args(a), lane(threadIdx.x % 32), step(threadIdx.x / 32), lane_words(threadIdx.x % 32) {
        const int64_t row = static_cast<int64_t>(blockIdx.x) * kSteps + step;
        const int64_t tile = (row * args.blocks + args.first_block + blockIdx.y) * kBlockTiles;
        const uint32_t* from = reinterpret_cast<const uint32_t*>(args.trellis) + tile * words_per_tile(kBits);
#pragma unroll
        for (int t = 0; t < kBlockTiles; ++t)
#pragma unroll
            for (int q = 0; q < words_read(kBits); ++q)
                words[t][q] = __ldg(from + t * words_per_tile(kBits) + lane_words.index[q]);
    }

    EXL3_INLINE void decode_tile(int t, uint32_t (&a)[4]) const {
        decode<kBits, kCodebook>(words[t], lane_words.drop, args.opaque, a);
    }

    EXL3_INLINE int64_t out_at(int i, int j) const {
        return (static_cast<int64_t>(blockIdx.y) * kBlock + j) * args.k + blockIdx.x * kBlock + i;
    }
};

template <int kCodebook>
__global__ void __launch_bounds__(kThreads, 4) inner_kernel(const __grid_constant__ ReconstructArgs args) {
    extern __shared__ __align__(16) uint8_t buffer[];
    __half* staged = reinterpret_cast<__half*>(buffer);
    const Block<kCodebook> block(args);
    const int i = block.step * 16 + block.lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < kBlockTiles; ++t) {
        uint32_t a[4];
        block.decode_tile(t, a);
        const int j = t * 16 + block.lane / 4;
#pragma unroll
        for (int q = 0; q < 4; ++q)
            *reinterpret_cast<uint32_t*>(staged + (j + q % 2 * 8) * kInnerStride + i + q / 2 * 8) = a[q];
    }
    __syncthreads();
    __half* out = static_cast<__half*>(args.out);
#pragma unroll
    for (int pass = 0; pass < kBlock * kBlock / 8 / kThreads; ++pass) {
        const int chunk = pass * kThreads + threadIdx.x;
        const int row = chunk / 16, column = chunk % 16 * 8;
        *reinterpret_cast<uint4*>(out + block.out_at(column, row)) =
            *reinterpret_cast<const uint4*>(staged + row * kInnerStride + column);
    }
}

template <int kCodebook, int kKind>
__global__ void __launch_bounds__(kThreads, 2) original_kernel(const __grid_constant__ ReconstructArgs args) {
    extern __shared__ __align__(16) float exchange[];
    {
        const Block<kCodebook> block(args);
        uint32_t signs[4];
        sign_fragment(block.lane, signs);
        float v[kBlockTiles][2][4] = {};
#pragma unroll
        for (int t = 0; t < kBlockTiles; ++t) {
            uint32_t a[4];
            block.decode_tile(t, a);
            mma(v[t][0], signs, a[0], a[2]);  // outputs 0-7 of the tile
            mma(v[t][1], signs, a[1], a[3]);  // outputs 8-15
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
cudaError_t launch_blocks(Kernel kernel, const ReconstructArgs& args, int kind, int slice_blocks, cudaStream_t stream) {
    const int shared = shared_bytes(kind);
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    return launch(kernel, dim3(args.k / kBlock, slice_blocks), kThreads, shared, false, stream, args);
}

template <int kCodebook>
cudaError_t launch_kind(const ReconstructArgs& args, int kind, int slice_blocks, cudaStream_t stream) {
    switch (kind) {
        case kInner: return launch_blocks(inner_kernel<kCodebook>, args, kind, slice_blocks, stream);
        case kOriginal: return launch_blocks(original_kernel<kCodebook, kOriginal>, args, kind, slice_blocks, stream);
        case kEightBit: return launch_blocks(original_kernel<kCodebook, kEightBit>, args, kind, slice_blocks, stream);
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
