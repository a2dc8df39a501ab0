// Eight 16 x 16 float16 tiles of a warp: Hadamard transforms on tensor cores, and their way through shared memory.
//
// The four stages inside a tile are a product with the 16 x 16 matrix of signs: operands are exact, sums are fp32. Two
// of the three stages among the tiles cost no more than further products: tiles are added and subtracted by
// accumulating products with the matrix and its negative. The last is fp32 butterflies.
#pragma once

#include "gemm.cuh"

namespace exl3 {

EXL3_INLINE void butterfly(float& a, float& b) {
    const float sum = a + b;
    b = a - b;
    a = sum;
}

// The 16 x 16 matrix of signs, -1 where row and column share an odd number of bits, and its negative: as A fragments,
// or [0], [2] and [1], [3] as the B fragments of its halves.
struct Signs {
    uint32_t of[2][4];

    EXL3_INLINE explicit Signs(int lane) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int row = lane / 4 + q % 2 * 8, column = lane % 4 * 2 + q / 2 * 8;
            const uint32_t low = __popc(row & column) & 1 ? 0xBC00u : 0x3C00u;
            const uint32_t high = __popc(row & (column + 1)) & 1 ? 0xBC00u : 0x3C00u;
            of[0][q] = low | high << 16;
            of[1][q] = of[0][q] ^ 0x80008000u;
        }
    }

    // Along the columns of A fragments: v[t] are columns 0-7 (`half` 0) or 8-15 of tile t.
    EXL3_INLINE void along_columns(const uint32_t (&a)[8][4], int half, float (&v)[8][4]) const {
        combine(v, [&](bool first, float(&d)[4], int t, const uint32_t(&sign)[4]) {
            multiply(first, d, a[t], sign[half], sign[half + 2]);
        });
    }

    // Along the rows of B fragments, which are then transformed among the tiles too: v[t] is tile t.
    EXL3_INLINE void along_rows(const uint32_t (&b)[8][2], float (&v)[8][4]) const {
        combine(v, [&](bool first, float(&d)[4], int t, const uint32_t(&sign)[4]) {
            multiply(first, d, sign, b[t][0], b[t][1]);
        });
    }

  private:
    template <typename Multiply>
    EXL3_INLINE void combine(float (&v)[8][4], Multiply multiply_tile) const {
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) multiply_tile(i == 0, v[t], t / 4 * 4 + i, of[(t & i & 1) ^ (t & i) / 2 % 2]);
#pragma unroll
        for (int t = 0; t < 4; ++t)
#pragma unroll
            for (int c = 0; c < 4; ++c) butterfly(v[t][c], v[t + 4][c]);
    }

    EXL3_INLINE static void multiply(bool first, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        if (first) {
            mma_first(d, a, b0, b1);
        } else {
            mma(d, a, b0, b1);
        }
    }
};

// float16 rows of kWidth inputs in shared memory, each padded by 16 bytes: the rows of a fragment, and a warp's wide
// accesses along one row, lie in different banks.
template <int kWidth>
struct Staged {
    static constexpr int kStride = kWidth + 8;
    static constexpr int kRowBytes = kStride * 2;
    __half* at;

    // Inputs i and i + 1 of a row.
    EXL3_INLINE void put(int row, int i, uint32_t pair) const {
        *reinterpret_cast<uint32_t*>(at + row * kStride + i) = pair;
    }

    // Fragments of sixteen rows and eight inputs in two tiles, neighbours along the inputs or along the rows.
    template <bool kAlongInputs>
    EXL3_INLINE void put_tiles(int row, int i, const uint32_t (&pairs)[4]) const {
        constexpr int kDown = kAlongInputs ? 0 : 16, kRight = kAlongInputs ? 16 : 0;
        const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
        const __half* to = at + (row + lane % 16 + lane / 16 * kDown) * kStride + i + lane / 16 * kRight;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                     "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                     : "memory");
#else
#pragma unroll
        for (int q = 0; q < 4; ++q)
            put(row + q % 2 * 8 + lane / 4 + q / 2 * kDown, i + lane % 4 * 2 + q / 2 * kRight, pairs[q]);
#endif
    }
};

// In one instruction: left to itself, the compiler splits stores through a pointer that advances by a stride.
EXL3_INLINE void store_wide(void* to, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

}  // namespace exl3
