// Weight-only matrices of codes with a scale for each group of columns, and their conversion to
// bfloat16 in registers.
//
// A matrix [n, k] lies in records of 16 rows and 128 columns, those of 16 rows one after the other.
// Past n and k, scales are 0. A record has its codes in the order in which lanes take them as the
// left operand of mma.m16n8k16, or of wgmma with that operand in registers: lane l, with g = l / 4
// and p = l % 4, has of each 16 columns 2p, 2p + 1, 2p + 8 and 2p + 9 of the rows g and g + 8. Then
// come for each g the scales of all groups, those of the rows g and g + 8 next to each other.
//
// Kernels multiply with the same numbers: code * scale + minimum, rounded to bfloat16; but few
// tokens with numbers that are not rounded, where codes are multiplied as integers
// (grouped_planes.cuh).
#pragma once

#include "attention/attention_ptx.cuh"
#include "common.cuh"
#include "kv_quantization.cuh"

namespace grouped {

constexpr int ROWS = 16, COLUMNS = 128;  // of a record
constexpr int STEP = 16;                 // columns of a product

// Codes: integers of 4 bits plus 8; e2m1; indices of a table; integers of 8 bits; integers of 6
// bits plus 32, whose lower 4 bits come first.
constexpr int INT4 = 0, E2M1 = 1, TABLE = 2, INT8 = 3, INT6 = 4;

// The values of 16 codes in bfloat16: their lower bytes, then their upper ones, 4 to a word.
struct Table {
    unsigned words[8];
};

// Records of a matrix. GROUP: columns with a scale in common: 16, 32 or 128. MINIMUMS: whether
// they have a minimum as well.
template <int CODES_, int GROUP_, bool MINIMUMS_>
struct Records {
    static constexpr int CODES = CODES_, GROUP = GROUP_;
    static constexpr bool MINIMUMS = MINIMUMS_;
    static constexpr int BITS = CODES == INT8 ? 8 : CODES == INT6 ? 6 : 4;
    static constexpr int CODE_BYTES = ROWS * COLUMNS * BITS / 8;
    static constexpr int GROUPS = COLUMNS / GROUP;
    static constexpr int CODE_VECTORS = CODE_BYTES / 512;  // of 16 bytes, of a lane
    static constexpr int GROUP_WORDS = MINIMUMS ? 2 : 1;   // of two rows
    static constexpr int SCALE_WORDS = GROUPS * GROUP_WORDS;
    static constexpr int BYTES = CODE_BYTES + 32 * SCALE_WORDS;

    // Where the records of 16 rows begin, in bytes.
    static __device__ __forceinline__ long long offset(int row_tile, int k) {
        return static_cast<long long>(row_tile) * ((k + COLUMNS - 1) / COLUMNS) * BYTES;
    }
};

// Two values of bfloat16 as a word, and its arithmetic.
__device__ __forceinline__ unsigned multiply(unsigned a, unsigned b) {
    const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                           *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const unsigned*>(&product);
}

__device__ __forceinline__ unsigned multiply_add(unsigned a, unsigned b, unsigned c) {
    const __nv_bfloat162 sum = __hfma2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                       *reinterpret_cast<const __nv_bfloat162*>(&b),
                                       *reinterpret_cast<const __nv_bfloat162*>(&c));
    return *reinterpret_cast<const unsigned*>(&sum);
}

__device__ __forceinline__ unsigned subtract(unsigned a, unsigned b) {
    const __nv_bfloat162 difference = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                              *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const unsigned*>(&difference);
}

