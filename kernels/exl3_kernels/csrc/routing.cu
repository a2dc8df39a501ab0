// The entry points of routed experts, and the small kernels around their products: sort the pairs, rotate their rows,
// combine a token's slots.
#include "experts.h"

namespace exl3 {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kPlanWarps = kPlanThreads / 32;

// One thread block per expert: lists its pairs in ascending order after those of smaller experts, and cuts them into
// items. Expert e's items start at (pairs before) / rows + e: unique, ascending, with empty items between.
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const int64_t* ids, int pairs, int rows, int item_numbers,
                                                            int* order, Item* items) {
    __shared__ int smaller[kPlanWarps], equal[kPlanWarps];
    const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int before = 0, count = 0;
    for (int pair = threadIdx.x; pair < pairs; pair += kPlanThreads) {
        const int64_t id = ids[pair];
        before += id >= 0 && id < expert;
        count += id == expert;
    }
    smaller[warp] = __reduce_add_sync(0xFFFFFFFFu, before);
    equal[warp] = __reduce_add_sync(0xFFFFFFFFu, count);
    __syncthreads();
    before = count = 0;
    for (int w = 0; w < kPlanWarps; ++w) before += smaller[w], count += equal[w];

    const int first = before / rows + expert;
    const int end = expert + 1 == gridDim.x ? item_numbers : (before + count) / rows + expert + 1;
    for (int item = first + threadIdx.x; item < end; item += kPlanThreads) {
        const int done = (item - first) * rows;
        items[item] = Item{expert, before + done, max(0, min(count - done, rows))};
    }
    if (count == 0) return;
    for (int start = 0; start < pairs; start += kPlanThreads) {
        const int pair = start + threadIdx.x;
        const bool mine = pair < pairs && ids[pair] == expert;
        const uint32_t here = __ballot_sync(0xFFFFFFFFu, mine);
        __syncthreads();
        equal[warp] = __popc(here);
        __syncthreads();
        int at = before + __popc(here & ((1u << lane) - 1));
        for (int w = 0; w < kPlanWarps; ++w) {
            if (w < warp) at += equal[w];
            before += equal[w];
        }
        if (mine) order[at] = pair;
    }
}

// A warp rotates one row for gate or up. grid: warps over (row, projection), item numbers.
__global__ void __launch_bounds__(kRowThreads) rotate_pairs_kernel(const ExpertsArgs args, int row_groups) {
    const Item item = args.items[blockIdx.y];
    const int units = args.plan.units_per_block, lane = threadIdx.x % 32;
    const int task = (blockIdx.x * kRowThreads + threadIdx.x) / 32;
    const int projection = task % 2, row = task / 2;
    if (row >= item.count) return;
    const int64_t token = args.order[item.first + row] / args.slots;
    const __half* suh = args.table[static_cast<int64_t>(item.expert) * kProjections + projection].suh;
    const int unit_words = kSteps * row_groups * 64;
    uint32_t* out = static_cast<uint32_t*>(args.out) +
                    (static_cast<int64_t>(blockIdx.y) * 2 + projection) * units * unit_words;
#pragma unroll 2
    for (int unit = 0; unit < units; ++unit) {
        float v[4];
        load_as(args.type, args.x, token * args.x_stride + unit * kBlock + lane * 4, v);
        rotate_into(out + unit * unit_words, row_groups, row, suh + unit * kBlock, v);
    }
}

// y = sum over slots, in order, of RN32(scale x the pair's row); unrouted slots add nothing.
__global__ void combine_kernel(const void* rows, int type, const int64_t* ids, const void* scales, int scale_type,
                               void* y, int tokens, int slots, int experts, int n) {
    wait_for_rotation();
    const int64_t four = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
    const int64_t token = four / (n / 4);
    const int column = static_cast<int>(four % (n / 4)) * 4;
    if (token >= tokens) return;
    float sum[4] = {};
    for (int slot = 0; slot < slots; ++slot) {
        const int64_t pair = token * slots + slot, id = ids[pair];
        if (id < 0 || id >= experts) continue;
        const float scale = scale_type == kHalf       ? to_float(static_cast<const __half*>(scales)[pair])
                            : scale_type == kBFloat16 ? to_float(static_cast<const __nv_bfloat16*>(scales)[pair])
                                                      : static_cast<const float*>(scales)[pair];
        float v[4];
        load_as(type, rows, pair * n + column, v);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(v[i], scale));
    }
    store_as(type, y, token * n + column, sum);
}

}  // namespace
}  // namespace exl3

