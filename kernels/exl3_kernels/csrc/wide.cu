// The wide decode GEMM for one K (EXL3_BITS): up to 256 rows per decoding, for Hopper alone.
//
// As in gemm.cuh the decoded tile is the A operand, straight from registers, and rows are B. Here a warp owns one
// column tile and the product is wgmma: it reads the rows from shared memory once per 64 columns and runs while the
// next stage is decoded. Sums are fp32 in ascending order of inputs, but not the bits of mma.sync: this is another
// route.
//
// Rows are what is moved most. So a team of two thread blocks, a cluster, walks the same inputs for two neighbouring
// column blocks, and each fetches half of the rows for both. A third warpgroup feeds: bulk copies, stages of 64 inputs,
// as many ahead as fit. Of an odd number of column blocks the last is computed twice; the fold reads one of the two.
#include <algorithm>

#include "gemm.cuh"
#include "launch.h"
#include "pipeline.cuh"
#include "wgmma.cuh"

namespace exl3 {
namespace {

constexpr int kBits = EXL3_BITS;
constexpr int kConsumers = kBlockTiles;  // warps, of two warpgroups; a third feeds
constexpr int kFeeders = 4;
constexpr int kThreads = 32 * (kConsumers + kFeeders);
constexpr int kStageInputs = 64;  // of one swizzled line of 128 bytes per row
constexpr int kStageSteps = kStageInputs / 16;
[[maybe_unused]] constexpr int kStagesPerUnit = kBlock / kStageInputs;
// Every thread starts with 168.
[[maybe_unused]] constexpr int kConsumerRegisters = 232, kFeederRegisters = 40;
constexpr int kAlignment = 1024;  // of a swizzled operand
constexpr int kMostShared = 227 << 10;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define EXL3_HAS_WGMMA 1
#endif

template <int kRows>
struct Wide {
    static constexpr int kStepBytes = kBlockTiles * 32 * kBits;
    static constexpr int kWeightBytes = kStageSteps * kStepBytes;
    static constexpr int kRowBytes = kRows * kStageInputs * 2;
    static constexpr int kBarrierBytes = 256;
    static constexpr int kStages =
        std::min(8, (kMostShared - kAlignment - kBarrierBytes) / (kRowBytes + kWeightBytes));
    static_assert(kStages >= kFeeders, "a feeder passes the end of the stages once at a time");
    static constexpr int kSharedBytes = kAlignment + kStages * (kRowBytes + kWeightBytes) + kBarrierBytes;

    const GemmArgs& args;
    const uint32_t shared;
    const int rank;
    int pair, line;  // of the next stage: the team's column blocks, and its 64 inputs

    EXL3_INLINE Wide(const GemmArgs& a, uint32_t s) : args(a), shared(s), rank(blockIdx.x % kTeam) {
        const int unit = args.plan.first_unit(blockIdx.x / kTeam);
        pair = unit / args.plan.units_per_block;
        line = unit % args.plan.units_per_block * kStagesPerUnit;
    }

    EXL3_INLINE uint32_t rows(int stage) const { return shared + stage * kRowBytes; }
    EXL3_INLINE uint32_t weights(int stage) const { return shared + kStages * kRowBytes + stage * kWeightBytes; }
    EXL3_INLINE uint32_t full(int stage) const { return weights(kStages) + 8 * stage; }
    EXL3_INLINE uint32_t empty(int stage) const { return full(kStages) + 8 * stage; }

    EXL3_INLINE int lines() const { return args.plan.units_per_block * kStagesPerUnit; }

    EXL3_INLINE void advance(int stages) {
        for (line += stages; line >= lines(); line -= lines()) ++pair;
    }

    EXL3_INLINE void copy_weights(int stage) const {
        const int block = min(pair * kTeam + rank, args.plan.blocks - 1);
        const long long step_stride = static_cast<long long>(args.plan.blocks) * kStepBytes;
        const uint8_t* source =
            args.trellis + line * kStageSteps * step_stride + block * static_cast<long long>(kStepBytes);
        barrier_expect(full(stage), kRowBytes + kWeightBytes);
#pragma unroll
        for (int step = 0; step < kStageSteps; ++step)
            bulk_copy(weights(stage) + step * kStepBytes, source + step * step_stride, kStepBytes, full(stage));
    }

    EXL3_INLINE void copy_rows(int stage, int at_line) const {
        constexpr int kShare = kRowBytes / kTeam;
        bulk_copy_to((1 << kTeam) - 1, rows(stage) + rank * kShare,
                     args.rotated + static_cast<long long>(at_line) * kRowBytes + rank * kShare, kShare, full(stage));
    }