__device__ __forceinline__ uint4 load_record(unsigned address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

// (a & b) | c, in one instruction.
__device__ __forceinline__ unsigned and_or(unsigned a, unsigned b, unsigned c) {
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// Scales and minimums of a lane's two rows, of one group; each twice, for pairs of columns.
struct Scales {
    unsigned upper, lower;  // rows g and g + 8
    unsigned upper_minimum, lower_minimum;

    Scales() = default;
    __device__ __forceinline__ Scales(unsigned both, unsigned minimums)
        : upper(__byte_perm(both, both, 0x1010)),
          lower(__byte_perm(both, both, 0x3232)),
          upper_minimum(__byte_perm(minimums, minimums, 0x1010)),
          lower_minimum(__byte_perm(minimums, minimums, 0x3232)) {}
};

// A lane's codes of 32 columns: two steps. Of 6 bits the third word has the upper two; with p and g
// as above, byte 0 has those of column 2p of the rows g and g + 8 of the first step, then of the
// second one; the next bytes those of 2p + 8, 2p + 1 and 2p + 9.
template <class R>
struct Codes {
    unsigned words[R::BITS / 2];
};

// A lane's codes of a record, as vectors -> in the order of steps.
template <class R>
__device__ __forceinline__ void split(const uint4 (&vectors)[R::CODE_VECTORS],
                                      Codes<R> (&to)[COLUMNS / (2 * STEP)]) {
    if constexpr (R::CODES == INT8) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            to[i].words[0] = vectors[i].x, to[i].words[1] = vectors[i].y;
            to[i].words[2] = vectors[i].z, to[i].words[3] = vectors[i].w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            to[2 * i].words[0] = vectors[i].x, to[2 * i].words[1] = vectors[i].y;
            to[2 * i + 1].words[0] = vectors[i].z, to[2 * i + 1].words[1] = vectors[i].w;
        }
        if constexpr (R::CODES == INT6) {
            to[0].words[2] = vectors[2].x, to[1].words[2] = vectors[2].y;
            to[2].words[2] = vectors[2].z, to[3].words[2] = vectors[2].w;
        }
    }
}

// What a lane takes from a record in shared memory.
template <class R>
struct Reader {
    unsigned record;  // address
    int lane;

    __device__ __forceinline__ void read(Codes<R> (&to)[COLUMNS / (2 * STEP)]) const {
        uint4 vectors[R::CODE_VECTORS];
#pragma unroll
        for (int i = 0; i < R::CODE_VECTORS; i++)
            vectors[i] = load_record(record + i * 512 + lane * 16);
        split<R>(vectors, to);
    }

    // Of the group with this step.
    __device__ __forceinline__ Scales scales(int step) const {
        const unsigned place = record + R::CODE_BYTES + lane / 4 * (4 * R::SCALE_WORDS) +
                               step * STEP / R::GROUP * (4 * R::GROUP_WORDS);
        unsigned both, minimums = 0;
        if constexpr (R::MINIMUMS)
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(both), "=r"(minimums)
                         : "r"(place)
                         : "memory");
        else
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(both) : "r"(place) : "memory");
        return Scales(both, minimums);
    }
};

// What a lane takes from a record, in registers. To be multiplied in planes (grouped_planes.cuh),
// the four lanes of the same rows share their groups: each has the words of some adjacent ones.
template <class R, bool PLANES>
struct Loaded {
    static constexpr bool SHARES = PLANES && R::GROUPS > 1;
    static constexpr int GROUPS = SHARES ? R::GROUPS / 4 : R::GROUPS;  // of a lane
    static constexpr int PER_GROUP = R::GROUP_WORDS, WORDS = GROUPS * PER_GROUP;

    uint4 codes[R::CODE_VECTORS];
    unsigned words[WORDS];

    // From global memory; once, and evicted first from the L2 cache.
    __device__ __forceinline__ void load(const unsigned char* record, int lane) {
#pragma unroll
        for (int i = 0; i < R::CODE_VECTORS; i++)
            codes[i] = ptx::load_once(record + i * 512 + lane * 16);
        const unsigned char* const from =
            record + R::CODE_BYTES + (SHARES ? lane : lane / 4) * (4 * WORDS);
        if constexpr (WORDS == 1) {
            words[0] = __ldg(reinterpret_cast<const unsigned*>(from));
        } else if constexpr (WORDS == 2) {
            const uint2 pair = __ldg(reinterpret_cast<const uint2*>(from));
            words[0] = pair.x, words[1] = pair.y;
        } else {
#pragma unroll
            for (int i = 0; i < WORDS / 4; i++) {
                const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from) + i);
                words[4 * i] = raw.x, words[4 * i + 1] = raw.y;
                words[4 * i + 2] = raw.z, words[4 * i + 3] = raw.w;
            }
        }
    }

    // The word of a group's scales.
    __device__ __forceinline__ unsigned scales_of(int group) const {
        if constexpr (SHARES)
            return __shfl_sync(FULL_WARP, words[group % GROUPS * PER_GROUP], group / GROUPS, 4);
        else
            return words[group * PER_GROUP];
    }

    // Of the group with this step; not if lanes share them.
    __device__ __forceinline__ Scales scales(int step) const {
        const int group = step * STEP / R::GROUP;
        return Scales(words[group * PER_GROUP], R::MINIMUMS ? words[group * PER_GROUP + 1] : 0);
    }
};