using namespace exl3;

extern "C" {

int exl3_experts_plan(const void* ids, int pairs, int experts, int rows, int item_numbers, void* order, void* items,
                      void* stream) {
    return launch(plan_kernel, dim3(experts), kPlanThreads, 0, false, static_cast<cudaStream_t>(stream),
                  static_cast<const int64_t*>(ids), pairs, rows, item_numbers, static_cast<int*>(order),
                  static_cast<Item*>(items));
}

int exl3_experts_rotate(const void* table, const void* order, const void* items, int item_numbers, const void* x,
                        int type, int64_t x_stride, int slots, void* rotated, int row_groups, int k, void* stream) {
    ExpertsArgs args{};
    args.table = static_cast<const Stored*>(table);
    args.order = static_cast<const int*>(order);
    args.items = static_cast<const Item*>(items);
    args.x = x;
    args.x_stride = x_stride;
    args.type = type;
    args.slots = slots;
    args.out = rotated;
    args.plan = Plan{1, k / kBlock, 1, 1};
    const dim3 grid(warps_to_blocks(8 * row_groups * 2), item_numbers);
    return launch(rotate_pairs_kernel, grid, kRowThreads, 0, false, static_cast<cudaStream_t>(stream), args,
                  row_groups);
}

// `down` 0: out receives the rotated rows of the down projection; 1: the pairs' results. Without `items`, item numbers
// are pairs. Rows come from `x`, or rotated from `rotated`. Columns from `width` on are padding.
int exl3_experts(const void* table, const void* ids, const void* order, const void* items, int item_numbers, int pairs,
                 int slots, int experts, const void* x, int type, int64_t x_stride, const void* rotated, void* out,
                 int width, int most_bits, int down, int row_groups, int k, int n, int teams, void* stream) {
    ExpertsArgs args;
    args.table = static_cast<const Stored*>(table);
    args.ids = static_cast<const int64_t*>(ids);
    args.order = static_cast<const int*>(order);
    args.items = static_cast<const Item*>(items);
    args.x = x;
    args.rotated = static_cast<const uint8_t*>(rotated);
    args.out = out;
    args.x_stride = x_stride;
    args.type = type;
    args.pairs = pairs;
    args.slots = slots;
    args.experts = experts;
    args.item_numbers = item_numbers;
    args.width = width;
    args.most_bits = most_bits;
    args.down = down != 0;
    args.plan = Plan{n / kBlock, k / kBlock, teams, 1};
    args.unit_segments = args.plan.units() == args.plan.teams;
    const auto on = static_cast<cudaStream_t>(stream);
    switch (row_groups) {
        case 1: return launch_experts<1>(args, args.down, on);
        case 4: return launch_experts<4>(args, args.down, on);
        case 8: return launch_experts<8>(args, args.down, on);
        default: return cudaErrorInvalidConfiguration;
    }
}

int exl3_experts_combine(const void* rows, int type, const void* ids, const void* scales, int scale_type, void* y,
                         int tokens, int slots, int experts, int n, void* stream) {
    const int64_t blocks = (static_cast<int64_t>(tokens) * (n / 4) + kRowThreads - 1) / kRowThreads;
    return launch(combine_kernel, dim3(static_cast<unsigned>(blocks)), kRowThreads, 0, true,
                  static_cast<cudaStream_t>(stream), rows, type, static_cast<const int64_t*>(ids), scales, scale_type,
                  y, tokens, slots, experts, n);
}

}  // extern "C"
