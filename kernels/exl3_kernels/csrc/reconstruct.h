// The C++ boundary of reconstruction: entry point in prefill.cu, instantiations in reconstruct.cu, one unit per K.
#pragma once

#include "launch.h"

namespace exl3 {

// What is written for input i and output j, each time transposed: [columns, k], inputs contiguous.
//   kInner     float16, the codebook value itself.
//   kOriginal  float16, RN16((H W H)[i, j] suh[i] svh[j]), everything before the rounding in fp32.
//   kEightBit  E4M3, the same product with suh and svh scaled by norm[0] and norm[1].
//   kOutputs   float16, RN16((W H)[i, j] svh[j]): for rotated rows.
//   kInputs    float16, RN16((H W)[i, j] suh[i]): for rows as they are, whose sums are then rotated.
enum Kind { kInner = 0, kOriginal = 1, kEightBit = 2, kOutputs = 3, kInputs = 4 };

struct ReconstructArgs {
    const uint8_t* trellis;
    const __half* suh;  // from the first input
    const __half* svh;  // from the first column of the slice
    const float* norm;
    void* out;
    int first_block;  // of the slice, in blocks of 128 columns
    int blocks;       // of the matrix
    int k;
    bool overlap;  // kInner, kOutputs: start beside the rotation of the rows and end after it (sm_90 and later)
    Opaque opaque;
};

template <int kBits>
cudaError_t launch_reconstruct(const ReconstructArgs& args, int kind, int codebook, int slice_blocks,
                               cudaStream_t stream);

}  // namespace exl3
