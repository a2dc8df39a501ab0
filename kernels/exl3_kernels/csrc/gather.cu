// Rows of an int8 table, dequantized as they are gathered: RN(RN32(code * scale)) in the output's type.
#include "transform.cuh"

namespace exl3 {
namespace {

constexpr int kGatherThreads = 256;
constexpr int kVector = 4;

// One thread per kCount consecutive columns. A negative id counts from the table's end; one outside the table stops the
// kernel, as torch's own indexing does.
template <int kCount, typename Id, typename Out>
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const int8_t* codes, const float* scales, const Id* ids,
                                                                Out* out, int64_t items, int table_rows, int width) {
    const int64_t item = static_cast<int64_t>(blockIdx.x) * kGatherThreads + threadIdx.x;
    if (item >= items) return;
    const int chunks = width / kCount;
    const int64_t row = item / chunks, column = item % chunks * kCount;
    int64_t id = ids[row];
    if (id < 0) id += table_rows;
    if (id < 0 || id >= table_rows) __trap();
    const int8_t* from = codes + id * width + column;
    Out* to = out + row * width + column;
    const float scale = scales[id];
    if constexpr (kCount == kVector) {
        const char4 four = *reinterpret_cast<const char4*>(from);
        store_four(to, {four.x * scale, four.y * scale, four.z * scale, four.w * scale});
    } else {
        round_to(*to, *from * scale);
    }
}

template <typename Id, typename Out>
cudaError_t gather(const void* codes, const void* scales, const void* ids, Out* out, int64_t count, int table_rows,
                   int width, cudaStream_t stream) {
    const bool vectors = width % kVector == 0;
    const int64_t items = count * (vectors ? width / kVector : width);
    const auto kernel = vectors ? gather_kernel<kVector, Id, Out> : gather_kernel<1, Id, Out>;
    kernel<<<static_cast<unsigned>((items + kGatherThreads - 1) / kGatherThreads), kGatherThreads, 0, stream>>>(
        static_cast<const int8_t*>(codes), static_cast<const float*>(scales), static_cast<const Id*>(ids), out, items,
        table_rows, width);
    return cudaGetLastError();
}

}  // namespace
}  // namespace exl3

using namespace exl3;

extern "C" int exl3_gather(const void* codes, const void* scales, const void* ids, int wide_ids, void* out,
                           int out_type, int64_t count, int table_rows, int width, void* stream) {
    return with_type(out_type, [&](auto* type) {
        auto* const rows = static_cast<decltype(type)>(out);
        const auto on = static_cast<cudaStream_t>(stream);
        return wide_ids ? gather<int64_t>(codes, scales, ids, rows, count, table_rows, width, on)
                        : gather<int>(codes, scales, ids, rows, count, table_rows, width, on);
    });
}
