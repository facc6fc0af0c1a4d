// Products of integers with x by the tensor cores for integers: a code becomes a byte in half of
// the instructions that it takes to become bfloat16, or less.
//
// x, scaled by its largest of 256 columns, is an integer of 16 bits, in two planes: its upper byte
// and its lower one. Its error is at most 2^-16 of that largest one. A token's planes are two
// columns of a product, so 8 columns are 4 tokens. Scales multiply sums of a group, of either
// plane. The number that codes count from, and the minimum, are multiplied with the sum of x over
// the group, for all groups of a record at once.
#pragma once

#include "linear/grouped.cuh"

namespace grouped {

constexpr int PLANE_COLUMNS = 256;  // with a scale of x in common
constexpr int LANE_COLUMNS = 16;    // that a lane converts
constexpr int PLANE_TOKENS = 4;     // of 8 columns of a product: their upper planes, then the lower

constexpr float LARGEST_OF_X = 32512.0f;  // its upper byte is 127

// Integers below 2^22 as floats: added to the bits of MIDDLE they are that float plus themselves.
constexpr int MIDDLE_BITS = 0x4b400000;
constexpr float MIDDLE = 12582912.0f;  // 3 * 2^22

// c [16, 8] = (starts ? start : c) + a @ b, of bytes without and with a sign: a [16, 32], of
// which a lane has four words, or [16, 16] with two.
template <int WORDS>
__device__ __forceinline__ void mma_bytes(int (&c)[4], const unsigned* a, const unsigned* b,
                                          bool starts, int start) {
    int from[4];
#pragma unroll
    for (int e = 0; e < 4; e++) from[e] = starts ? start : c[e];
    if constexpr (WORDS == 4)
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(from[0]),
              "r"(from[1]), "r"(from[2]), "r"(from[3]));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 "
            "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(from[0]), "r"(from[1]), "r"(from[2]),
              "r"(from[3]));
}

// c [16, 8] += a [16, 8] @ b [8, 8], of floats whose last 13 bits are not used.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// x's planes without their bytes, for the 8 columns of a product.
struct PlanesOfX {
    // [columns / PLANE_COLUMNS, 8]: of a plane's integers. Their product with MIDDLE is exact.
    float* factors;
    // [columns / GROUP, 8]: the sum of x. In the column of the upper plane are the leading bits
    // that mma_tf32 takes, in that of the lower one the others.
    float* sums;
};

// Converts 16 columns of a row, whose values are given as floats. All lanes of a warp call it, each
// half of which has PLANE_COLUMNS. `to` is the place of the upper plane, `lower` bytes before that
// of the lower one; `planes` are those of the half's first column, in the column of the upper
// plane.
//
// In each 16 columns of a plane lie 2p, 2p + 8, 2p + 1 and 2p + 9 next to each other, for p from 0
// to 3: the order of a record's codes.
template <class R>
__device__ __forceinline__ void convert(const float (&x)[LANE_COLUMNS], unsigned char* to,
                                        int lower, const PlanesOfX& planes) {
    constexpr int HALF = PLANE_COLUMNS / LANE_COLUMNS, LANES = R::GROUP / LANE_COLUMNS;
    const int lane = threadIdx.x % 32;
    float largest = 0.0f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        largest = fmaxf(largest, fabsf(x[i]));
        sum += x[i];
    }
#pragma unroll
    for (int mask = 1; mask < HALF; mask *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, mask));
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, mask);
    // fmaxf loses NaN; the sum has it, and infinity as well.
    const bool broken = __any_sync(FULL_WARP, !(fabsf(sum) < __uint_as_float(0x7f800000u)));
    // Of 22 bits: its product with MIDDLE is exact.
    const float inverse =
        __uint_as_float(__float_as_uint(largest * (1.0f / LARGEST_OF_X)) & 0xfffffffcu);
    const float scale = largest > 0.0f ? LARGEST_OF_X / largest : 0.0f;
    unsigned words[2][4];
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const int order[4] = {2 * p, 2 * p + 8, 2 * p + 1, 2 * p + 9};
        unsigned upper[4], whole[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            whole[i] = __float2int_rn(x[order[i]] * scale);
            upper[i] = (whole[i] + 128) >> 8;  // the lower byte has a sign as well
        }
        words[0][p] = __byte_perm(__byte_perm(upper[0], upper[1], 0x0040),
                                  __byte_perm(upper[2], upper[3], 0x0040), 0x5410);
        words[1][p] = __byte_perm(__byte_perm(whole[0], whole[1], 0x0040),
                                  __byte_perm(whole[2], whole[3], 0x0040), 0x5410);
    }
