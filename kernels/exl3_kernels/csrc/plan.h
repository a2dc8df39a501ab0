// How one product is cut into work: shared by host and device, and a function of the weight's shape alone.
//
// A unit is 128 inputs of `width` neighbouring 128-column blocks. Units are numbered with the inputs fastest and dealt
// to teams of `width` thread blocks in equal contiguous runs, a column block to each member. Where a run or a column
// block ends, a *segment* ends: its fp32 sums form one chain of tensor-core products in ascending order of inputs. The
// fold adds a block's segments in the same order. No part of this depends on the number of rows, so neither do the bits
// of a row's result.
#pragma once

namespace exl3 {

constexpr int kBlock = 128;     // inputs of a unit, columns of a block, and the size of the Hadamard transform
constexpr int kSteps = 8;       // k16 steps in a unit

constexpr int kTeam = 2;        // thread blocks of a team of the wide GEMM

struct Plan {
    int blocks;           // column blocks
    int units_per_block;  // k / 128
    int teams;
    int width;

    __host__ __device__ int units() const { return (blocks + width - 1) / width * units_per_block; }
    __host__ __device__ int first_unit(int team) const { return static_cast<int>(unsigned(team) * units() / teams); }
    __host__ __device__ int team_of(int unit) const {
        return static_cast<int>((unsigned(unit + 1) * teams - 1) / units());
    }
    // Where a team's segment of a column block is kept: unique, ascending, with holes.
    __host__ __device__ int slot(int team, int block) const {
        return (team + block / width) * width + block % width;
    }
    // The products above are of 32 bits.
    bool fits() const {
        return static_cast<long long>((blocks + width - 1) / width) * units_per_block * teams < 1LL << 31;
    }
};

}  // namespace exl3
