// How one product is cut into work: shared by host and device, and a function of the weight's shape alone.
//
// A unit is 128 inputs of one 128-column block. Units are numbered with the inputs fastest and dealt to `ctas` thread
// blocks in equal contiguous runs. Where a run or a column block ends, a *segment* ends: its fp32 sums form one chain
// of tensor-core products in ascending order of inputs. The fold adds a block's segments in the same order. No part of
// this depends on the number of rows, so neither do the bits of a row's result.
#pragma once

namespace exl3 {

constexpr int kBlock = 128;     // inputs of a unit, columns of a block, and the size of the Hadamard transform
constexpr int kSteps = 8;       // k16 steps in a unit
constexpr int kGroupRows = 128; // most rows that share one decoded fragment

struct Plan {
    int blocks;           // column blocks
    int units_per_block;  // k / 128
    int ctas;

    __host__ __device__ long long units() const { return static_cast<long long>(blocks) * units_per_block; }
    __host__ __device__ int first_unit(int cta) const { return static_cast<int>(cta * units() / ctas); }
    __host__ __device__ int cta_of(int unit) const {
        return static_cast<int>(((unit + 1LL) * ctas - 1) / units());
    }
    // Segments are numbered by cta + block: unique, ascending, with holes.
    __host__ __device__ int slots() const { return ctas + blocks; }
};

}  // namespace exl3
