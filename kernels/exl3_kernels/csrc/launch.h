// The C++ boundary between the entry points and the instantiations, one translation unit per K.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "gemm.cuh"

namespace exl3 {

// Shapes of the GEMM kernel: rows in groups of eight, warps that share a column block, copies in flight, and the thread
// blocks whose registers a multiprocessor must have room for.
#define EXL3_SHAPES(X) \
    X(1, 4, 3, 8)      \
    X(2, 4, 4, 6)      \
    X(4, 4, 4, 4)      \
    X(8, 4, 3, 2)      \
    X(16, 4, 2, 2)

struct Call {
    int row_groups, codebook;
    bool overlap;  // start before the previous kernel has ended (sm_90 and later)
    cudaStream_t stream;
};

struct Device {
    int number = 0, multiprocessors = 0, shared_per_multiprocessor = 0, shared_per_block = 0, shared_reserved = 0;

    // Dynamic shared memory of a thread block such that no multiprocessor holds more than its equal share of `ctas`. A
    // kernel that starts while another still runs is otherwise packed onto the multiprocessors that are free first.
    int shared_that_spreads(int ctas) const {
        const int share = (ctas + multiprocessors - 1) / multiprocessors;
        const int bytes = shared_per_multiprocessor / (share + 1) - shared_reserved + 128;
        return std::min(bytes / 128 * 128, shared_per_block);
    }
};

inline cudaError_t query(Device& device) {
    cudaError_t error = cudaGetDevice(&device.number);
    const auto read = [&](int& value, cudaDeviceAttr attribute) {
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device.number);
    };
    read(device.multiprocessors, cudaDevAttrMultiProcessorCount);
    read(device.shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    read(device.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    read(device.shared_reserved, cudaDevAttrReservedSharedMemoryPerBlock);
    return error;
}

template <int kBits>
cudaError_t launch_gemm(const GemmArgs& args, const Call& call);

// Rows in 8, 16, 24 or 32 groups of eight; Hopper only.
template <int kBits>
cudaError_t launch_wide(const GemmArgs& args, const Call& call);

template <typename... Params, typename... Args>
cudaError_t launch_clusters(int cluster, void (*kernel)(Params...), dim3 grid, int threads, int shared, bool overlap,
                            cudaStream_t stream, Args&&... args) {
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
    if (overlap) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs].val.clusterDim.x = cluster;
        attributes[config.numAttrs].val.clusterDim.y = 1;
        attributes[config.numAttrs++].val.clusterDim.z = 1;
    }
    return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, int threads, int shared, bool overlap, cudaStream_t stream,
                   Args&&... args) {
    return launch_clusters(1, kernel, grid, threads, shared, overlap, stream, std::forward<Args>(args)...);
}

}  // namespace exl3
