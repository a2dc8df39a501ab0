// The products of routed experts for items of EXL3_ROW_GROUPS x 8 rows: gate, up and SwiGLU in one launch, or down.
//
// A thread block serves one item and two panels of 128 columns: the same columns of gate and up, or two neighbours of
// down. The warps that share a panel divide its columns and walk all inputs; width and codebook are read from the table
// and chosen per warp, so experts and projections may differ. Each warp copies its own weights through a ring in shared
// memory, ahead of the rows, which all warps share in two stages. The product is a short loop: with one or two units
// per warp, as with a single token, fetching an unrolled one would take longer than running it.
//
// The fp32 sums of a row are those of the decode GEMM, segment by segment (plan.h), added in the order in which its
// fold adds them. Where few items are routed, a cluster of thread blocks shares the segments of a panel; its first
// block then adds what the others left in their shared memory, in the same order. So neither the cluster nor the rows
// beside it reach the bits of a row.
#include <cooperative_groups.h>
#include <cuda_pipeline_primitives.h>

#include <algorithm>
#include <atomic>

#include "experts.h"

namespace exl3 {
namespace {

constexpr int kRowGroups = EXL3_ROW_GROUPS;
constexpr int kRows = 8 * kRowGroups;
constexpr int kPanelWarps = kRowGroups == 8 ? 8 : 4;
constexpr int kWarps = 2 * kPanelWarps;
constexpr int kThreads = 32 * kWarps;
constexpr int kResident = kRowGroups == 1 ? 3 : kRowGroups == 4 ? 2 : 1;
constexpr int kTiles = kBlockTiles / kPanelWarps;  // column tiles of a warp
constexpr int kUnitBytes = kSteps * kRowGroups * 256;
constexpr int kStageUnits = kRowGroups == 1 ? 2 : 1;
constexpr int kStageBytes = 2 * kStageUnits * kUnitBytes;
constexpr int kZStride = kBlock + 4;  // floats: spreads a fragment's rows over the banks
constexpr int kZBytes = 2 * kRows * kZStride * 4;
constexpr int kRowBytes = 2 * kStageBytes > kZBytes ? 2 * kStageBytes : kZBytes;
constexpr int kHalfSteps = kSteps / 2;  // steps of a ring's slot, which holds half a unit of a warp's weights
constexpr int kSlots = 4;
constexpr int kUnrolled = 2;
constexpr int kSegmentBytes = kWarps * kTiles * kRowGroups * 32 * sizeof(float4);
constexpr int kMostSplits = kRowGroups == 1 ? 8 : 1;

__host__ __device__ constexpr int slot_bytes(int bits) { return kHalfSteps * kTiles * 32 * bits; }

using Sums = float[kTiles][kRowGroups][4];

// The part of a panel's inputs that this thread block multiplies: whole segments.
struct Panel {
    Stored stored;
    int block;
    int segment, segments;  // first of this thread block, and how many
    int depth, end;         // units of 128 inputs
    bool active;

    __host__ __device__ static int first_segment(const Plan& plan, int block) {
        return plan.team_of(block * plan.units_per_block);
    }
    __host__ __device__ static int count_segments(const Plan& plan, int block) {
        return plan.team_of((block + 1) * plan.units_per_block - 1) - first_segment(plan, block) + 1;
    }
    EXL3_INLINE static int end_of(const Plan& plan, int block, int segment) {
        return min(plan.first_unit(segment + 1) - block * plan.units_per_block, plan.units_per_block);
    }

    EXL3_INLINE Panel(const ExpertsArgs& args, const Stored& from, int b, int split, int splits) : stored(from), block(b) {
        const Plan& plan = args.plan;
        active = block < plan.blocks;
        segment = segments = depth = end = 0;
        if (!active) return;
        if (args.unit_segments) {
            depth = plan.units_per_block * split / splits;
            end = plan.units_per_block * (split + 1) / splits;
            segment = block * plan.units_per_block + depth;
            segments = end - depth;
            return;
        }
        const int all = count_segments(plan, block), skipped = all * split / splits;
        segment = first_segment(plan, block) + skipped;
        segments = all * (split + 1) / splits - skipped;
        depth = max(plan.first_unit(segment) - block * plan.units_per_block, 0);
        end = segments ? end_of(plan, block, segment + segments - 1) : depth;
    }
};

// One warp's sums, and where they go at the end of a segment: into a register total, or to `partial` for another block.
struct Chain {
    Sums sums = {};
    Sums total = {};
    int segment, ends;
    float4* partial;

