// The tile encoder: for each tile of 256 values, the closed trellis walk that two Viterbi passes find.
//
// With K new bits per step there are E = 2^(16-K) nodes and R = 2^K branches; state c E + e arrives at node e by branch
// c from node (c E + e) >> K. A thread block serves one tile. Each of its threads keeps the values of 128 states in
// registers for all 256 steps, as `kUnits` rectangles of consecutive nodes by branches: the nodes of a rectangle share
// their sources, so one cost is read per branch. Above 16 branches lanes share a rectangle's nodes and exchange minima.
//
// A step keeps no branches, only the least costs, and writes them to global memory: finding the minimum without its
// index is cheaper, and the trace back needs the branch of one node per step, which it finds again from the costs.
// Errors and costs are float32: a subtraction, then one fused multiply-add. Of equal costs the smallest branch wins.
// No cost is negative, so costs order as the integers of the same bits, and Hopper takes the least of three integers at
// once.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kSteps = 256, kHalf = kSteps / 2, kRows = kSteps + 1;
constexpr int kStates = 1 << 16;
constexpr int kThreads = 512;
constexpr unsigned kWarp = 0xFFFFFFFFu;

__host__ __device__ constexpr int least(int a, int b) { return a < b ? a : b; }

struct Tiles {
    const float* targets;  // [count, 256]
    const __half* values;  // [65536]
    float* history;        // [count, 257, E]: row t holds the costs before step t
    int* nodes;            // [count]: the node that positions 255 and 0 share
    int* states;           // [count, 256]
};

// The first pass starts at position 128 with every node free, the second at position 0 from the shared node.
enum Pass { kFree, kClosed };

template <Pass kPass>
__device__ __forceinline__ int position(int step) { return kPass == kFree ? (step + kHalf) % kSteps : step; }

// The first row that the trace back of a pass reads: the free pass is traced to position 0 alone.
__host__ __device__ constexpr int first_row(Pass pass) { return pass == kFree ? kHalf : 0; }

__device__ __forceinline__ float extend(float cost, float value, float target) {
    const float error = __fsub_rn(value, target);
    return __fmaf_rn(error, error, cost);
}

__device__ __forceinline__ float least_of(float a, float b, float c) {
    return __int_as_float(__vimin3_s32(__float_as_int(a), __float_as_int(b), __float_as_int(c)));
}

// Makes the compiler take a pair for new in every step. It would otherwise convert many to float32 once, before the
// loop, and run out of registers.
__device__ __forceinline__ void renew(__half2& pair) { asm volatile("" : "+r"(reinterpret_cast<uint32_t&>(pair))); }

template <int kBits>
struct Shape {
    static constexpr int kNodes = kStates >> kBits, kBranches = 1 << kBits;
    static constexpr int kOwnNodes = least(kBranches, 8), kOwnBranches = least(kBranches, 16);
    static constexpr int kParts = kBranches / kOwnBranches;  // lanes that share a rectangle's nodes
    static constexpr int kUnits = kStates / kThreads / (kOwnNodes * kOwnBranches);
    static constexpr int kKept = kOwnNodes < kParts ? 1 : kOwnNodes / kParts;  // nodes of a lane after the exchange
    static constexpr bool kInShared = kBits >= 2;  // two rows of costs; at K = 1 they are read back from global memory
    static constexpr int kSharedBytes = kInShared ? 2 * kNodes * 4 : 0;
};

template <int kCount>
__device__ __forceinline__ void store(float* to, const float* from) {
    if constexpr (kCount == 8) {
        store<4>(to, from), store<4>(to + 4, from + 4);
    } else if constexpr (kCount == 4) {
        *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
    } else if constexpr (kCount == 2) {
        *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
    } else {
        *to = *from;
    }
}

