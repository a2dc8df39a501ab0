// The decode GEMM: rotated rows times the inner matrix, fp32 sums per segment.
//
// Both operands are swapped: the decoded tile is A (its 16 output columns are the rows of mma.m16n8k16) and eight rows
// of activations are B. A warp owns kTiles column tiles of a block and every row of the launch, so each weight is
// decoded once for up to 128 rows and the chain of a row is the same whatever the row count.
#pragma once

#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include "decode.cuh"
#include "plan.h"

namespace exl3 {

constexpr int kBlockTiles = kBlock / 16;

struct GemmArgs {
    const uint8_t* trellis;
    const uint8_t* rotated;  // fragment order, see linear.cu
    float* partial;          // [slots, rows, 128]
    int rows;
    Plan plan;
    Opaque opaque;
};

EXL3_INLINE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The product alone.
EXL3_INLINE void mma_first(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

EXL3_INLINE void copy_async(uint32_t shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

EXL3_INLINE uint32_t load_word(uint32_t shared) {
    uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(shared));
    return word;
}

EXL3_INLINE void wait_for_rotation() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

EXL3_INLINE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

template <int kBits, int kCodebook, int kRowGroups, int kWarps, int kStages>
struct Gemm {
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kTiles = kBlockTiles / kWarps;
    static constexpr int kTileBytes = 32 * kBits;
    static constexpr int kWeightBytes = kSteps * kBlockTiles * kTileBytes;
    static constexpr int kRowBytes = kSteps * kRowGroups * 256;
    static constexpr int kStageBytes = kWeightBytes + kRowBytes;
    static constexpr int kSharedBytes = kStages * kStageBytes;
    static constexpr int kWeightChunks = (kWeightBytes / 16 + kThreads - 1) / kThreads;
    static constexpr int kRowChunks = (kRowBytes / 16 + kThreads - 1) / kThreads;

    const GemmArgs& args;
    const uint32_t shared;
    uint32_t chunk_offset[kWeightChunks];

    // The unit that the copies have reached.
    int block, depth;
    const uint8_t* source;

    EXL3_INLINE Gemm(const GemmArgs& a, uint32_t s, int unit) : args(a), shared(s) {
        const uint32_t step_bytes = args.plan.blocks * kBlockTiles * kTileBytes;
#pragma unroll
        for (int i = 0; i < kWeightChunks; ++i) {
            const int chunk = threadIdx.x + i * kThreads;
            chunk_offset[i] = chunk / (16 * kBits) * step_bytes + chunk % (16 * kBits) * 16;
        }
        block = unit / args.plan.units_per_block;
        depth = unit % args.plan.units_per_block;
        locate();
    }

    EXL3_INLINE void locate() {
        const long long step = static_cast<long long>(depth) * kSteps * args.plan.blocks + block;
        source = args.trellis + step * (kBlockTiles * kTileBytes);
    }

    EXL3_INLINE void copy_weights(int stage) {
        const uint32_t target = shared + stage * kStageBytes;
#pragma unroll
        for (int i = 0; i < kWeightChunks; ++i) {
            const int chunk = threadIdx.x + i * kThreads;
            if ((i + 1) * kThreads * 16 <= kWeightBytes || chunk * 16 < kWeightBytes)
                copy_async(target + chunk * 16, source + chunk_offset[i]);
        }
    }

    EXL3_INLINE void copy_rows(int stage, int at_depth) {
        const uint32_t target = shared + stage * kStageBytes + kWeightBytes;
        const uint8_t* from = args.rotated + static_cast<long long>(at_depth) * kRowBytes;
#pragma unroll
        for (int i = 0; i < kRowChunks; ++i) {
            const int chunk = threadIdx.x + i * kThreads;
            if ((i + 1) * kThreads * 16 <= kRowBytes || chunk * 16 < kRowBytes)
                copy_async(target + chunk * 16, from + chunk * 16);
        }
    }

    EXL3_INLINE void advance() {
        if (++depth == args.plan.units_per_block) {
            depth = 0;
            ++block;
            locate();
        } else {
            source += static_cast<long long>(kSteps) * args.plan.blocks * kBlockTiles * kTileBytes;
        }
    }

    EXL3_INLINE void multiply(int stage, const LaneWords<kBits>& lane_words, float (&sums)[kTiles][kRowGroups][4]) {
        const uint32_t base = shared + stage * kStageBytes;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        uint32_t word_at[words_read(kBits)];
#pragma unroll
        for (int q = 0; q < words_read(kBits); ++q)
            word_at[q] = base + warp * kTiles * kTileBytes + lane_words.index[q] * 4;
        const uint32_t rows_at = base + kWeightBytes + lane * (kRowGroups == 1 ? 8 : 16);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t a[kTiles][4];
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                uint32_t words[words_read(kBits)];
#pragma unroll
                for (int q = 0; q < words_read(kBits); ++q)
                    words[q] = load_word(word_at[q] + (step * kBlockTiles + tile) * kTileBytes);
                decode<kBits, kCodebook>(words, lane_words.drop, args.opaque, a[tile]);
            }
            if constexpr (kRowGroups == 1) {
                uint32_t b0, b1;
                asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(b0), "=r"(b1) : "r"(rows_at + step * 256));
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) mma(sums[tile][0], a[tile], b0, b1);
            } else {
#pragma unroll
                for (int pair = 0; pair < kRowGroups / 2; ++pair) {
                    uint32_t b0, b1, b2, b3;
                    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                                 : "=r"(b0), "=r"(b1), "=r"(b2), "=r"(b3)
                                 : "r"(rows_at + (step * (kRowGroups / 2) + pair) * 512));
#pragma unroll
                    for (int tile = 0; tile < kTiles; ++tile) {
                        mma(sums[tile][2 * pair], a[tile], b0, b1);
                        mma(sums[tile][2 * pair + 1], a[tile], b2, b3);
                    }
                }
            }
        }
    }

    EXL3_INLINE void flush(int slot, float (&sums)[kTiles][kRowGroups][4]) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float* out = args.partial + static_cast<long long>(slot) * args.rows * kBlock + warp * kTiles * 16 + lane / 4;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int group = 0; group < kRowGroups; ++group)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = group * 8 + lane % 4 * 2 + (i & 1);
                    if (row < args.rows) out[row * kBlock + tile * 16 + (i >> 1) * 8] = sums[tile][group][i];
                    sums[tile][group][i] = 0.0f;
                }
    }
};

