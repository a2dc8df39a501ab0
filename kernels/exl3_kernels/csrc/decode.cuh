// From packed words to tensor-core fragments: the states of a tile, eight per lane, and the three codebooks.
//
// A 16x16 tile is 8K 32-bit words: one ring of 256K stream bits, most significant bit first in each word. Lane L of a
// warp owns positions 8L..8L+7, which end at stream byte K (L + 1). Their windows span 16 + 7K bits, so after one
// alignment they sit in `registers(K)` 32-bit registers, and position j is (7 - j) K bits above the bottom: a constant.
//
// Hopper issues one instruction per scheduler and clock, and shifts and logic only every second clock. Hence two
// habits below: constants come from kernel parameters where that lets one three-input LOP3 do the work of two, and
// windows that lie inside one register are moved to its top by a multiplication, which uses the other integer pipe.
#pragma once

#include <cstdint>
#include <cuda_fp16.h>

#define EXL3_INLINE __device__ __forceinline__

namespace exl3 {

// kProbe is no codebook: everything but the decoding, for measuring what the decoding costs.
enum Codebook { kThreeInst = 0, kMcg = 1, kMul1 = 2, kProbe = 3 };

constexpr uint32_t kThreeInstMultiplier = 89226354u;
constexpr uint32_t kThreeInstOffset = 64248484u;
constexpr uint32_t kMcgMultiplier = 0xCBAC1FEDu;
constexpr uint32_t kMul1Multiplier = 0x83DCD12Du;

// Numbers that the compiler must not see: see above.
struct Opaque {
    uint32_t halves_kept = 0x8FFF8FFFu;
    uint32_t halves_flipped = 0x3B603B60u;
    uint32_t power[16];  // power[s] = 2^s

    Opaque() {
        for (int s = 0; s < 16; ++s) power[s] = 1u << s;
    }
};

__host__ __device__ constexpr int words_per_tile(int bits) { return 8 * bits; }
__host__ __device__ constexpr int registers(int bits) { return (16 + 7 * bits + 31) / 32; }
__host__ __device__ constexpr int words_read(int bits) { return bits <= 4 ? 2 : 3; }

// Which words of a tile a lane reads, and how many low bits of the last one belong to the next lane.
template <int kBits>
struct LaneWords {
    int index[words_read(kBits)];  // index[0] holds the lane's last byte, index[1] is the word before it on the ring
    int drop;

    EXL3_INLINE explicit LaneWords(int lane) {
        const int end = kBits * (lane + 1);
        const int last = (end - 1) / 4;
        drop = 8 * (4 * (last + 1) - end);
#pragma unroll
        for (int q = 0; q < words_read(kBits); ++q)
            index[q] = (last - q + words_per_tile(kBits)) % words_per_tile(kBits);
    }
};

template <int kBits>
EXL3_INLINE void align(const uint32_t (&words)[words_read(kBits)], int drop, uint32_t (&v)[registers(kBits)]) {
#pragma unroll
    for (int q = 0; q < registers(kBits); ++q) {
        if constexpr (kBits % 4 == 0) {
            v[q] = words[q];
        } else {
            v[q] = q + 1 < words_read(kBits) ? __funnelshift_r(words[q], words[q + 1], drop) : words[q] >> drop;
        }
    }
}

// The state of one position, zero-extended.
template <int kBits, int kPosition>
EXL3_INLINE uint32_t state(const uint32_t (&v)[registers(kBits)], const Opaque& opaque) {
    constexpr int shift = (7 - kPosition) * kBits;
    constexpr int q = shift / 32, r = shift % 32;
    if constexpr (r == 0) {
        return v[q] & 0xFFFFu;
    } else if constexpr (r == 8) {
        return __byte_perm(v[q], 0, 0x4421);
    } else if constexpr (r < 16) {
        return (v[q] * opaque.power[16 - r]) >> 16;
    } else if constexpr (r == 16) {
        return v[q] >> 16;
    } else {
        return __funnelshift_r(v[q], v[q + 1], r) & 0xFFFFu;
    }
}

EXL3_INLINE uint32_t bits_of(__half2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }
EXL3_INLINE __half2 halves_of(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }

EXL3_INLINE __half sum_of_halves(uint32_t hashed, const Opaque& opaque) {
    const __half2 both = halves_of((hashed & opaque.halves_kept) ^ opaque.halves_flipped);
    return __hadd(__low2half(both), __high2half(both));
}

// Two states to two float16 weights, `first` in the low half.
template <int kCodebook>
EXL3_INLINE uint32_t weights(uint32_t first, uint32_t second, const Opaque& opaque) {
    if constexpr (kCodebook == kMul1) {
        const uint32_t low = __dp4a(first * kMul1Multiplier, 0x01010101u, 0x6400u);
        const uint32_t high = __dp4a(second * kMul1Multiplier, 0x01010101u, 0x6400u);
        const __half2 scale = __half2half2(__ushort_as_half(0x1EEE)), offset = __half2half2(__ushort_as_half(0xC931));
        return bits_of(__hfma2(halves_of(__byte_perm(low, high, 0x5410)), scale, offset));
    } else if constexpr (kCodebook == kMcg) {
        return bits_of(__halves2half2(sum_of_halves(first * kMcgMultiplier, opaque),
                                      sum_of_halves(second * kMcgMultiplier, opaque)));
    } else {
        return bits_of(__halves2half2(sum_of_halves(first * kThreeInstMultiplier + kThreeInstOffset, opaque),
                                      sum_of_halves(second * kThreeInstMultiplier + kThreeInstOffset, opaque)));
    }
}

// The lane's eight weights as the A fragment of m16n8k16 whose rows are the tile's output columns.
template <int kBits, int kCodebook>
EXL3_INLINE void decode(const uint32_t (&words)[words_read(kBits)], int drop, const Opaque& opaque, uint32_t (&a)[4]) {
    uint32_t v[registers(kBits)];
    align<kBits>(words, drop, v);
    if constexpr (kCodebook == kProbe) {
#pragma unroll
        for (int q = 0; q < 4; ++q) a[q] = v[q % registers(kBits)] & 0x3FFF3FFFu;
    } else {
        a[0] = weights<kCodebook>(state<kBits, 0>(v, opaque), state<kBits, 1>(v, opaque), opaque);
        a[2] = weights<kCodebook>(state<kBits, 2>(v, opaque), state<kBits, 3>(v, opaque), opaque);
        a[1] = weights<kCodebook>(state<kBits, 4>(v, opaque), state<kBits, 5>(v, opaque), opaque);
        a[3] = weights<kCodebook>(state<kBits, 6>(v, opaque), state<kBits, 7>(v, opaque), opaque);
    }
}

}  // namespace exl3