// Leaves the minima over the lanes that share the nodes in costs[0..kKept-1] and returns the offset of the first.
template <int kBits>
__device__ __forceinline__ int exchange(float (&costs)[Shape<kBits>::kOwnNodes]) {
    using S = Shape<kBits>;
    int first = 0;
#pragma unroll
    for (int round = 0; (1 << round) < S::kParts; ++round) {
        const int distance = 1 << round, half = S::kOwnNodes >> (round + 1);
        const bool upper = threadIdx.x & distance;
        if (half == 0) costs[0] = fminf(costs[0], __shfl_xor_sync(kWarp, costs[0], distance));
#pragma unroll
        for (int j = 0; j < half; ++j) {
            const float given = upper ? costs[j] : costs[j + half], kept = upper ? costs[j + half] : costs[j];
            costs[j] = fminf(kept, __shfl_xor_sync(kWarp, given, distance));
        }
        first += upper ? half : 0;
    }
    return first;
}

template <int kBits, Pass kPass>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const Tiles tiles) {
    using S = Shape<kBits>;
    constexpr int kKeptFrom = S::kInShared ? first_row(kPass) : 0;
    constexpr int kStride = S::kNodes >> kBits;  // between the sources that a node has in successive branches
    extern __shared__ float4 buffer[];
    float* const costs = reinterpret_cast<float*>(buffer);
    __shared__ float targets[kSteps];
    const int part = threadIdx.x % S::kParts;
    float* const history = tiles.history + static_cast<int64_t>(blockIdx.x) * kRows * S::kNodes;
    const auto first_node = [&](int unit) { return (unit * kThreads + threadIdx.x) / S::kParts * S::kOwnNodes; };
    const auto branch = [&](int i) { return i * S::kParts + part; };

    __half2 values[S::kUnits][S::kOwnBranches][S::kOwnNodes / 2];
#pragma unroll
    for (int unit = 0; unit < S::kUnits; ++unit) {
#pragma unroll
        for (int i = 0; i < S::kOwnBranches; ++i) {
            const __half* const first = tiles.values + branch(i) * S::kNodes + first_node(unit);
#pragma unroll
            for (int j = 0; j < S::kOwnNodes / 2; ++j) values[unit][i][j] = reinterpret_cast<const __half2*>(first)[j];
        }
    }
    for (int step = threadIdx.x; step < kSteps; step += kThreads)
        targets[step] = tiles.targets[static_cast<int64_t>(blockIdx.x) * kSteps + position<kPass>(step)];
    const int start = kPass == kFree ? 0 : tiles.nodes[blockIdx.x];
    for (int node = threadIdx.x; node < S::kNodes; node += kThreads) {
        const float cost = kPass == kFree || node == start ? 0.0f : __int_as_float(0x7F800000);
        if (S::kInShared) costs[node] = cost;
        if (kKeptFrom == 0) history[node] = cost;
    }
    __syncthreads();

    for (int step = 0; step < kSteps; ++step) {
        float* const row = history + static_cast<int64_t>(step + 1) * S::kNodes;
        const float* const from = S::kInShared ? costs + step % 2 * S::kNodes : row - S::kNodes;
        float* const to = costs + (step + 1) % 2 * S::kNodes;
        const float target = targets[step];
#pragma unroll
        for (int unit = 0; unit < S::kUnits; ++unit) {
            float best[S::kOwnNodes];
#pragma unroll
            for (int i = 0; i < S::kOwnBranches; i += 2) {
                const float* const source = from + (first_node(unit) >> kBits);
                const float cost = source[branch(i) * kStride], next_cost = source[branch(i + 1) * kStride];
#pragma unroll
                for (int j = 0; j < S::kOwnNodes; j += 2) {
                    renew(values[unit][i][j / 2]), renew(values[unit][i + 1][j / 2]);
                    const float2 value = __half22float2(values[unit][i][j / 2]);
                    const float2 next = __half22float2(values[unit][i + 1][j / 2]);
                    const float even = extend(cost, value.x, target), even_next = extend(next_cost, next.x, target);
                    const float odd = extend(cost, value.y, target), odd_next = extend(next_cost, next.y, target);
                    best[j] = i == 0 ? fminf(even, even_next) : least_of(best[j], even, even_next);
                    best[j + 1] = i == 0 ? fminf(odd, odd_next) : least_of(best[j + 1], odd, odd_next);
                }
            }
            const int node = first_node(unit) + exchange<kBits>(best);
            if (S::kParts > S::kOwnNodes && part >= S::kOwnNodes) continue;
            if (S::kInShared) store<S::kKept>(to + node, best);
            if (step + 1 >= kKeptFrom) store<S::kKept>(row + node, best);
        }
        __syncthreads();
    }
}