template <int kBits, int kCodebook, int kRowGroups, int kWarps, int kStages, int kResident>
__global__ void __launch_bounds__(32 * kWarps, kResident) gemm_kernel(const __grid_constant__ GemmArgs args) {
    using G = Gemm<kBits, kCodebook, kRowGroups, kWarps, kStages>;
    extern __shared__ __align__(16) uint8_t buffer[];
    const int first = args.plan.first_unit(blockIdx.x), count = args.plan.first_unit(blockIdx.x + 1) - first;
    G gemm(args, static_cast<uint32_t>(__cvta_generic_to_shared(buffer)), first);
    const LaneWords<kBits> lane_words(threadIdx.x % 32);
    int block = gemm.block, depth = gemm.depth;

    let_next_start();
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage)
        if (stage < count) {
            gemm.copy_weights(stage);
            gemm.advance();
        }
    wait_for_rotation();
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
        if (stage < count) gemm.copy_rows(stage, (depth + stage) % args.plan.units_per_block);
        __pipeline_commit();
    }

    float sums[G::kTiles][kRowGroups][4] = {};
    int stage = 0, next_stage = kStages - 1;
    for (int i = 0; i < count; ++i) {
        __pipeline_wait_prior(kStages - 2);
        __syncthreads();
        if (i + kStages - 1 < count) {
            gemm.copy_weights(next_stage);
            gemm.copy_rows(next_stage, gemm.depth);
            gemm.advance();
        }
        __pipeline_commit();
        gemm.multiply(stage, lane_words, sums);
        stage = stage + 1 == kStages ? 0 : stage + 1;
        next_stage = next_stage + 1 == kStages ? 0 : next_stage + 1;
        const bool ends = ++depth == args.plan.units_per_block;
        if (ends || i + 1 == count) gemm.flush(args.plan.slot(blockIdx.x, block), sums);
        if (ends) {
            depth = 0;
            ++block;
        }
    }
}

}  // namespace exl3
