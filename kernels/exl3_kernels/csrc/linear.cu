// The entry points of the decode GEMM, and the two small kernels around it: rotate the input, fold the segments.
#include "transform.cuh"

namespace exl3 {
namespace {

// Writes RN16(((RN16(x suh)) H)): if `wide` as the wide GEMM keeps it in shared memory, per 64 inputs one 128-byte line
// per row, 16-byte chunks swizzled by the row; else in the order in which the GEMM's lanes read B fragments: for each
// k16 step and pair of row groups, 32 lanes times two groups times two registers (one group: two registers). Rows up to
// the last group's end are 0.
template <typename In, int kRows>
__global__ void rotate_kernel(const In* x, int64_t row_stride, const __half* suh, uint32_t* rotated, int rows,
                              int row_groups, bool wide, int k) {
    let_next_start();
    const int warp = (blockIdx.x * kRowThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int blocks = k / kBlock;
    const int first_row = warp / blocks * kRows, block = warp % blocks;
    const int last_row = min(first_row + kRows, 8 * row_groups);
    if (first_row >= last_row) return;
    const int column = block * kBlock + lane * 4;
    float scale[4], v[kRows][4] = {};
    load_four(suh + column, scale);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
        if (first_row + r < rows) load_four(x + (first_row + r) * row_stride + column, v[r]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int row = first_row + r;
        if (row >= last_row) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) v[r][i] = __half2float(__float2half_rn(v[r][i] * scale[i]));
        hadamard(v[r]);
        if (wide) {
            const int64_t line = (static_cast<int64_t>(block) * 2 + lane / 16) * 8 * row_groups + row;
            const int byte = lane % 16 * 8 ^ row % 8 * 16;
            store_four(reinterpret_cast<__half*>(rotated) + line * 64 + byte / 2, v[r]);
        } else {
            const int step = block * kSteps + lane / 4, group = row / 8;
            const int reg = lane % 4 / 2;
            const int owner = row % 8 * 4 + lane % 2 * 2;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int64_t at =
                    row_groups == 1
                        ? (step * 32 + owner + i) * 2 + reg
                        : ((static_cast<int64_t>(step) * (row_groups / 2) + group / 2) * 32 + owner + i) * 4 +
                              group % 2 * 2 + reg;
                rotated[at] = bits_of(__floats2half2_rn(v[r][2 * i], v[r][2 * i + 1]));
            }
        }
    }
}

// Adds a block's segments in order and finishes the row.
template <typename Out, typename Bias, int kRows>
__global__ void fold_kernel(const float* partial, const __half* svh, const Bias* bias, Out* y, int64_t row_stride,
                            int rows, Plan plan) {
    const int warp = (blockIdx.x * kRowThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int first_row = warp / plan.blocks * kRows, block = warp % plan.blocks;
    if (first_row >= rows) return;
    const int unit = block / plan.width * plan.units_per_block;
    const int last = plan.team_of(unit + plan.units_per_block - 1);
    float v[kRows][4] = {};
    wait_for_rotation();
    for (int team = plan.team_of(unit); team <= last; ++team) {
        const int64_t slot_row = static_cast<int64_t>(plan.slot(team, block)) * rows + first_row;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (first_row + r >= rows) break;
            const float4 part = __ldcg(reinterpret_cast<const float4*>(partial + (slot_row + r) * kBlock + lane * 4));
            v[r][0] += part.x, v[r][1] += part.y, v[r][2] += part.z, v[r][3] += part.w;
        }
    }
    const int column = block * kBlock + lane * 4;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
        if (first_row + r < rows) finish(v[r], svh, bias, y + (first_row + r) * row_stride + column, column);
}

cudaError_t dispatch_bits(int bits, const GemmArgs& args, const Call& call) {
    switch (bits) {
#define EXL3_CASE(K) \
    case K: return args.plan.width == kTeam ? launch_wide<K>(args, call) : launch_gemm<K>(args, call);
        EXL3_CASE(1) EXL3_CASE(2) EXL3_CASE(3) EXL3_CASE(4) EXL3_CASE(5) EXL3_CASE(6) EXL3_CASE(7) EXL3_CASE(8)
#undef EXL3_CASE
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace
}  // namespace exl3

using namespace exl3;

extern "C" {

const char* exl3_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

int exl3_rotate(const void* x, int x_type, int64_t row_stride, const void* suh, void* rotated, int rows, int row_groups,
                int wide, int k, void* stream) {
    return with_type(x_type, [&](auto* in) {
        using In = std::remove_pointer_t<decltype(in)>;
        const int64_t padded_rows = 8 * row_groups, blocks = k / kBlock;
        return with_rows_per_warp(padded_rows * blocks, [&](auto per_warp) {
            constexpr int kRows = decltype(per_warp)::value;
            return launch(rotate_kernel<In, kRows>, dim3(warps_to_blocks((padded_rows + kRows - 1) / kRows * blocks)),
                          kRowThreads, 0, false, static_cast<cudaStream_t>(stream), static_cast<const In*>(x),
                          row_stride, static_cast<const __half*>(suh), static_cast<uint32_t*>(rotated), rows,
                          row_groups, wide != 0, k);
        });
    });
}

// Width 1 is the decode GEMM, 1 to 16 row groups (a power of two); width 2 the wide one, 8, 16, 24 or 32.
int exl3_gemm(const void* trellis, const void* rotated, void* partial, int rows, int row_groups, int k, int n, int bits,
              int codebook, int teams, int width, int overlap, void* stream) {
    GemmArgs args;
    args.trellis = static_cast<const uint8_t*>(trellis);
    args.rotated = static_cast<const uint8_t*>(rotated);
    args.partial = static_cast<float*>(partial);
    args.rows = rows;
    args.plan = Plan{n / kBlock, k / kBlock, teams, width};
    if (!args.plan.fits()) return cudaErrorInvalidValue;
    return dispatch_bits(bits, args, Call{row_groups, codebook, overlap != 0, static_cast<cudaStream_t>(stream)});
}

int exl3_fold(const void* partial, const void* svh, const void* bias, int bias_type, void* y, int y_type,
              int64_t row_stride, int rows, int k, int n, int teams, int width, int overlap, void* stream) {
    return with_type(y_type, [&](auto* out) {
        return with_type(bias_type, [&](auto* added) {
            using Out = std::remove_pointer_t<decltype(out)>;
            using Bias = std::remove_pointer_t<decltype(added)>;
            const Plan plan{n / kBlock, k / kBlock, teams, width};
            return with_rows_per_warp(static_cast<int64_t>(rows) * plan.blocks, [&](auto per_warp) {
                constexpr int kRows = decltype(per_warp)::value;
                const int64_t warps = static_cast<int64_t>((rows + kRows - 1) / kRows) * plan.blocks;
                return launch(fold_kernel<Out, Bias, kRows>, dim3(warps_to_blocks(warps)), kRowThreads, 0, overlap != 0,
                              static_cast<cudaStream_t>(stream), static_cast<const float*>(partial),
                              static_cast<const __half*>(svh), static_cast<const Bias*>(bias), static_cast<Out*>(y),
                              row_stride, rows, plan);
            });
        });
    });
}

}  // extern "C"