    EXL3_INLINE void end_segment(const ExpertsArgs& args, int block) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int group = 0; group < kRowGroups; ++group) {
                float(&s)[4] = sums[tile][group];
                if (partial != nullptr) {
                    partial[(tile * kRowGroups + group) * 32] = make_float4(s[0], s[1], s[2], s[3]);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i) total[tile][group][i] += s[i];
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) s[i] = 0.0f;
            }
        if (partial != nullptr) partial += kSegmentBytes / sizeof(float4);
        ++segment;
        ends = args.unit_segments ? ends + 1 : Panel::end_of(args.plan, block, segment);
    }
};

// The copies of one warp's weights, half a unit each, through its ring.
struct Feed {
    const uint8_t* source;
    int64_t step_bytes;
    uint32_t ring;
    int left, bits, slot;

    EXL3_INLINE Feed(const Plan& plan, const Panel& panel, uint32_t at) : ring(at), slot(0) {
        bits = static_cast<int>(panel.stored.kind) % 16;
        step_bytes = static_cast<int64_t>(plan.blocks) * kBlockTiles * 32 * bits;
        left = 2 * (panel.end - panel.depth);
        const int tile = panel.block * kBlockTiles + threadIdx.x / 32 % kPanelWarps * kTiles;
        source = panel.stored.trellis + panel.depth * kSteps * step_bytes + tile * 32 * bits +
                 threadIdx.x % 32 * 16;
    }

    EXL3_INLINE void copy_half() {
        const int chunks = kTiles * 2 * bits, lane = threadIdx.x % 32;
        if (left > 0 && lane < chunks) {
#pragma unroll
            for (int step = 0; step < kHalfSteps; ++step)
                copy_async(ring + slot * slot_bytes(bits) + (step * chunks + lane) * 16, source + step * step_bytes);
        }
        source += kHalfSteps * step_bytes;
        slot = slot + 1 == kSlots ? 0 : slot + 1;
        --left;
        __pipeline_commit();
    }
};

// Multiplies units first .. last - 1 of a panel by the rows whose first unit is at `rows_at`.
template <int kBits, int kCodebook>
EXL3_INLINE void multiply(const ExpertsArgs& args, int block, int first, int last, uint32_t rows_at, Feed& feed,
                          Chain& chain) {
    const LaneWords<kBits> lane_words(threadIdx.x % 32);
    for (int half = 2 * first; half < 2 * last; ++half) {
        __pipeline_wait_prior(kSlots - 2);
        __syncwarp();
        const uint32_t words_at = feed.ring + (feed.slot + 1) % kSlots * slot_bytes(kBits);
        feed.copy_half();
#pragma unroll kUnrolled
        for (int step = 0; step < kHalfSteps; ++step) {
            uint32_t a[kTiles][4];
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                uint32_t words[words_read(kBits)];
#pragma unroll
                for (int q = 0; q < words_read(kBits); ++q)
                    words[q] = load_word(words_at + (step * kTiles + tile) * 32 * kBits + lane_words.index[q] * 4);
                decode<kBits, kCodebook>(words, lane_words.drop, args.opaque, a[tile]);
            }
            if constexpr (kRowGroups == 1) {
                uint32_t b0, b1;
                asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(b0), "=r"(b1) : "r"(rows_at));
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) mma(chain.sums[tile][0], a[tile], b0, b1);
            } else {
#pragma unroll
                for (int pair = 0; pair < kRowGroups / 2; ++pair) {
                    uint32_t b0, b1, b2, b3;
                    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                                 : "=r"(b0), "=r"(b1), "=r"(b2), "=r"(b3)
                                 : "r"(rows_at + pair * 512));
#pragma unroll
                    for (int tile = 0; tile < kTiles; ++tile) {
                        mma(chain.sums[tile][2 * pair], a[tile], b0, b1);
                        mma(chain.sums[tile][2 * pair + 1], a[tile], b2, b3);
                    }
                }
            }
            rows_at += kUnitBytes / kSteps;
        }
        if (half + 1 == 2 * chain.ends) chain.end_segment(args, block);
    }
}

