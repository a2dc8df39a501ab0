// Routed experts: what the kernels of routing.cu and experts.cu share.
//
// A *pair* is one (token, slot) of the routing. An *item* is up to 8 x row groups pairs of one expert, served together:
// its rows are the columns of B, in the order of the pairs. Which pairs share an item never reaches the bits of a row.
#pragma once

#include "transform.cuh"

namespace exl3 {

enum Projection { kGate = 0, kUp = 1, kDown = 2, kProjections = 3 };

// One projection of one expert: a row of the table [experts, 3].
struct Stored {
    const uint8_t* trellis;
    const __half* suh;
    const __half* svh;
    int64_t kind;  // K + 16 x codebook
};

struct Item {
    int expert, first, count;  // pairs order[first .. first + count)
};

// One launch: gate, up and SwiGLU (`down` false), or down. See experts.cu.
struct ExpertsArgs {
    const Stored* table;
    const int64_t* ids;    // [pairs], the expert of each; a number that is none marks an unrouted slot
    const int* order;      // pairs sorted by expert, and the items among them; null: an item is numbered by its first
    const Item* items;     // pair and every thread block finds it by itself
    const void* x;         // rows to rotate here, [tokens, k]; null: they are in `rotated`
    const uint8_t* rotated;  // [items, gate and up or one, k / 128, unit of rows in fragment order]
    void* out;             // gate and up: rotated rows of the down projection; down: [pairs, n] of `type`
    int64_t x_stride;
    int type;              // of activations, a DType
    int pairs, slots, experts, item_numbers;
    int most_bits;         // of any projection of the layer
    int width;             // columns from here on are padding of the inner activations and become 0
    bool down;
    Plan plan;             // of one expert's projection, as in a launch of its own
    bool unit_segments;    // every unit is a segment: no division to find where one ends
    Opaque opaque;
};

EXL3_INLINE void load_as(int type, const void* from, int64_t at, float (&v)[4]) {
    if (type == kHalf) {
        load_four(static_cast<const __half*>(from) + at, v);
    } else if (type == kBFloat16) {
        load_four(static_cast<const __nv_bfloat16*>(from) + at, v);
    } else {
        load_four(static_cast<const float*>(from) + at, v);
    }
}

EXL3_INLINE void store_as(int type, void* to, int64_t at, const float (&v)[4]) {
    if (type == kHalf) {
        store_four(static_cast<__half*>(to) + at, v);
    } else if (type == kBFloat16) {
        store_four(static_cast<__nv_bfloat16*>(to) + at, v);
    } else {
        store_four(static_cast<float*>(to) + at, v);
    }
}

EXL3_INLINE float rounded_as(int type, float v) {
    if (type == kHalf) return __half2float(__float2half_rn(v));
    if (type == kBFloat16) return __bfloat162float(__float2bfloat16_rn(v));
    return v;
}

// Rotates four neighbouring inputs per lane of one row's block of 128 and stores them as B fragments of the unit.
EXL3_INLINE void rotate_into(uint32_t* unit, int row_groups, int row, const __half* suh, float (&v)[4]) {
    const int lane = threadIdx.x % 32;
    float scale[4];
    load_four(suh + lane * 4, scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = __half2float(__float2half_rn(v[i] * scale[i]));
    hadamard(v);
    const int step = lane / 4, group = row / 8, reg = lane % 4 / 2, owner = row % 8 * 4 + lane % 2 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int at = row_groups == 1
                           ? (step * 32 + owner + i) * 2 + reg
                           : ((step * (row_groups / 2) + group / 2) * 32 + owner + i) * 4 + group % 2 * 2 + reg;
        unit[at] = bits_of(__floats2half2_rn(v[2 * i], v[2 * i + 1]));
    }
}

template <int kRowGroups>
cudaError_t launch_experts(const ExpertsArgs& args, bool overlap, cudaStream_t stream);

}  // namespace exl3
