// Weight-only matrices of codes with a scale for each group of columns, and their conversion to
// bfloat16 in registers.
//
// A matrix [n, k] lies in records of 16 rows and 128 columns, those of 16 rows one after the other.
// Past n and k, scales are 0. A record has its codes in the order in which lanes take them as the
// left operand of mma.m16n8k16, or of wgmma with that operand in registers: lane l, with g = l / 4
// and p = l % 4, has of each 16 columns 2p, 2p + 1, 2p + 8 and 2p + 9 of the rows g and g + 8. Then
// come for each g the scales of all groups, those of the rows g and g + 8 next to each other. They
// are bfloat16, or integers of 8 bits; the latter are followed by their units in float16, one of a
// row's scales and one of its minimums, again those of g and g + 8 next to each other.
//
// Kernels multiply with the same numbers: code * scale + minimum, rounded to bfloat16; but few
// tokens with numbers that are not rounded, where codes are multiplied as integers
// (grouped_planes.cuh), and experts of few tokens with e2m1 before it is scaled (moe/few.cuh).
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
// they have a minimum as well. UNITS: whether both are integers times a unit. A code of 4 or 6 bits
// counts from 0 if there are units and minimums, and from the middle otherwise.
template <int CODES_, int GROUP_, bool MINIMUMS_, bool UNITS_>
struct Records {
    static constexpr int CODES = CODES_, GROUP = GROUP_;
    static constexpr bool MINIMUMS = MINIMUMS_, UNITS = UNITS_;
    static constexpr int BITS = CODES == INT8 ? 8 : CODES == INT6 ? 6 : 4;
    static constexpr int CODE_BYTES = ROWS * COLUMNS * BITS / 8;
    static constexpr int GROUPS = COLUMNS / GROUP;
    static constexpr int CODE_VECTORS = CODE_BYTES / 512;  // of 16 bytes, of a lane
    static constexpr int GROUP_WORDS = MINIMUMS ? 2 : 1;   // of two rows
    static constexpr int SCALE_WORDS = GROUPS * GROUP_WORDS / (UNITS ? 2 : 1);  // of a g
    static constexpr int UNIT_WORDS = UNITS ? GROUP_WORDS : 0;
    static constexpr int BYTES = CODE_BYTES + 32 * (SCALE_WORDS + UNIT_WORDS);
    static_assert(!UNITS || (BITS < 8 && SCALE_WORDS % 4 == 0), "each lane has whole words");
    static_assert(!UNITS || MINIMUMS || BITS == 6, "the middle is that of 6 bits");

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

// The bits of a where those of `mask` are set, and of b elsewhere, in one instruction.
__device__ __forceinline__ unsigned merged(unsigned mask, unsigned a, unsigned b) {
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(result) : "r"(mask), "r"(a), "r"(b));
    return result;
}

// A word whose bit `from` becomes bit `to`.
__device__ __forceinline__ unsigned shifted(unsigned word, int from, int to) {
    return from < to ? word << to - from : word >> from - to;
}