#pragma unroll
    for (int plane = 0; plane < 2; plane++)
        *reinterpret_cast<uint4*>(to + plane * lower) =
            make_uint4(words[plane][0], words[plane][1], words[plane][2], words[plane][3]);
    if (lane % LANES == 0) {
        float* const at = planes.sums + lane % HALF / LANES * 8;
        const float leading = __uint_as_float(__float_as_uint(sum) & 0xffffe000u);
        at[0] = leading;
        at[PLANE_TOKENS] = sum - leading;
    }
    if (lane % HALF == 0) {
        planes.factors[0] = broken ? __uint_as_float(0x7fffffffu) : 256.0f * inverse;
        planes.factors[PLANE_TOKENS] = inverse;
    }
}

// The number that is subtracted from a byte of `bytes_of`.
template <class R>
constexpr float BYTE_MIDDLE = 1 << (R::BITS - 1);

// A lane's codes of 32 columns as the left operand: the rows g and g + 8 of each step.
template <class R>
__device__ __forceinline__ void bytes_of(const Codes<R>& codes, unsigned (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int step = i / 2;
        if constexpr (R::CODES == INT8) {
            // Bytes 0 and 2, or 1 and 3.
            to[i] = __byte_perm(codes.words[2 * step], codes.words[2 * step + 1],
                                i % 2 ? 0x7351 : 0x6240) ^
                    0x80808080u;
        } else {
            to[i] = codes.words[step] >> i % 2 * 4 & 0x0f0f0f0fu;
            if constexpr (R::CODES == INT6)
                to[i] =
                    and_or(rotated(codes.words[2], i % 2 * 4 + 2 * step, 0), 0x30303030u, to[i]);
        }
    }
}

// Two values of bfloat16 of a word.
struct Pair {
    float first, second;

    __device__ explicit Pair(unsigned word)
        : first(__uint_as_float(word << 16)), second(__uint_as_float(word & 0xffff0000u)) {}
};

// Adds what is multiplied with the sums of x over a record's groups.
template <class R, int TILES>
__device__ __forceinline__ void add_middles(const typename Loaded<R, true>::Scales (&scales)[TILES],
                                            const PlanesOfX& planes, float (&sums)[TILES][4]) {
    using L = typename Loaded<R, true>::Scales;
    const int lane = threadIdx.x % 32, p = lane % 4;
    if constexpr (L::GROUPS == R::GROUPS) {
        const float2 of_x = *reinterpret_cast<const float2*>(planes.sums + 2 * p);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            const Pair factors(scales[t].words[0]);
            const Pair minimums(R::MINIMUMS ? scales[t].words[R::GROUP_WORDS - 1] : 0);
            const float upper = fmaf(-BYTE_MIDDLE<R>, factors.first, minimums.first);
            const float lower = fmaf(-BYTE_MIDDLE<R>, factors.second, minimums.second);
#pragma unroll
            for (int e = 0; e < 4; e++)
                sums[t][e] = fmaf(e / 2 ? lower : upper, e % 2 ? of_x.y : of_x.x, sums[t][e]);
        }
    } else {
        // By the tensor cores, two words of each lane at a time: the columns p and p + 4.
        float of_groups[L::GROUPS];
#pragma unroll
        for (int i = 0; i < L::GROUPS; i++)
            of_groups[i] = planes.sums[(p * L::GROUPS + i) * 8 + lane / 4];
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int i = 0; i < L::WORDS; i += 2) {
                float left[4] = {}, right[2] = {};
#pragma unroll
                for (int slot = 0; slot < 2 && i + slot < L::WORDS; slot++) {
                    const int word = i + slot;
                    const Pair values(scales[t].words[word]);
                    left[2 * slot] = values.first, left[2 * slot + 1] = values.second;
                    const float factor = word % L::PER_GROUP ? 1.0f : -BYTE_MIDDLE<R>;
                    right[slot] = factor * of_groups[word / L::PER_GROUP];
                }
                mma_tf32(sums[t], left, right[0], right[1]);
            }
    }
}

// Adds products of groups with floats as scales to sums of 16 rows by 8 columns, in fragments.
template <class R, int TILES>
struct FloatScales {
    static constexpr int START = MIDDLE_BITS;  // of a group's sums

    typename Loaded<R, true>::Scales scales[TILES];
    float factors[2];  // of this lane's two columns
    float (&sums)[TILES][4];

    __device__ __forceinline__ FloatScales(const Loaded<R, true> (&loaded)[TILES], float2 factors,
                                           float (&sums)[TILES][4])
        : factors{factors.x, factors.y}, sums(sums) {
#pragma unroll
        for (int t = 0; t < TILES; t++) scales[t] = loaded[t].scales();
    }

    __device__ __forceinline__ void add(int t, int group, const int (&found)[4]) {
        const Pair of_group(scales[t].word(group));
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float factor = factors[e % 2];
            const float sum = fmaf(__int_as_float(found[e]), factor, -MIDDLE * factor);
            sums[t][e] = fmaf(e / 2 ? of_group.second : of_group.first, sum, sums[t][e]);
        }
    }

    __device__ __forceinline__ void finish(const PlanesOfX& planes) {
        add_middles<R, TILES>(scales, planes, sums);
    }
};