    // One thread's work: fill every kFeeders-th stage, from `feeder` on. Weights of the first pass are fetched while
    // the rows may still be rotated.
    EXL3_INLINE void feed(int feeder, int stages) {
        advance(feeder);
        const int first_pair = pair, first_line = line;
        for (int i = feeder; i < min(kStages, stages); i += kFeeders) {
            copy_weights(i);
            advance(kFeeders);
        }
        wait_for_rotation();
        pair = first_pair, line = first_line;
        int stage = feeder, parity = 1;
        for (int i = feeder; i < stages; i += kFeeders) {
            if (i >= kStages) {
                barrier_wait(empty(stage), parity);
                copy_weights(stage);
            }
            copy_rows(stage, line);
            advance(kFeeders);
            if ((stage += kFeeders) >= kStages) stage -= kStages, parity ^= 1;
        }
    }

    EXL3_INLINE void flush(float (&sums)[kRows / 2]) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const long long slot = args.plan.slot(blockIdx.x / kTeam, pair * kTeam + rank);
        float* out = args.partial + slot * args.rows * kBlock + warp * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) {
            const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (row < args.rows) out[row * kBlock + i / 2 % 2 * 8] = sums[i];
        }
    }

    template <int kCodebook>
    EXL3_INLINE void decode_stage(int stage, const LaneWords<kBits>& lane_words,
                                  uint32_t (&a)[kStageSteps][4]) const {
#pragma unroll
        for (int step = 0; step < kStageSteps; ++step) {
            const uint32_t tile = weights(stage) + (step * kBlockTiles + threadIdx.x / 32) * 32 * kBits;
            uint32_t words[words_read(kBits)];
#pragma unroll
            for (int q = 0; q < words_read(kBits); ++q) words[q] = load_word(tile + lane_words.index[q] * 4);
            decode<kBits, kCodebook>(words, lane_words.drop, args.opaque, a[step]);
        }
    }

    // A consumer warp's work, segment by segment: decode its tile of every step of a stage, and multiply by them while
    // the next stage is decoded.
    template <int kCodebook>
    EXL3_INLINE void consume(int stages) {
        const int lane = threadIdx.x % 32;
        const LaneWords<kBits> lane_words(lane);
        float sums[kRows / 2];
        int stage = 0, parity = 0, last_stage = -1;
        while (stages > 0) {
            const int length = min(stages, lines() - line);
            for (int i = 0; i < length; i += kStagesPerUnit) {
                uint32_t a[kStagesPerUnit][kStageSteps][4];
#pragma unroll
                for (int half = 0; half < kStagesPerUnit; ++half) {
                    barrier_wait(full(stage), parity);
                    decode_stage<kCodebook>(stage, lane_words, a[half]);
                    wgmma_fence();
#pragma unroll
                    for (int step = 0; step < kStageSteps; ++step)
                        wgmma<kRows>(sums, a[half][step], swizzled_operand(rows(stage) + step * 32),
                                     step + half + i > 0);
                    wgmma_commit();
                    wgmma_wait<1>();  // the products of the stage before have ended
                    if (last_stage >= 0 && lane < kTeam) barrier_arrive_at(empty(last_stage), lane);
                    last_stage = stage;
                    if (++stage == kStages) stage = 0, parity ^= 1;
                }
            }
            wgmma_wait<0>();
            flush(sums);
            stages -= length;
            line = 0, ++pair;
        }
    }
};

template <int kCodebook, int kRows>
__global__ void __launch_bounds__(kThreads, 1) wide_kernel(const __grid_constant__ GemmArgs args) {
#ifdef EXL3_HAS_WGMMA
    extern __shared__ uint8_t buffer[];
    const uint32_t start = static_cast<uint32_t>(__cvta_generic_to_shared(buffer));
    using W = Wide<kRows>;
    W wide(args, (start + kAlignment - 1) / kAlignment * kAlignment);
    const int team = blockIdx.x / kTeam;
    const int stages = (args.plan.first_unit(team + 1) - args.plan.first_unit(team)) * kStagesPerUnit;
    let_next_start();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < W::kStages; ++stage) {
            barrier_init(wide.full(stage), 1);
            barrier_init(wide.empty(stage), kTeam * kConsumers);
        }
        publish_barriers();
    }
    cluster_sync();
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
    if (warp < kConsumers) {
        take_registers<kConsumerRegisters>();
        wide.template consume<kCodebook>(stages);
    } else {
        give_registers<kFeederRegisters>();
        if (elected()) wide.feed(warp - kConsumers, stages);
        __syncwarp();
    }
    cluster_sync();  // no thread block leaves while another may still arrive at its barriers
#endif
}

template <int kCodebook, int kRows>
cudaError_t launch_one(const GemmArgs& args, const Call& call) {
    const auto kernel = wide_kernel<kCodebook, kRows>;
    const int shared = Wide<kRows>::kSharedBytes;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    return launch_clusters(kTeam, kernel, dim3(kTeam * args.plan.teams), kThreads, shared, call.overlap, call.stream,
                           args);
}

template <int kCodebook>
cudaError_t launch_rows(const GemmArgs& args, const Call& call) {
    switch (call.row_groups) {
        case 8: return launch_one<kCodebook, 64>(args, call);
        case 16: return launch_one<kCodebook, 128>(args, call);
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
