// The entry points of the decode GEMM, and the two small kernels around it: rotate the input, fold the segments.
#include "transform.cuh"

namespace exl3 {
namespace {

// Writes RN16(((RN16(x suh)) H)): row-major if `row_groups` is 0; above 16 as the wide GEMM keeps it in shared memory,
// per 64 inputs one 128-byte line per row, 16-byte chunks swizzled by the row; else in the order in which the GEMM's
// lanes read B fragments: for each k16 step and pair of row groups, 32 lanes times two groups times two registers (one
// group: two registers). Rows up to the last group's end are 0.
template <typename In>
__global__ void rotate_kernel(const In* x, int64_t row_stride, const __half* suh, uint32_t* rotated, int rows,
                              int row_groups, int k) {
    let_next_start();
    const int warp = (blockIdx.x * kRowThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int blocks = k / kBlock;
    const int row = warp / blocks, block = warp % blocks;
    if (row >= (row_groups ? 8 * row_groups : rows)) return;
    float v[4] = {};
    if (row < rows) {
        const int at = block * kBlock + lane * 4;
        float scale[4];
        load_four(suh + at, scale);
        load_four(x + row * row_stride + at, v);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = __half2float(__float2half_rn(v[i] * scale[i]));
        hadamard(v);
    }
    if (row_groups == 0) {
        store_four(reinterpret_cast<__half*>(rotated) + static_cast<int64_t>(row) * k + block * kBlock + lane * 4, v);
        return;
    }
    if (row_groups > 16) {
        const int64_t line = (static_cast<int64_t>(block) * 2 + lane / 16) * 8 * row_groups + row;
        const int byte = lane % 16 * 8 ^ row % 8 * 16;
        store_four(reinterpret_cast<__half*>(rotated) + line * 64 + byte / 2, v);
        return;
    }
    const int step = block * kSteps + lane / 4, group = row / 8;
    const int reg = lane % 4 / 2;
    const int owner = row % 8 * 4 + lane % 2 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int64_t at = row_groups == 1
                               ? (step * 32 + owner + i) * 2 + reg
                               : ((static_cast<int64_t>(step) * (row_groups / 2) + group / 2) * 32 + owner + i) * 4 +
                                     group % 2 * 2 + reg;
        rotated[at] = bits_of(__floats2half2_rn(v[2 * i], v[2 * i + 1]));
    }
}

// Adds a block's segments in order and finishes the row.
template <typename Out, typename Bias>
__global__ void fold_kernel(const float* partial, const __half* svh, const Bias* bias, Out* y, int64_t row_stride,
                            int rows, Plan plan) {
    wait_for_rotation();
    const int warp = (blockIdx.x * kRowThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int row = warp / plan.blocks, block = warp % plan.blocks;
    if (row >= rows) return;
    const int first = plan.cta_of(block * plan.units_per_block);
    const int last = plan.cta_of((block + 1) * plan.units_per_block - 1);
    float v[4] = {};
    for (int cta = first; cta <= last; ++cta) {
        const int64_t at = (static_cast<int64_t>(cta + block) * rows + row) * kBlock + lane * 4;
        const float4 part = __ldcg(reinterpret_cast<const float4*>(partial + at));
        v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
    }
    const int column = block * kBlock + lane * 4;
    finish(v, svh, bias, y + row * row_stride + column, column);
}

cudaError_t dispatch_bits(int bits, const GemmArgs& args, const Call& call) {
    switch (bits) {
#define EXL3_CASE(K) \
    case K: return call.row_groups > 16 ? launch_wide<K>(args, call) : launch_gemm<K>(args, call);
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
                int k, void* stream) {
    return with_type(x_type, [&](auto* in) {
        using In = std::remove_pointer_t<decltype(in)>;
        const int64_t padded_rows = row_groups ? 8 * row_groups : rows;
        return launch(rotate_kernel<In>, dim3(warps_to_blocks(padded_rows * (k / kBlock))), kRowThreads, 0, false,
                      static_cast<cudaStream_t>(stream), static_cast<const In*>(x), row_stride,
                      static_cast<const __half*>(suh), static_cast<uint32_t*>(rotated), rows, row_groups, k);
    });
}

// 1 to 16 row groups (a power of two) select the decode GEMM, 24 or 32 the wide one.
int exl3_gemm(const void* trellis, const void* rotated, void* partial, int rows, int row_groups, int k, int n, int bits,
              int codebook, int ctas, int overlap, void* stream) {
    GemmArgs args;
    args.trellis = static_cast<const uint8_t*>(trellis);
    args.rotated = static_cast<const uint8_t*>(rotated);
    args.partial = static_cast<float*>(partial);
    args.rows = rows;
    args.plan = Plan{n / kBlock, k / kBlock, ctas};
    return dispatch_bits(bits, args, Call{row_groups, codebook, overlap != 0, static_cast<cudaStream_t>(stream)});
}

int exl3_fold(const void* partial, const void* svh, const void* bias, int bias_type, void* y, int y_type,
              int64_t row_stride, int rows, int k, int n, int ctas, int overlap, void* stream) {
    return with_type(y_type, [&](auto* out) {
        return with_type(bias_type, [&](auto* added) {
            using Out = std::remove_pointer_t<decltype(out)>;
            using Bias = std::remove_pointer_t<decltype(added)>;
            const Plan plan{n / kBlock, k / kBlock, ctas};
            return launch(fold_kernel<Out, Bias>, dim3(warps_to_blocks(static_cast<int64_t>(rows) * plan.blocks)),
                          kRowThreads, 0, overlap != 0, static_cast<cudaStream_t>(stream),
                          static_cast<const float*>(partial), static_cast<const __half*>(svh),
                          static_cast<const Bias*>(bias), static_cast<Out*>(y), row_stride, rows, plan);
        });
    });
}

}  // extern "C"