// The same with integers as scales, whose products are added as integers: less than 2^28. Units
// multiply sums of a record.
template <class R, int TILES>
struct IntegerScales {
    static constexpr int START = 0;
    static constexpr int GROUPS = R::GROUPS / 4, PER_GROUP = 2 * R::GROUP_WORDS;  // bytes

    const Loaded<R, true> (&loaded)[TILES];
    float factors[2];
    float (&sums)[TILES][4];
    int totals[TILES][4] = {};
    unsigned words[TILES];

    __device__ __forceinline__ IntegerScales(const Loaded<R, true> (&loaded)[TILES], float2 factors,
                                             float (&sums)[TILES][4])
        : loaded(loaded), factors{factors.x, factors.y}, sums(sums) {}

    __device__ __forceinline__ void add(int t, int group, const int (&found)[4]) {
        const int place = group % GROUPS * PER_GROUP;
        if (place % 4 == 0)
            words[t] = __shfl_sync(FULL_WARP, loaded[t].words[place / 4], group / GROUPS, 4);
#pragma unroll
        for (int e = 0; e < 4; e++)
            totals[t][e] += found[e] * signed_byte(words[t], place % 4 + e / 2);
    }

    // Minimums, or without any what codes count from, are products with the sums of x.
    __device__ __forceinline__ void finish(const PlanesOfX& planes) {
        constexpr float FACTOR = R::MINIMUMS ? 1.0f : -BYTE_MIDDLE<R>;
        const int lane = threadIdx.x % 32, p = lane % 4;
        float of_groups[2] = {};
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
            of_groups[i] = FACTOR * planes.sums[(p * GROUPS + i) * 8 + lane / 4];
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            float left[4] = {}, others[4] = {};
#pragma unroll
            for (int i = 0; i < 2 * GROUPS; i++) {
                const int place = i / 2 * PER_GROUP + PER_GROUP - 2 + i % 2;
                left[i] = static_cast<float>(signed_byte(loaded[t].words[place / 4], place % 4));
            }
            mma_tf32(others, left, of_groups[0], of_groups[1]);
            float units[R::UNIT_WORDS][2];
#pragma unroll
            for (int i = 0; i < R::UNIT_WORDS; i++)
                Word<__half>::unpack(loaded[t].units[i], units[i]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float total = static_cast<float>(totals[t][e]), factor = factors[e % 2];
                if constexpr (R::MINIMUMS) {
                    sums[t][e] = fmaf(total * factor, units[0][e / 2], sums[t][e]);
                    sums[t][e] = fmaf(others[e], units[1][e / 2], sums[t][e]);
                } else {
                    sums[t][e] = fmaf(fmaf(total, factor, others[e]), units[0][e / 2], sums[t][e]);
                }
            }
        }
    }
};

template <class R, int TILES, bool UNITS = R::UNITS>
struct ScalesOf {
    using type = FloatScales<R, TILES>;
};
template <class R, int TILES>
struct ScalesOf<R, TILES, true> {
    using type = IntegerScales<R, TILES>;
};

// Adds the products of a record of each of TILES tiles to sums of 16 rows by 8 columns, in
// fragments.
//   x       addresses of this lane's rows of ldmatrix
//   planes  of x, of this record's columns
template <class R, int TILES>
__device__ __forceinline__ void multiply_planes(const Loaded<R, true> (&loaded)[TILES], unsigned x,
                                                const PlanesOfX& planes, float (&sums)[TILES][4]) {
    static_assert(R::CODES == INT4 || R::CODES == INT6 || R::CODES == INT8, "integers");
    using Scales = typename ScalesOf<R, TILES>::type;
    constexpr int WORDS = R::GROUP == STEP ? 2 : 4;           // of the left operand
    constexpr int PER_GROUP = R::GROUP * 2 / (STEP * WORDS);  // products
    const int p = threadIdx.x % 4;
    Codes<R> codes[TILES][COLUMNS / (2 * STEP)];
#pragma unroll
    for (int t = 0; t < TILES; t++) split<R>(loaded[t].codes, codes[t]);
    Scales scales(loaded, *reinterpret_cast<const float2*>(planes.factors + 2 * p), sums);
    int found[TILES][4];
    unsigned a[TILES][4], b[4];
#pragma unroll
    for (int word = 0; word < COLUMNS * 2 / STEP; word += WORDS) {
        if (word % 8 == 0) ptx::load_matrices(b, x + 8 * word);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            if (word % 4 == 0) bytes_of<R>(codes[t][word / 4], a[t]);
            mma_bytes<WORDS>(found[t], a[t] + word % 4, b + word / 2 % 4,
                             word / WORDS % PER_GROUP == 0, Scales::START);
        }
        if (word / WORDS % PER_GROUP != PER_GROUP - 1) continue;
#pragma unroll
        for (int t = 0; t < TILES; t++) scales.add(t, word / WORDS / PER_GROUP, found[t]);
    }
    scales.finish(planes);
}

}  // namespace grouped