EXL3_INLINE void multiply_any(const ExpertsArgs& args, const Panel& panel, int first, int last, uint32_t rows_at,
                              Feed& feed, Chain& chain) {
    switch (static_cast<int>(panel.stored.kind)) {
#define EXL3_CODEBOOK(K, C) \
    case K + 16 * C: multiply<K, C>(args, panel.block, first, last, rows_at, feed, chain); break;
#define EXL3_CASE(K) EXL3_CODEBOOK(K, kThreeInst) EXL3_CODEBOOK(K, kMcg) EXL3_CODEBOOK(K, kMul1)
        EXL3_CASE(1) EXL3_CASE(2) EXL3_CASE(3) EXL3_CASE(4) EXL3_CASE(5) EXL3_CASE(6) EXL3_CASE(7) EXL3_CASE(8)
#undef EXL3_CASE
#undef EXL3_CODEBOOK
        default: break;
    }
}

// Finds the item of this thread block and its pairs. Without a plan, item p is led by pair p: it holds p and the next
// pairs of the same expert, if p is the first, or the first after a full item.
EXL3_INLINE Item find_item(const ExpertsArgs& args, int number, int (&members)[kRows]) {
    __shared__ Item found;
    if (args.items != nullptr) {
        const Item item = args.items[number];
        if (threadIdx.x < item.count) members[threadIdx.x] = args.order[item.first + threadIdx.x];
        __syncthreads();
        return item;
    }
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        const int64_t expert = args.ids[number];
        int before = 0, count = 0;
        if (expert >= 0 && expert < args.experts) {
#pragma unroll 4
            for (int first = 0; first < args.pairs; first += 32) {
                const int pair = first + lane;
                const bool same = pair < args.pairs && args.ids[pair] == expert;
                before += __popc(__ballot_sync(0xFFFFFFFFu, same && pair < number));
                const uint32_t members_here = __ballot_sync(0xFFFFFFFFu, same && pair >= number);
                const int rank = count + __popc(members_here & ((1u << lane) - 1));
                if (same && pair >= number && rank < kRows) members[rank] = pair;
                count += __popc(members_here);
            }
        }
        if (lane == 0) found = Item{static_cast<int>(expert), 0, before % kRows ? 0 : min(count, kRows)};
    }
    __syncthreads();
    return found;
}

struct Stager {
    const ExpertsArgs& args;
    const Item& item;
    const int (&members)[kRows];
    const Stored* stored;  // of the item's expert
    uint8_t* buffer;

    EXL3_INLINE int sets() const { return args.down ? 1 : 2; }

    // Puts units first .. last - 1 of the item's rows into a stage: copied, or rotated on the spot.
    EXL3_INLINE void fill(int stage, int first, int last) const {
        uint8_t* to = buffer + stage * kStageBytes;
        const int units = last - first;
        if (args.x == nullptr) {
            const int chunks = units * (kUnitBytes / 16);
            for (int set = 0; set < sets(); ++set) {
                const int64_t unit =
                    (static_cast<int64_t>(blockIdx.z) * sets() + set) * args.plan.units_per_block + first;
                const uint32_t target =
                    static_cast<uint32_t>(__cvta_generic_to_shared(to + set * kStageUnits * kUnitBytes));
                for (int chunk = threadIdx.x; chunk < chunks; chunk += kThreads)
                    copy_async(target + chunk * 16, args.rotated + unit * kUnitBytes + chunk * 16);
            }
        } else {
            for (int task = threadIdx.x / 32; task < sets() * units * item.count; task += kWarps) {
                const int row = task % item.count, unit = task / item.count % units, set = task / item.count / units;
                const int input = (first + unit) * kBlock;
                float v[4];
                load_as(args.type, args.x, members[row] / args.slots * args.x_stride + input + threadIdx.x % 32 * 4, v);
                uint8_t* at = to + (set * kStageUnits + unit) * kUnitBytes;
                rotate_into(reinterpret_cast<uint32_t*>(at), kRowGroups, row, stored[set].suh + input, v);
            }
        }
        __pipeline_commit();
    }
};