// The same with the bits that are shifted out at the other end.
__device__ __forceinline__ unsigned rotated(unsigned word, int from, int to) {
    return __funnelshift_r(word, word, from - to);
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

// A lane's codes of 32 columns: two steps. Of 4 bits, and of the lower 4 of 6, pair i of a step, in
// the order of the operand's registers, has bits 4i to 4i + 3 of both halves of the step's word.
// The upper two of 6 are in a third word: those of the first step above where the lower ones are,
// from bit 4i + 4 on, and those of the second step 2 bits higher. Those of pair 3 would be in the
// next half, and are: in the word, rotated by 4 bits, all lie as in bytes of their own. The bits of
// e2m1 lie so that a rotation and a mask make bfloat16 of a pair (`decode`).
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

// With units, a code is taken as the mantissa of a bfloat16 without an exponent, which needs no
// subtraction: as itself times a power of two, whose inverse is in the scales. That is no float,
// but 2^8 times this is.
template <class R>
constexpr float INVERSE_OF_CODES = R::BITS == 4 ? 0x1p122f : 0x1p124f;

// The middle of codes of 6 bits as such, negative, twice: -32 * 2^-132.
constexpr unsigned MINUS_MIDDLE = 0x80408040u;

// A byte of a word, with its sign, in one instruction; times 2^8 if `shifts`.
__device__ __forceinline__ int signed_byte(unsigned word, int byte, bool shifts = false) {
    const int sign = byte + 8, zero = 4;
    int found;
    asm("prmt.b32 %0, %1, 0, %2;"
        : "=r"(found)
        : "r"(word),
          "r"(shifts ? zero | byte << 4 | sign << 8 | sign << 12 : byte | sign * 0x1110));
    return found;
}

// Scales of a lane's two rows in a record, and their minimums. If the four lanes of the same rows
// share them, each has the words of some adjacent groups.
template <class R, bool SHARED>
struct LaneScales {
    static constexpr int GROUPS = SHARED ? R::GROUPS / 4 : R::GROUPS;  // of a lane
    static constexpr int PER_GROUP = R::GROUP_WORDS, WORDS = GROUPS * PER_GROUP;

    unsigned words[WORDS];

    // A group's word of scales, or of minimums.
    __device__ __forceinline__ unsigned word(int group, int which = 0) const {
        const unsigned own = words[group % GROUPS * PER_GROUP + which];
        if constexpr (SHARED)
            return __shfl_sync(FULL_WARP, own, group / GROUPS, 4);
        else
            return own;
    }

    // Of the group with this step.
    __device__ __forceinline__ Scales of(int step) const {
        const int group = step * STEP / R::GROUP;
        Scales found(word(group), R::MINIMUMS ? word(group, 1) : 0);
        if constexpr (R::UNITS && !R::MINIMUMS) {
            found.upper_minimum = multiply(found.upper, MINUS_MIDDLE);
            found.lower_minimum = multiply(found.lower, MINUS_MIDDLE);
        }
        return found;
    }
};

// Integers of 8 bits times their units.
template <class R>
__device__ __forceinline__ LaneScales<R, true> multiplied(
    const unsigned (&integers)[LaneScales<R, true>::WORDS / 2],
    const unsigned (&units)[R::UNIT_WORDS]) {
    using Found = LaneScales<R, true>;
    Found found;
#pragma unroll
    for (int which = 0; which < R::UNIT_WORDS; which++) {
        const bool is_scale = which == 0;
        float of_rows[2];
        Word<__half>::unpack(units[which], of_rows);
#pragma unroll
        for (int row = 0; row < 2; row++) of_rows[row] *= is_scale ? INVERSE_OF_CODES<R> : 1.0f;
#pragma unroll
        for (int group = 0; group < Found::GROUPS; group++) {
            const int word = group * Found::PER_GROUP + which;
            float products[2];
#pragma unroll
            for (int row = 0; row < 2; row++)
                products[row] =
                    of_rows[row] * static_cast<float>(signed_byte(integers[word / 2],
                                                                  word % 2 * 2 + row, is_scale));
            found.words[word] = Word<__nv_bfloat16>::pack(products);
        }
    }
    return found;
}

template <int COUNT>
__device__ __forceinline__ void load_shared_words(unsigned (&to)[COUNT], unsigned from) {
    static_assert(COUNT <= 2, "one load");
    if constexpr (COUNT == 1)
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(from) : "memory");
    else
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(to[0]), "=r"(to[1])
                     : "r"(from)
                     : "memory");
}

template <int COUNT>
__device__ __forceinline__ void load_words(unsigned (&to)[COUNT], const unsigned char* from) {
    if constexpr (COUNT == 1) {
        to[0] = __ldg(reinterpret_cast<const unsigned*>(from));
    } else if constexpr (COUNT == 2) {
        const uint2 pair = __ldg(reinterpret_cast<const uint2*>(from));
        to[0] = pair.x, to[1] = pair.y;
    } else {
#pragma unroll
        for (int i = 0; i < COUNT / 4; i++) {
            const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from) + i);
            to[4 * i] = raw.x, to[4 * i + 1] = raw.y;
            to[4 * i + 2] = raw.z, to[4 * i + 3] = raw.w;
        }
    }
}

// Scales that a lane reads from shared memory, each when it is needed.
template <class R>
struct SharedScales {
    unsigned place;  // address of those of the lane's rows

    // Of both rows, of the group with this step.
    __device__ __forceinline__ unsigned word(int step) const {
        unsigned words[1];
        load_shared_words(words, address(step));
        return words[0];
    }

    __device__ __forceinline__ Scales of(int step) const {
        unsigned words[R::GROUP_WORDS];
        load_shared_words(words, address(step));
        return Scales(words[0], R::MINIMUMS ? words[R::GROUP_WORDS - 1] : 0);
    }