// Codes of step 0 or 1 of a pair as pairs of bfloat16, in the order of the operand's registers:
// columns 2p and 2p + 1 of row g, of row g + 8, then 2p + 8 and 2p + 9 of both.
template <class R>
__device__ __forceinline__ void decode(const Codes<R>& codes, int step, const Table& table,
                                       unsigned (&to)[4]) {
    if constexpr (R::CODES == INT8) {
        Int8::decode(codes.words[2 * step], to[0], to[1]);
        Int8::decode(codes.words[2 * step + 1], to[2], to[3]);
    } else if constexpr (R::CODES == INT4) {
        // From 128 on, bfloat16 counts in ones.
#pragma unroll
        for (int i = 0; i < 4; i++)
            to[i] =
                subtract(and_or(codes.words[step] >> 4 * i, 0x000f000fu, 0x43004300u), 0x43084308u);
    } else if constexpr (R::CODES == INT6) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned lower = and_or(codes.words[step] >> 4 * i, 0x000f000fu, 0x43004300u);
            const int place = 4 * step + i % 2 * 2 + i / 2 * 8;
            const unsigned upper =
                place < 4 ? codes.words[2] << 4 - place : codes.words[2] >> place - 4;
            to[i] = subtract(and_or(upper, 0x00300030u, lower), 0x43204320u);
        }
    } else if constexpr (R::CODES == E2M1) {
        // Sign, exponent and mantissa where bfloat16 has them: the value times 2^-126. Of three codes
        // they lie so far apart that a shift to the left, which is a multiplication, suffices.
        constexpr unsigned MASK = 0x81c081c0u;
        const unsigned word = codes.words[step];
        to[0] = word & MASK;
        to[1] = word << 3 & MASK;
        to[2] = word << 6 & MASK;
        to[3] = and_or(word << 1, 0x80008000u,
                       and_or(word >> 4, 0x00c000c0u, word >> 5 & 0x01000100u));
    } else {
        // Bytes of the codes 0 to 7 and 8 to 15 are looked up apart; bit 3 chooses.
        const unsigned index = codes.words[step] & 0x77777777u;
        const unsigned choice = codes.words[step] >> 1 & 0x44444444u;
        unsigned halves[2][2];  // lower and upper bytes of the codes 0 to 3, and 4 to 7
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const unsigned at = half ? index >> 16 : index;
            const unsigned which = (half ? choice >> 16 : choice) & 0x4444u | 0x3210u;
#pragma unroll
            for (int byte = 0; byte < 2; byte++) {
                const unsigned* const from = table.words + 4 * byte;
                halves[half][byte] = __byte_perm(__byte_perm(from[0], from[1], at),
                                                 __byte_perm(from[2], from[3], at), which);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned place = i | (4 + i) << 4;
            const unsigned first = __byte_perm(halves[0][0], halves[0][1], place);
            const unsigned second = __byte_perm(halves[1][0], halves[1][1], place);
            to[i] = __byte_perm(first, second, 0x5410);
        }
    }
}

// The left operand of step 0 or 1 of a pair.
template <class R>
__device__ __forceinline__ void operand(const Codes<R>& codes, int step, const Scales& scales,
                                        const Table& table, unsigned (&to)[4]) {
    decode<R>(codes, step, table, to);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned scale = i % 2 ? scales.lower : scales.upper;
        if constexpr (R::MINIMUMS)
            to[i] = multiply_add(to[i], scale,
                                 i % 2 ? scales.lower_minimum : scales.upper_minimum);
        else
            to[i] = multiply(to[i], scale);
    }
}

// Stores a result, in float if `wide`.
__device__ __forceinline__ void store_sum(void* out, long long place, float value, bool wide) {
    if (wide)
        static_cast<float*>(out)[place] = value;
    else
        static_cast<__nv_bfloat16*>(out)[place] = __float2bfloat16(value);
}

// Copies a record, or another multiple of 16 bytes, from global to shared memory by a warp; used
// once, it is evicted first from the L2 cache.
template <int BYTES>
__device__ __forceinline__ void copy_record(bool wanted, unsigned to, const unsigned char* from,
                                            int lane) {
#pragma unroll
    for (int i = 0; i < (BYTES + 511) / 512; i++)
        ptx::copy_once_if(wanted && i * 512 + lane * 16 < BYTES, to + lane * 16 + i * 512,
                          from + lane * 16 + i * 512);
}

}  // namespace grouped
