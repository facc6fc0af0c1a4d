// Products of integers of 4 bits with x by the tensor cores for integers: a code becomes a byte in
// half of the instructions that it takes to become bfloat16.
//
// x, scaled by its largest of 256 columns, is an integer of 16 bits, in two planes: its upper byte
// and its lower one. Its error is at most 2^-16 of that largest one. A token's planes are two columns
// of a product, so 8 columns are 4 tokens. Scales multiply sums of a group, of either plane.
#pragma once

#include "linear/grouped.cuh"

namespace grouped {

// Whether a record's products are such ones. With smaller groups, what multiplies their sums takes
// longer than it takes to make bfloat16.
template <class R>
constexpr bool IN_PLANES = R::CODES == INT4 && R::GROUP == COLUMNS;

constexpr int PLANE_COLUMNS = 256;  // with a scale of x in common
constexpr int LANE_COLUMNS = 16;    // that a lane converts
constexpr int PLANE_TOKENS = 4;     // of 8 columns of a product: their upper planes, then the lower

// What x's sums of a group are multiplied with, and what is added then; both contain its scale.
struct GroupOfX {
    float factor, added;
};

constexpr float LARGEST_OF_X = 32512.0f;  // its upper byte is 127

// c [16, 8] += a [16, 32] @ b [32, 8], of bytes without and with a sign.
__device__ __forceinline__ void mma_bytes(int (&c)[4], const unsigned (&a)[4], unsigned b0,
                                          unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Integers below 2^22 as floats: added to the bits of MIDDLE they are that float plus themselves.
constexpr int MIDDLE_BITS = 0x4b400000;
constexpr float MIDDLE = 12582912.0f;

// Converts 16 columns of a row, whose values are given as floats. All lanes of a warp call it, each
// half of which has PLANE_COLUMNS. `to` is the place of the upper plane, `lower` bytes before that
// of the lower one; `groups` that of the first group of these columns in the column of the upper
// plane, those of 8 columns of a product behind each other.
//
// In each 16 columns of a plane lie 2p, 2p + 8, 2p + 1 and 2p + 9 next to each other, for p from 0
// to 3: the order of a record's codes.
template <class R>
__device__ __forceinline__ void convert(const float (&x)[LANE_COLUMNS], unsigned char* to,
                                        int lower, GroupOfX* groups) {
    const int lane = threadIdx.x % 32;
    float largest = 0.0f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
        largest = fmaxf(largest, fabsf(x[i]));
        sum += x[i];
    }
    // fmaxf loses NaN; the sum has it, and infinity as well.
#pragma unroll
    for (int mask = 1; mask < PLANE_COLUMNS / LANE_COLUMNS; mask *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, mask));
    constexpr int LANES = R::GROUP / LANE_COLUMNS;
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, mask);
    const float inverse = largest / LARGEST_OF_X;
    const float scale = largest > 0.0f ? LARGEST_OF_X / largest : 0.0f;
    unsigned planes[2][4];
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const int order[4] = {2 * p, 2 * p + 8, 2 * p + 1, 2 * p + 9};
        unsigned upper[4], whole[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            whole[i] = __float2int_rn(x[order[i]] * scale);
            upper[i] = (whole[i] + 128) >> 8;  // the lower byte has a sign as well
        }
        planes[0][p] = __byte_perm(__byte_perm(upper[0], upper[1], 0x0040),
                                   __byte_perm(upper[2], upper[3], 0x0040), 0x5410);
        planes[1][p] = __byte_perm(__byte_perm(whole[0], whole[1], 0x0040),
                                   __byte_perm(whole[2], whole[3], 0x0040), 0x5410);
    }
#pragma unroll
    for (int plane = 0; plane < 2; plane++)
        *reinterpret_cast<uint4*>(to + plane * lower) = make_uint4(
            planes[plane][0], planes[plane][1], planes[plane][2], planes[plane][3]);
    if (lane % LANES == 0) {
        const bool finite = fabsf(sum) < __uint_as_float(0x7f800000u);
        const int index = lane % (PLANE_COLUMNS / LANE_COLUMNS) / LANES;
        groups[index * 8] = {finite ? 256.0f * inverse : __uint_as_float(0x7fffffffu),
                             -8.0f * sum};
        groups[index * 8 + PLANE_TOKENS] = {inverse, 0.0f};
    }
}

// A lane's codes of 32 columns as the left operand.
template <class R>
__device__ __forceinline__ void bytes_of(const Codes<R>& codes, unsigned (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unsigned word = codes.words[i];
        to[2 * i] = word & 0x0f0f0f0fu;
        to[2 * i + 1] = word >> 4 & 0x0f0f0f0fu;
    }
}

// Adds the products of a record of each of TILES tiles to sums of 16 rows by 8 * PARTS columns, in
// fragments.
//   words_of(t, group)  the scales of a lane's two rows, and their minimums
//   x                   addresses of this lane's rows of ldmatrix
//   groups              of x, of a record's columns, [GROUPS, 8] for each part, `stride` apart
template <class R, int TILES, int PARTS, class WordsOf>
__device__ __forceinline__ void multiply_planes(const Codes<R> (&codes)[TILES][4],
                                                const WordsOf& words_of,
                                                const unsigned (&x)[PARTS],
                                                const GroupOfX* groups, int stride,
                                                float (&sums)[TILES][PARTS][4]) {
    constexpr int PER_GROUP = R::GROUP / (2 * STEP);  // products of 32 columns
    int found[TILES][PARTS][4];
    unsigned b[PARTS][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; i % 2 == 0 && j < PARTS; j++) ptx::load_matrices(b[j], x[j] + 32 * i);
#pragma unroll
        for (int t = 0; i % PER_GROUP == 0 && t < TILES; t++)
#pragma unroll
            for (int j = 0; j < PARTS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) found[t][j][e] = MIDDLE_BITS;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            unsigned a[4];
            bytes_of<R>(codes[t][i], a);
#pragma unroll
            for (int j = 0; j < PARTS; j++)
                mma_bytes(found[t][j], a, b[j][i % 2 * 2], b[j][i % 2 * 2 + 1]);
        }
        if (i % PER_GROUP != PER_GROUP - 1) continue;
        const int group = i / PER_GROUP;
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            // Of this lane's two columns.
            const float4 both = *reinterpret_cast<const float4*>(groups + j * stride + group * 8 +
                                                                 threadIdx.x % 4 * 2);
            const GroupOfX of_x[2] = {{both.x, both.y}, {both.z, both.w}};
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const uint2 words = words_of(t, group);
                const float scales[2] = {__uint_as_float(words.x << 16),
                                         __uint_as_float(words.x & 0xffff0000u)};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float sum = __int_as_float(found[t][j][e]) - MIDDLE;
                    sums[t][j][e] +=
                        scales[e / 2] * (sum * of_x[e % 2].factor + of_x[e % 2].added);
                }
                if constexpr (R::MINIMUMS) {
                    const float minimums[2] = {__uint_as_float(words.y << 16),
                                               __uint_as_float(words.y & 0xffff0000u)};
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sums[t][j][e] += minimums[e / 2] * (-0.125f * of_x[e % 2].added);
                }
            }
        }
    }
}

}  // namespace grouped
