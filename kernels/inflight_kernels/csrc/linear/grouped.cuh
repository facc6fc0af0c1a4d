// Weight-only matrices of codes with a scale for each group of columns, and their conversion to
// bfloat16 in registers.
//
// A matrix [n, k] lies in records of 16 rows and 128 columns, those of 16 rows one after the other.
// Past n and k, scales are 0. A record has its codes in the order in which lanes take them as the
// left operand of mma.m16n8k16, or of wgmma with that operand in registers: lane l, with g = l / 4
// and p = l % 4, has of each 16 columns 2p, 2p + 1, 2p + 8 and 2p + 9 of the rows g and g + 8. Then
// come the scales of its groups, those of the rows g and g + 8 next to each other.
//
// Every kernel multiplies with the same numbers: code * scale + minimum, rounded to bfloat16.
#pragma once

#include "attention/attention_ptx.cuh"
#include "common.cuh"
#include "kv_quantization.cuh"

namespace grouped {

constexpr int ROWS = 16, COLUMNS = 128;  // of a record
constexpr int STEP = 16;                 // columns of a product

// Codes: integers of 4 bits plus 8; e2m1; indices of a table; integers of 8 bits.
constexpr int INT4 = 0, E2M1 = 1, TABLE = 2, INT8 = 3;

// The values of 16 codes in bfloat16: their lower bytes, then their upper ones, 4 to a word.
struct Table {
    unsigned words[8];
};

// Records of a matrix. GROUP: columns with a scale in common: 16, 32, 64 or 128. MINIMUMS: whether
// they have a minimum as well.
template <int CODES_, int GROUP_, bool MINIMUMS_>
struct Records {
    static constexpr int CODES = CODES_, GROUP = GROUP_;
    static constexpr bool MINIMUMS = MINIMUMS_;
    static constexpr int CODE_BYTES = ROWS * COLUMNS / (CODES == INT8 ? 1 : 2);
    static constexpr int GROUPS = COLUMNS / GROUP;
    static constexpr int GROUP_BYTES = MINIMUMS ? 64 : 32;  // scales of 16 rows
    static constexpr int BYTES = CODE_BYTES + GROUPS * GROUP_BYTES;

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

// Scales and minimums of a lane's two rows, of one group; each twice, for pairs of columns.
struct Scales {
    unsigned upper, lower;  // rows g and g + 8
    unsigned upper_minimum, lower_minimum;
};

// A lane's codes of 32 columns: two steps.
template <class R>
struct Codes {
    unsigned words[R::CODES == INT8 ? 4 : 2];
};

// What a lane takes from a record in shared memory.
template <class R>
struct Reader {
    unsigned record;  // address
    int lane;

    // Of all columns, in the order of steps: fewer accesses than one for each pair of steps.
    __device__ __forceinline__ void read(Codes<R> (&to)[COLUMNS / (2 * STEP)]) const {
        constexpr int PAIRS = COLUMNS / (2 * STEP);
        if constexpr (R::CODES == INT8) {
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const uint4 raw = load_record(record + i * 512 + lane * 16);
                to[i].words[0] = raw.x, to[i].words[1] = raw.y;
                to[i].words[2] = raw.z, to[i].words[3] = raw.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < PAIRS; i += 2) {
                const uint4 raw = load_record(record + i * 256 + lane * 16);
                to[i].words[0] = raw.x, to[i].words[1] = raw.y;
                to[i + 1].words[0] = raw.z, to[i + 1].words[1] = raw.w;
            }
        }
    }

    // Of the group with this step.
    __device__ __forceinline__ Scales scales(int step) const {
        const unsigned place = record + R::CODE_BYTES + step * STEP / R::GROUP * R::GROUP_BYTES;
        unsigned both, minimums = 0;
        if constexpr (R::MINIMUMS)
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(both), "=r"(minimums)
                         : "r"(place + lane / 4 * 8)
                         : "memory");
        else
            asm volatile("ld.shared.u32 %0, [%1];"
                         : "=r"(both)
                         : "r"(place + lane / 4 * 4)
                         : "memory");
        return {__byte_perm(both, both, 0x1010), __byte_perm(both, both, 0x3232),
                __byte_perm(minimums, minimums, 0x1010), __byte_perm(minimums, minimums, 0x3232)};
    }
};

// Codes of a step as pairs of bfloat16, in the order of the operand's registers: columns 2p and
// 2p + 1 of row g, of row g + 8, then 2p + 8 and 2p + 9 of both.
template <int CODES>
__device__ __forceinline__ void decode(const unsigned* words, const Table& table,
                                       unsigned (&to)[4]) {
    if constexpr (CODES == INT8) {
        Int8::decode(words[0], to[0], to[1]);
        Int8::decode(words[1], to[2], to[3]);
    } else if constexpr (CODES == INT4) {
        // From 128 on, bfloat16 counts in ones.
#pragma unroll
        for (int i = 0; i < 4; i++)
            to[i] = subtract((words[0] >> 4 * i & 0x000f000fu) | 0x43004300u, 0x43084308u);
    } else if constexpr (CODES == E2M1) {
        // Sign, exponent and mantissa where bfloat16 has them: the value times 2^-126.
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned top = words[0] << (12 - 4 * i);
            to[i] = (top & 0x80008000u) | (top >> 6 & 0x01c001c0u);
        }
    } else {
        // Bytes of the codes 0 to 7 and 8 to 15 are looked up apart; bit 3 chooses.
        const unsigned index = words[0] & 0x77777777u;
        const unsigned choice = words[0] >> 1 & 0x44444444u;
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
    decode<R::CODES>(codes.words + (R::CODES == INT8 ? 2 * step : step), table, to);
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