// The least key of a warp and, of the lanes that hold it, the least index: in every lane.
__device__ __forceinline__ int index_of_least(float cost, int index) {
    // Costs are not negative, so their bit patterns order as they do.
    const unsigned key = __float_as_uint(cost);
    const unsigned lowest = __reduce_min_sync(kWarp, key);
    return static_cast<int>(__reduce_min_sync(kWarp, key == lowest ? static_cast<unsigned>(index) : kWarp));
}

// One warp walks one tile back from its end node.
template <Pass kPass>
__global__ void __launch_bounds__(32) trace_kernel(const Tiles tiles, int bits) {
    const int lane = threadIdx.x, nodes = kStates >> bits, branches = 1 << bits;
    const int64_t tile = blockIdx.x;
    const float* const history = tiles.history + tile * kRows * nodes;
    int node = 0;
    if constexpr (kPass == kFree) {
        const float* const last = history + static_cast<int64_t>(kSteps) * nodes;
        float best = last[lane];
        int index = lane;
#pragma unroll 8
        for (int at = lane + 32; at < nodes; at += 32) {
            const float cost = last[at];
            if (cost < best) best = cost, index = at;
        }
        node = index_of_least(best, index);
    } else {
        node = tiles.nodes[tile];
    }
    for (int step = kSteps - 1; step >= first_row(kPass); --step) {
        const float* const row = history + static_cast<int64_t>(step) * nodes;
        const float target = tiles.targets[tile * kSteps + position<kPass>(step)];
        float best = __int_as_float(0x7F800000);
        int index = kStates;
        for (int c = lane; c < branches; c += 32) {
            const int state = c * nodes + node;
            const float cost = extend(row[state >> bits], __half2float(tiles.values[state]), target);
            if (cost < best) best = cost, index = c;
        }
        const int state = index_of_least(best, index) * nodes + node;
        if (kPass == kClosed && lane == 0) tiles.states[tile * kSteps + step] = state;
        node = state >> bits;
    }
    if (kPass == kFree && lane == 0) tiles.nodes[tile] = node;
}

template <int kBits, Pass kPass>
cudaError_t run_pass(const Tiles& tiles, int count, cudaStream_t stream) {
    constexpr int bytes = Shape<kBits>::kSharedBytes;
    const auto kernel = forward_kernel<kBits, kPass>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    kernel<<<count, kThreads, bytes, stream>>>(tiles);
    trace_kernel<kPass><<<count, 32, 0, stream>>>(tiles, kBits);
    return cudaGetLastError();
}

template <int kBits>
cudaError_t encode(const Tiles& tiles, int count, cudaStream_t stream) {
    const cudaError_t error = run_pass<kBits, kFree>(tiles, count, stream);
    return error == cudaSuccess ? run_pass<kBits, kClosed>(tiles, count, stream) : error;
}

}  // namespace

extern "C" int exl3_encode(const void* targets, const void* values, void* history, void* nodes, void* states, int count,
                           int bits, void* stream) {
    const Tiles tiles{static_cast<const float*>(targets), static_cast<const __half*>(values),
                      static_cast<float*>(history), static_cast<int*>(nodes), static_cast<int*>(states)};
    switch (bits) {
#define EXL3_CASE(K) \
    case K: return encode<K>(tiles, count, static_cast<cudaStream_t>(stream));
        EXL3_CASE(1) EXL3_CASE(2) EXL3_CASE(3) EXL3_CASE(4) EXL3_CASE(5) EXL3_CASE(6) EXL3_CASE(7) EXL3_CASE(8)
#undef EXL3_CASE
        default: return cudaErrorInvalidValue;
    }
}