// The output transform of a row's four columns, rounded to the type of activations.
EXL3_INLINE void finish_block(const ExpertsArgs& args, const float* z, const __half* svh, float (&v)[4]) {
    const int lane = threadIdx.x % 32;
    load_four(z + lane * 4, v);
    hadamard(v);
    float scale[4];
    load_four(svh + lane * 4, scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = rounded_as(args.type, v[i] * scale[i]);
}

// Adds what the other thread blocks of the cluster summed, ascending: their segments follow this one's.
EXL3_INLINE void add_splits(const ExpertsArgs& args, const Panel& panel, const Stored& stored, float4* partial,
                            int rows, int splits, Chain& chain) {
#if __CUDA_ARCH__ >= 900
    namespace cg = cooperative_groups;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int split = 1; split < splits; ++split) {
        const float4* theirs = cg::this_cluster().map_shared_rank(partial, split);
        theirs += warp * kTiles * kRowGroups * 32 + lane;
        const int segments = Panel(args, stored, panel.block, split, splits).segments;
        for (int segment = 0; segment < segments; ++segment, theirs += kSegmentBytes / sizeof(float4))
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
                for (int group = 0; group < kRowGroups; ++group)
                    if (group * 8 + lane % 4 * 2 < rows) {
                        const float4 s = theirs[(tile * kRowGroups + group) * 32];
                        float(&total)[4] = chain.total[tile][group];
                        total[0] += s.x, total[1] += s.y, total[2] += s.z, total[3] += s.w;
                    }
    }
#endif
}

EXL3_INLINE void sync_cluster() {
#if __CUDA_ARCH__ >= 900
    cooperative_groups::this_cluster().sync();
#endif
}

// grid: splits, panels of 128 columns (gate and up) or pairs of them (down), item numbers.
__global__ void __launch_bounds__(kThreads, kResident) experts_kernel(const __grid_constant__ ExpertsArgs args) {
    extern __shared__ __align__(16) uint8_t buffer[];
    __shared__ int members[kRows];
    let_next_start();
    const int split = blockIdx.x, splits = gridDim.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Item item = find_item(args, blockIdx.z, members);
    if (item.count == 0) return;
    const Stored* stored = args.table + static_cast<int64_t>(item.expert) * kProjections;
    const int second = warp / kPanelWarps;
    const Stored& mine = stored[args.down ? kDown : second];
    const Panel panel(args, mine, args.down ? 2 * blockIdx.y + second : blockIdx.y, split, splits);
    const Panel other(args, mine, args.down ? 2 * blockIdx.y + 1 - second : blockIdx.y, split, splits);
    const int from = other.active && (!panel.active || other.depth < panel.depth) ? other.depth : panel.depth;
    const int to = max(panel.end, other.end);

    const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(buffer));
    const int ring_bytes = kSlots * slot_bytes(args.most_bits);
    Feed feed(args.plan, panel, shared + kRowBytes + warp * ring_bytes);
    for (int slot = 0; slot < kSlots - 1; ++slot) feed.copy_half();

    float4* partial = reinterpret_cast<float4*>(buffer + kRowBytes + kWarps * ring_bytes);
    Chain chain;
    chain.segment = panel.segment;
    chain.ends = args.unit_segments ? panel.depth + 1
                 : panel.active     ? Panel::end_of(args.plan, panel.block, panel.segment)
                                    : 0;
    chain.partial = split ? partial + warp * kTiles * kRowGroups * 32 + lane : nullptr;

    const Stager stager{args, item, members, stored, buffer};
    const uint32_t lane_at = (args.down ? 0 : second * kStageUnits * kUnitBytes) + lane * (kRowGroups == 1 ? 8 : 16);
    wait_for_rotation();
    stager.fill(0, from, min(from + kStageUnits, to));
    for (int first = from, stage = 0; first < to; first += kStageUnits, stage ^= 1) {
        if (first == from) {
            __pipeline_wait_prior(0);
        } else {
            __pipeline_wait_prior(kSlots - 2);  // after a stage's rows every warp commits two or more copies of weights
        }
        __syncthreads();
        const int next = first + kStageUnits;
        if (next < to) stager.fill(stage ^ 1, next, min(next + kStageUnits, to));
        const int begin = max(first, panel.depth), end = max(begin, min(next, panel.end));
        if (begin < end)
            multiply_any(args, panel, begin, end, shared + stage * kStageBytes + lane_at + (begin - first) * kUnitBytes,
                         feed, chain);
        for (int half = 2 * (end - begin); half < 2 * kStageUnits; ++half) __pipeline_commit();
    }
    if (splits > 1) {
        sync_cluster();
        if (split == 0 && panel.active) add_splits(args, panel, mine, partial, item.count, splits, chain);
        sync_cluster();
        if (split) return;
    }

    float* z = reinterpret_cast<float*>(buffer);
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int group = 0; group < kRowGroups; ++group)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = group * 8 + lane % 4 * 2 + (i & 1);
                const int column = (warp % kPanelWarps * kTiles + tile) * 16 + (i >> 1) * 8 + lane / 4;
                z[(second * kRows + row) * kZStride + column] = chain.total[tile][group][i];
            }
    __syncthreads();
    if (args.down) {
        const int64_t n = static_cast<int64_t>(args.plan.blocks) * kBlock;
        for (int task = warp; task < 2 * item.count; task += kWarps) {
            const int row = task / 2, half = task % 2, column = (2 * blockIdx.y + half) * kBlock;
            if (column == n) continue;
            float v[4];
            finish_block(args, z + (half * kRows + row) * kZStride, mine.svh + column, v);
            store_as(args.type, args.out, members[row] * n + column + lane * 4, v);
        }
        return;
    }
    uint8_t* unit = static_cast<uint8_t*>(args.out) +
                    (static_cast<int64_t>(blockIdx.z) * args.plan.blocks + blockIdx.y) * kUnitBytes;
    const int column = blockIdx.y * kBlock;
    for (int row = warp; row < item.count; row += kWarps) {
        float g[4], u[4];
        finish_block(args, z + row * kZStride, stored[kGate].svh + column, g);
        finish_block(args, z + (kRows + row) * kZStride, stored[kUp].svh + column, u);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float activated = rounded_as(args.type, g[i] / (1.0f + expf(-g[i])));
            const bool padding = column + lane * 4 + i >= args.width;
            g[i] = padding ? 0.0f : rounded_as(args.type, activated * u[i]);
        }
        rotate_into(reinterpret_cast<uint32_t*>(unit), kRowGroups, row, stored[kDown].suh + column, g);
    }
}