   private:
    __device__ __forceinline__ unsigned address(int step) const {
        return place + step * STEP / R::GROUP * (4 * R::GROUP_WORDS);
    }
};

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

    __device__ __forceinline__ auto scales() const {
        const unsigned place = record + R::CODE_BYTES;
        if constexpr (R::UNITS) {
            unsigned integers[R::SCALE_WORDS / 4], units[R::UNIT_WORDS];
            load_shared_words(integers, place + lane * R::SCALE_WORDS);
            load_shared_words(units, place + 32 * R::SCALE_WORDS + lane / 4 * (4 * R::UNIT_WORDS));
            return multiplied<R>(integers, units);
        } else {
            return SharedScales<R>{place + lane / 4 * (4 * R::SCALE_WORDS)};
        }
    }
};

// What a lane takes from a record, in registers. Lanes share scales that are integers, and those of
// what is multiplied in planes (grouped_planes.cuh).
template <class R, bool PLANES>
struct Loaded {
    using Scales = LaneScales<R, R::UNITS || (PLANES && R::GROUPS > 1)>;
    static constexpr int WORDS = Scales::WORDS / (R::UNITS ? 2 : 1);

    uint4 codes[R::CODE_VECTORS];
    unsigned words[WORDS];
    unsigned units[R::UNITS ? R::UNIT_WORDS : 1];

    // From global memory; once, and evicted first from the L2 cache.
    __device__ __forceinline__ void load(const unsigned char* record, int lane) {
#pragma unroll
        for (int i = 0; i < R::CODE_VECTORS; i++)
            codes[i] = ptx::load_once(record + i * 512 + lane * 16);
        const unsigned char* const from = record + R::CODE_BYTES;
        // Of one lane, or of the four that have the same words.
        constexpr bool EACH = WORDS < R::SCALE_WORDS;
        load_words(words, from + (EACH ? lane : lane / 4) * (4 * WORDS));
        if constexpr (R::UNITS)
            load_words(units, from + 32 * R::SCALE_WORDS + lane / 4 * (4 * R::UNIT_WORDS));
    }

    __device__ __forceinline__ Scales scales() const {
        Scales found;
        if constexpr (R::UNITS) {
            found = multiplied<R>(words, units);
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i++) found.words[i] = words[i];
        }
        return found;
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
    } else if constexpr (R::UNITS) {
        // The last bit of a mantissa is 2^-133.
        constexpr int FIRST = R::BITS == 4 ? 3 : 1;
        const unsigned word = codes.words[step];
        if constexpr (R::CODES == INT4) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = shifted(word, 4 * i, FIRST) & 0x000f000fu << FIRST;
        } else {
            const unsigned upper = codes.words[2] >> 2 * step;
#pragma unroll
            for (int i = 0; i < 3; i++)
                to[i] = shifted(and_or(upper, 0x00300030u << 4 * i, word & 0x000f000fu << 4 * i),
                                4 * i, FIRST);
            to[3] =
                and_or(rotated(codes.words[2], 16 + 2 * step, FIRST + 4), 0x00030003u << FIRST + 4,
                       shifted(word, 12, FIRST) & 0x000f000fu << FIRST);
        }
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
            const unsigned upper = rotated(codes.words[2], 4 * i + 4 + 2 * step, 4);
            to[i] = subtract(and_or(upper, 0x00300030u, lower), 0x43204320u);
        }
    } else if constexpr (R::CODES == E2M1) {
        // Sign, exponent and mantissa where bfloat16 has them: the value times 2^-126. The fourth
        // pairs of both steps lie in what the others leave of both words.
        constexpr unsigned MASK = 0x81c081c0u, LEFT = 0x06030603u;
        const unsigned word = codes.words[step];
        const unsigned fourths = merged(LEFT, codes.words[0], codes.words[1] << 2);
        to[0] = word & MASK;
        to[1] = rotated(word, 6, 0) & MASK;
        to[2] = word << 4 & MASK;
        to[3] = (step == 0 ? rotated(fourths, 4, 0) : fourths << 6) & MASK;
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
        if constexpr (R::MINIMUMS || R::UNITS)
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
// once, it is evicted first from the L2 cache. Addresses are those of the lane's first 16 bytes.
template <int BYTES>
__device__ __forceinline__ void copy_record(unsigned to, const unsigned char* from, int lane) {
#pragma unroll
    for (int i = 0; i < (BYTES + 511) / 512; i++)
        ptx::copy_once_if(i * 512 + lane * 16 < BYTES, to + i * 512, from + i * 512);
}

}  // namespace grouped
