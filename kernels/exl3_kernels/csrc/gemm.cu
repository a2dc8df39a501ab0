// The instantiations of the decode GEMM for one K (EXL3_BITS).
#include <algorithm>
#include <atomic>

#include "launch.h"

namespace exl3 {
namespace {

template <int kCodebook, int kRowGroups, int kWarps, int kStages, int kResident>
cudaError_t launch_one(const GemmArgs& args, const Call& call) {
    using G = Gemm<EXL3_BITS, kCodebook, kRowGroups, kWarps, kStages>;
    const auto kernel = gemm_kernel<EXL3_BITS, kCodebook, kRowGroups, kWarps, kStages, kResident>;
    static std::atomic<unsigned long long> prepared{0};  // bit d: device d allows this kernel all its shared memory
    Device device;
    cudaError_t error = query(device);
    if (error != cudaSuccess) return error;
    if (!(prepared.load() >> device.number & 1)) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_per_block);
        if (error != cudaSuccess) return error;
        prepared.fetch_or(1ull << device.number);
    }
    const int shared = std::max(G::kSharedBytes, device.shared_that_spreads(args.plan.teams));
    return launch(kernel, dim3(args.plan.teams), G::kThreads, shared, call.overlap, call.stream, args);
}

template <int kCodebook>
cudaError_t launch_shape(const GemmArgs& args, const Call& call) {
#define EXL3_TRY(R, W, S, B)                        \
    if constexpr (kCodebook != kProbe || R == 1)    \
        if (call.row_groups == R) return launch_one<kCodebook, R, W, S, B>(args, call);
    EXL3_SHAPES(EXL3_TRY)
#undef EXL3_TRY
    return cudaErrorInvalidConfiguration;
}

}  // namespace

template <>
cudaError_t launch_gemm<EXL3_BITS>(const GemmArgs& args, const Call& call) {
    switch (call.codebook) {
        case kThreeInst: return launch_shape<kThreeInst>(args, call);
        case kMcg: return launch_shape<kMcg>(args, call);
        case kMul1: return launch_shape<kMul1>(args, call);
        case kProbe: return launch_shape<kProbe>(args, call);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace exl3