// How many thread blocks share a panel: enough to fill the GPU with few items, as long as their sums fit.
cudaError_t choose_splits(const ExpertsArgs& args, const Device& device, int panels, int most_shared, int& splits,
                          int& shared) {
    int major = 0;
    const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.number);
    int segments = 0;
    for (int block = 0; block < args.plan.blocks; ++block)
        segments = std::max(segments, Panel::count_segments(args.plan, block));
    const auto bytes = [&](int count) {
        return kRowBytes + kWarps * kSlots * slot_bytes(args.most_bits) +
               (count > 1 ? (segments + count - 1) / count * kSegmentBytes : 0);
    };
    const int items = std::min(args.pairs, args.item_numbers);
    splits = 1;
    for (int count = 2; major >= 9 && count <= std::min(kMostSplits, args.plan.units_per_block); count *= 2)
        if (bytes(count) <= most_shared && items * panels * splits < 2 * device.multiprocessors) splits = count;
    shared = bytes(splits);
    return error;
}

}  // namespace

template <>
cudaError_t launch_experts<kRowGroups>(const ExpertsArgs& args, bool overlap, cudaStream_t stream) {
    static std::atomic<unsigned long long> prepared{0};  // bit d: device d allows the kernel all its shared memory
    Device device;
    cudaError_t error = query(device);
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, experts_kernel);
    if (error != cudaSuccess) return error;
    const int most_shared = device.shared_per_block - static_cast<int>(attributes.sharedSizeBytes);
    if (!(prepared.load() >> device.number & 1)) {
        error = cudaFuncSetAttribute(experts_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared);
        if (error != cudaSuccess) return error;
        prepared.fetch_or(1ull << device.number);
    }
    const int panels = args.down ? (args.plan.blocks + 1) / 2 : args.plan.blocks;
    int splits, shared;
    error = choose_splits(args, device, panels, most_shared, splits, shared);
    if (error != cudaSuccess) return error;
    return launch_clusters(splits, experts_kernel, dim3(splits, panels, args.item_numbers), kThreads, shared, overlap,
                           stream, args);
}

}  // namespace exl3
