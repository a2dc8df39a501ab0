// The wide decode GEMM for one K (EXL3_BITS): up to 256 rows per decoding, for Hopper alone.
//
// As in gemm.cuh the decoded tile is the A operand, straight from registers, and rows are B. Here a warp owns one
// column tile and the product is wgmma: it reads the rows from shared memory once per 64 columns and runs while the
// next tile is decoded. Sums are fp32 in ascending order of inputs, but not the bits of mma.sync: this is another
// route.
#include <cuda_pipeline_primitives.h>

#include <atomic>

#include "gemm.cuh"
#include "launch.h"
#include "wgmma.cuh"

namespace exl3 {
namespace {

constexpr int kBits = EXL3_BITS;
constexpr int kWarps = kBlockTiles;
constexpr int kThreads = 32 * kWarps;
constexpr int kStages = 2;
constexpr int kAlignment = 1024;  // of a swizzled operand

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define EXL3_HAS_WGMMA 1
#endif

template <int kRows>
struct Wide {
    static constexpr int kTileBytes = 32 * kBits;
    static constexpr int kStepBytes = kBlockTiles * kTileBytes;
    static constexpr int kWeightBytes = kSteps * kStepBytes;
    static constexpr int kRowBytes = kRows * kBlock * 2;
    static constexpr int kStageBytes = (kRowBytes + kWeightBytes + kAlignment - 1) / kAlignment * kAlignment;
    static constexpr int kSharedBytes = kStages * kStageBytes + kAlignment;

    static EXL3_INLINE void copy_weights(const GemmArgs& args, uint32_t stage, int block, int depth) {
        const long long step = static_cast<long long>(depth) * kSteps * args.plan.blocks + block;
        const uint8_t* source = args.trellis + step * kStepBytes;
        const long long step_stride = static_cast<long long>(args.plan.blocks) * kStepBytes;
        for (int chunk = threadIdx.x; chunk < kWeightBytes / 16; chunk += kThreads)
            copy_async(stage + kRowBytes + chunk * 16,
                       source + chunk / (kStepBytes / 16) * step_stride + chunk % (kStepBytes / 16) * 16);
    }

    static EXL3_INLINE void copy_rows(const GemmArgs& args, uint32_t stage, int depth) {
        const uint8_t* source = args.rotated + static_cast<long long>(depth) * kRowBytes;
#pragma unroll
        for (int i = 0; i < kRowBytes / 16 / kThreads; ++i) {
            const int chunk = threadIdx.x + i * kThreads;
            copy_async(stage + chunk * 16, source + chunk * 16);
        }
    }
};

template <int kCodebook, int kRows>
__global__ void __launch_bounds__(kThreads, 1) wide_kernel(const __grid_constant__ GemmArgs args) {
#ifdef EXL3_HAS_WGMMA
    using W = Wide<kRows>;
    extern __shared__ uint8_t buffer[];
    const uint32_t shared =
        (static_cast<uint32_t>(__cvta_generic_to_shared(buffer)) + kAlignment - 1) / kAlignment * kAlignment;
    const int first = args.plan.first_unit(blockIdx.x), last = args.plan.first_unit(blockIdx.x + 1);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const LaneWords<kBits> lane_words(lane);
    int block = first / args.plan.units_per_block, depth = first % args.plan.units_per_block;
    int next_block = block, next_depth = depth;
    const auto advance = [&](int& b, int& d) {
        if (++d == args.plan.units_per_block) d = 0, ++b;
    };

    let_next_start();
    W::copy_weights(args, shared, next_block, next_depth);
    wait_for_rotation();
    W::copy_rows(args, shared, next_depth);
    advance(next_block, next_depth);

    float sums[kRows / 2];
    int add = 0;
    for (int unit = first; unit < last; ++unit) {
        const uint32_t stage = shared + (unit - first) % kStages * W::kStageBytes;
        __pipeline_commit();
        __pipeline_wait_prior(0);
        publish_to_wgmma();
        __syncthreads();
        if (unit + 1 < last) {
            const uint32_t next_stage = shared + (unit + 1 - first) % kStages * W::kStageBytes;
            W::copy_weights(args, next_stage, next_block, next_depth);
            W::copy_rows(args, next_stage, next_depth);
            advance(next_block, next_depth);
        }
        uint32_t a[2][4];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t words[words_read(kBits)];
#pragma unroll
            for (int q = 0; q < words_read(kBits); ++q)
                words[q] = load_word(stage + W::kRowBytes + (step * kBlockTiles + warp) * W::kTileBytes +
                                     lane_words.index[q] * 4);
            decode<kBits, kCodebook>(words, lane_words.drop, args.opaque, a[step % 2]);
            wgmma_fence();
            const uint32_t operand = stage + step / 4 * (kRows * 128) + step % 4 * 32;
            wgmma<kRows>(sums, a[step % 2], swizzled_operand(operand), add);
            wgmma_commit();
            wgmma_wait<1>();
            add = 1;
        }
        wgmma_wait<0>();
        const bool ends = depth + 1 == args.plan.units_per_block;
        if (ends || unit + 1 == last) {
            const long long slot = blockIdx.x + block;
            float* out = args.partial + slot * args.rows * kBlock + warp * 16 + lane / 4;
#pragma unroll
            for (int i = 0; i < kRows / 2; ++i) {
                const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
                if (row < args.rows) out[row * kBlock + i / 2 % 2 * 8] = sums[i];
            }
            add = 0;
        }
        advance(block, depth);
    }
#endif
}

template <int kCodebook, int kRows>
cudaError_t launch_one(const GemmArgs& args, const Call& call) {
    const auto kernel = wide_kernel<kCodebook, kRows>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Wide<kRows>::kSharedBytes);
    if (error != cudaSuccess) return error;
    return launch(kernel, dim3(args.plan.ctas), kThreads, Wide<kRows>::kSharedBytes, call.overlap, call.stream, args);
}

template <int kCodebook>
cudaError_t launch_rows(const GemmArgs& args, const Call& call) {
    switch (call.row_groups) {
        case 24: return launch_one<kCodebook, 192>(args, call);
        case 32: return launch_one<kCodebook, 256>(args, call);
        default: return cudaErrorInvalidConfiguration;
    }
}

}  // namespace

template <>
cudaError_t launch_wide<EXL3_BITS>(const GemmArgs& args, const Call& call) {
    switch (call.codebook) {
        case kThreeInst: return launch_rows<kThreeInst>(args, call);
        case kMcg: return launch_rows<kMcg>(args, call);
        case kMul1: return launch_rows<kMul1>(args, call);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace exl3
