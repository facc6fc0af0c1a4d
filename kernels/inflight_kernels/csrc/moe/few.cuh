// Mixtures of experts for few tokens: the experts that are used, and streams of their weights.
// sm_90a only.
//
// Each block finds the experts by itself, which takes less time than a kernel before it. There is
// no order of rows by expert: a product has all tokens as the 8 columns of mma.sync, and the
// weight's rows as its 16 rows. Each warp reads rows of its own, some stages ahead, and waits for
// no other warp. A weight has values of x's type, or is in the records of grouped.cuh; only the
// copies and the products of stages differ: `Values` and `Codes` have them.
#pragma once

#include "attention/attention_ptx.cuh"
#include "linear/grouped.cuh"
#include "linear/hopper_linear.cuh"
#include "moe/choice.cuh"

namespace few {

constexpr int TOKENS = 8, WARPS = 8, THREADS = 32 * WARPS;
constexpr int MAX_EXPERTS = 512, MAX_TOP_K = 32;  // the shared expert included
constexpr int MAX_PAIRS = 64;                     // of a token and one of its experts

// ---------------------------------------------------------------- which experts

// The experts of all tokens.
struct Choice {
    int count;                             // of distinct experts
    alignas(16) int experts[MAX_PAIRS];    // these, ascending if there are several tokens
    signed char ranks[MAX_PAIRS][TOKENS];  // of an expert among those of a token; -1 if it has not
    float weights[TOKENS][MAX_TOP_K];      // of a token's experts, then of the shared one
};

constexpr int CHOICE_VECTORS = sizeof(Choice) / sizeof(uint4);
static_assert(CHOICE_VECTORS <= THREADS, "a thread copies one");

static_assert(WARPS == TOKENS, "of a warp or of a token");

struct Scratch {
    int chosen[TOKENS][MAX_TOP_K];  // experts of a token, or the first ones of a warp
    unsigned masks[MAX_EXPERTS];    // tokens of an expert; then its place in `experts`
};

// The first experts of one token, all that this warp needs to request its first weights.
template <int PER_LANE>
__device__ void choose_first(Ranking<PER_LANE>& ranking, const RouterParams& router, int count,
                             int* experts) {
    const int lane = threadIdx.x % 32;
    ranking.choose(0, min(count, router.top_k));
    const bool is_shared = lane >= router.top_k && lane < router.all_top_k();
    if (lane < count || is_shared) experts[lane] = ranking.expert(router);
    __syncwarp();
}

// All of them, by a warp that called choose_first with `count`.
template <int PER_LANE, class Logit>
__device__ void choose_rest(Ranking<PER_LANE>& ranking, const Logit& logit,
                            const RouterParams& router, int count, Choice& to) {
    const int lane = threadIdx.x % 32, top_k = router.all_top_k();
    ranking.choose(min(count, router.top_k), router.top_k);
    write_weights(ranking, logit, router, to.weights[0]);
    if (lane == 0) to.count = top_k;
    if (lane >= top_k) return;
    to.experts[lane] = ranking.expert(router);
    int* const ranks_of = reinterpret_cast<int*>(to.ranks[lane]);
    ranks_of[0] = 0xffffff00 | lane;
    ranks_of[1] = -1;
}

// The experts of several tokens, warp t having the ranking of token t. Called by all threads of a
// block, with all of it in shared memory.
template <int PER_LANE, class Logit>
__device__ void choose_all(Ranking<PER_LANE>& ranking, const Logit& logit,
                           const RouterParams& router, int num_tokens, Choice& to,
                           Scratch& scratch) {
    // Read from a lane, so that the compiler knows that warps do not diverge.
    const int warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32, top_k = router.all_top_k();
    const int padded = router.padded_experts();
#pragma unroll 1
    for (int i = threadIdx.x; i < padded; i += THREADS) scratch.masks[i] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < MAX_PAIRS * TOKENS / 4; i += THREADS)
        reinterpret_cast<int*>(to.ranks)[i] = -1;
    __syncthreads();
    if (warp < num_tokens) {
        ranking.choose(0, router.top_k);
        write_weights(ranking, logit, router, to.weights[warp]);
        if (lane < top_k) {
            const int expert = ranking.expert(router);
            atomicOr(scratch.masks + expert, 1u << warp);
            scratch.chosen[warp][lane] = expert;
        }
    }
    __syncthreads();
    if (warp == 0) {
        int count = 0;
#pragma unroll 1
        for (int first = 0; first < padded; first += 32) {
            const bool used = scratch.masks[first + lane] != 0;
            const unsigned all = __ballot_sync(FULL_WARP, used);
            const int place = count + __popc(all & ((1u << lane) - 1));
            if (used) {
                to.experts[place] = first + lane;
                scratch.masks[first + lane] = place;
            }
            count += __popc(all);
        }
        if (lane == 0) to.count = count;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < num_tokens * top_k; i += THREADS) {
        const int token = i / top_k, rank = i - token * top_k;
        to.ranks[scratch.masks[scratch.chosen[token][rank]]][token] = rank;
    }
    __syncthreads();
}

// Hand a choice on to the next kernel, which may read it before its wait: it starts once all blocks
// have called this.
__device__ inline void hand_on(const Choice& choice, Choice* to) {
    if (blockIdx.x == gridDim.x - 1) {  // has no more jobs than others
        if (threadIdx.x < CHOICE_VECTORS)
            reinterpret_cast<uint4*>(to)[threadIdx.x] =
                reinterpret_cast<const uint4*>(&choice)[threadIdx.x];
        __threadfence();
        __syncthreads();
    }
    pdl_launch_dependents();
}

// What the preceding kernel has handed on.
__device__ inline void take_over(const Choice* from, Choice& choice) {
    if (threadIdx.x < CHOICE_VECTORS)
        reinterpret_cast<uint4*>(&choice)[threadIdx.x] =
            load_l2(reinterpret_cast<const uint4*>(from) + threadIdx.x);
    __syncthreads();
}

// Division by one number, for dividends whose product with it is below 2^32.
struct Divisor {
    int number;
    unsigned inverse;  // 2^32 / number, rounded up

    __device__ explicit Divisor(int number)
        : number(number), inverse(0xffffffffu / static_cast<unsigned>(number) + 1) {}
    __device__ int quotient(int of) const { return number == 1 ? of : __umulhi(of, inverse); }
    __device__ int remainder(int of) const { return of - quotient(of) * number; }
};

// ---------------------------------------------------------------- streams of weights

constexpr int STAGE = 4096;  // bytes

// Copies 16 bytes that are used once, or zeros if not `valid`.
__device__ inline void copy_once(unsigned target, const char* source, bool valid) {
    constexpr unsigned long long EVICT_FIRST = 0x12f0000000000000;  // as createpolicy encodes it
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target),
                 "l"(__cvta_generic_to_global(source)), "r"(valid ? 16 : 0), "l"(EVICT_FIRST)
                 : "memory");
}

__device__ inline uint4 load_shared(unsigned address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

// c [16, 8] += a [16, 32 bytes] @ b [32 bytes, 8]. Lane l has of a the words of rows l / 4
// and l / 4 + 8, then the next ones, of b those of column l / 4: four columns of lanes, l % 4, have
// 8 bytes of a row each. Which 8 is free, if a and b agree.
template <typename In>
__device__ void mma(Sum<In> (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <>
__device__ inline void mma<__nv_bfloat16>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                          unsigned b1) {
    ptx::mma<__nv_bfloat16>(c, a, b0, b1);
}
// In float16. mma.sync of e4m3 is the same on Hopper, but adds each product to c by further
// instructions.
template <>
__device__ inline void mma<Fp8>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        unsigned halves[4], first, second;
        Fp8::decode_halves<false>(a[2 * i], halves[0], halves[2]);
        Fp8::decode_halves<false>(a[2 * i + 1], halves[1], halves[3]);
        Fp8::decode_halves<false>(i ? b1 : b0, first, second);
        ptx::mma<__half>(c, halves, first, second);
    }
}
template <>
__device__ inline void mma<Int8>(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Warps that share jobs, each with some adjacent columns: so a few jobs keep all warps of a block
// busy equally long. The size divides WARPS. It does not depend on the number of tokens, nor does,
// therefore, the order of a sum.
struct Team {
    int size, count, number, part;  // count of teams, number of this one, part of this warp

    // warp: of the block, read from a lane, so that the compiler knows that warps do not diverge.
    __device__ Team(int size, int warp)
        : size(size), count(WARPS / size), number(warp / size), part(warp % size) {}
};

// Bytes from a row of x to the next in shared memory: whole stages, of zeros past the row's end,
// and an offset so that lanes read different banks. Weight: `Values` or `Codes`.
template <class Weight>
__host__ __device__ constexpr int x_pitch(int row_bytes) {
    constexpr int WHOLE = Weight::X_WIDTH;
    return (row_bytes + WHOLE - 1) / WHOLE * WHOLE + Weight::X_OFFSET;
}

// Addresses of what a lane multiplies with, or 0: of x of a token, and of one that has no column in
// the same product.
struct OwnRows {
    unsigned row, further;
};

// A weight [n, k] with values of x's type, read in stages of ROWS_ adjacent rows. 16 are those of a
// product, whose 8 columns are tokens. With 8, the second half of a stage's columns are its other
// rows, and each of 4 tokens has two of its columns: one for each half.
template <typename In, int ROWS_>
struct Values {
    using X = In;
    using Stored = In;

    static constexpr int ROWS = ROWS_;
    static constexpr int BYTES = STAGE;         // of a stage
    static constexpr int WIDTH = STAGE / ROWS;  // bytes of a row of x that it is multiplied with
    static constexpr int STRIDE = WIDTH;        // bytes to the next stage of the same rows
    static constexpr int RING = 1;              // a ring has 2, 3 or 4 times as many stages
    static constexpr int BLOCKS = 2;            // on a multiprocessor: one of each kernel
    static constexpr int X_WIDTH = 512, X_OFFSET = 64;  // see x_pitch
    static constexpr bool HALVES = ROWS == 8;
    static constexpr float X_FACTOR = 1.0f;  // of x in shared memory

    const In* values;
    int row_bytes;

    __device__ Values(const In* values, int k, const grouped::Table*)
        : values(values), row_bytes(k * static_cast<int>(sizeof(In))) {}

    __device__ const char* address(int row) const {
        return reinterpret_cast<const char*>(values) + static_cast<long long>(row) * row_bytes;
    }

    // A stage, from where its first row has its column `first`, in bytes of x.
    __device__ __forceinline__ void copy(unsigned slot, const char* from, int first) const {
        constexpr int CHUNKS = WIDTH / 16,
                      ROWS_AT_ONCE = 32 / CHUNKS;  // of a row, of a warp's copy
        const int lane = threadIdx.x % 32, row = lane / CHUNKS, chunk = lane % CHUNKS;
        const bool valid = first + chunk * 16 < row_bytes;
        const char* source = from + row * row_bytes + (valid ? chunk * 16 : 0);
#pragma unroll
        for (int i = 0; i < ROWS / ROWS_AT_ONCE; i++) {
            // Odd rows have the halves of each 128 bytes exchanged, for other banks.
            const int odd = ROWS_AT_ONCE == 1 ? i % 2 : row % 2;
            copy_once(slot + (i * ROWS_AT_ONCE + row) * WIDTH + (chunk ^ odd * 4) * 16, source,
                      valid);
            source += ROWS_AT_ONCE * row_bytes;
        }
    }

    // The token whose product with row l / 4 lane l has in sums[i] of `multiply`; with 16 rows, in
    // sums[i + 2] that with row l / 4 + 8.
    static __device__ __forceinline__ int token_of(int i) {
        const int q = threadIdx.x % 4;
        return HALVES ? q + 4 * i : 2 * q + i;
    }

    // From the address of the row of x of token l / 4, or 0.
    static __device__ __forceinline__ OwnRows own_rows(unsigned x) {
        if (!HALVES) return {x, 0};
        const int column = threadIdx.x % 32 / 4, token = column / 2;
        OwnRows own = {__shfl_sync(FULL_WARP, x, token * 4),
                       __shfl_sync(FULL_WARP, x, (token + 4) * 4)};
        if (own.row) own.row += column % 2 * (WIDTH / 2);
        if (own.further) own.further += column % 2 * (WIDTH / 2);
        return own;
    }

    // sums += the product of a stage with x.
    __device__ __forceinline__ void multiply(unsigned slot, const OwnRows& own, int first,
                                             float (&sums)[4]) const {
        const bool has_further = HALVES && __any_sync(FULL_WARP, own.further != 0);
#pragma unroll 1
        for (int set = 0; set <= has_further; set++) {
            float found[4];
            multiply_columns(slot, set ? own.further : own.row, first, found);
            if constexpr (HALVES) {
                sums[0] += set ? 0.0f : found[0] + found[3];
                sums[1] += set ? found[0] + found[3] : 0.0f;
            } else {
#pragma unroll
                for (int e = 0; e < 4; e++) sums[e] += found[e];
            }
        }
    }

   private:
    // What mma.sync computes from 16 rows, or from 8 with the two halves of their columns.
    __device__ __forceinline__ void multiply_columns(unsigned slot, unsigned x, int first,
                                                     float (&found)[4]) const {
        constexpr int COLUMNS = HALVES ? WIDTH / 2 : WIDTH;  // bytes
        const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
        slot += g * WIDTH;
        Sum<In> parts[4][4] = {};  // several, as each product waits for the one before
#pragma unroll
        for (int i = 0; i < COLUMNS / 64; i++) {
            const int chunk = i * 4 + q;
            const unsigned place = slot + (chunk ^ g % 2 * 4) * 16;
            const uint4 upper = load_shared(place);
            const uint4 lower = load_shared(place + (HALVES ? COLUMNS : 8 * WIDTH));
            const uint4 values = x ? load_shared(x + first + chunk * 16) : make_uint4(0, 0, 0, 0);
            const unsigned first_half[4] = {upper.x, lower.x, upper.y, lower.y};
            const unsigned second_half[4] = {upper.z, lower.z, upper.w, lower.w};
            mma<In>(parts[i % 2 * 2], first_half, values.x, values.y);
            mma<In>(parts[i % 2 * 2 + 1], second_half, values.z, values.w);
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
            found[e] = static_cast<float>(parts[0][e] + parts[1][e]) +
                       static_cast<float>(parts[2][e] + parts[3][e]);
    }
};

// A weight [n, k] in records R, each of which is a stage. n is a multiple of 16.
template <class R>
struct Codes {
    using X = __nv_bfloat16;
    using Stored = unsigned char;

    static constexpr int ROWS = grouped::ROWS;
    static constexpr int BYTES = R::BYTES;
    static constexpr int WIDTH = grouped::COLUMNS * static_cast<int>(sizeof(X));
    static constexpr int STRIDE = BYTES;
    // With two fifths of the bytes of values at least: a multiprocessor has two blocks.
    static constexpr int RING = (STAGE * 2 / 5 + BYTES - 1) / BYTES;
    // On a multiprocessor: two of a kernel, as codes keep more warps busy, and one of the next.
    static constexpr int BLOCKS = 3;
    static constexpr int X_WIDTH = WIDTH, X_OFFSET = 16;
    // Codes of e2m1 are decoded as their values times 2^-126. Sums of a group's products are scaled
    // instead of its codes, which takes half as many instructions; x, of up to 2^60, is larger by
    // X_FACTOR meanwhile, so that products are normal numbers.
    static constexpr bool SCALES_SUMS = R::CODES == grouped::E2M1;
    static constexpr float X_FACTOR = SCALES_SUMS ? 0x1p60f : 1.0f;

    const unsigned char* records;
    int k;
    grouped::Table table;

    __device__ Codes(const unsigned char* records, int k, const grouped::Table* from)
        : records(records), k(k) {
        if constexpr (R::CODES == grouped::TABLE) {
#pragma unroll
            for (int i = 0; i < 8; i++) table.words[i] = __ldg(from->words + i);
        }
    }

    // Of this lane's first 16 bytes.
    __device__ const char* address(int row) const {
        return reinterpret_cast<const char*>(records) + threadIdx.x % 32 * 16 +
               R::offset(static_cast<unsigned>(row) / ROWS, k);
    }

    __device__ __forceinline__ void copy(unsigned slot, const char* from, int) const {
        grouped::copy_record<BYTES>(slot + threadIdx.x % 32 * 16,
                                    reinterpret_cast<const unsigned char*>(from), threadIdx.x % 32);
    }

    static __device__ __forceinline__ int token_of(int i) { return threadIdx.x % 4 * 2 + i; }

    // The row of x that lane l loads for ldmatrix: that of token l % 8. If that token does not have
    // the expert, another token's row; its column of the product is not used.
    static __device__ __forceinline__ OwnRows own_rows(unsigned x) {
        const unsigned any = __reduce_max_sync(FULL_WARP, x);
        const unsigned row = __shfl_sync(FULL_WARP, x, threadIdx.x % 8 * 4);
        return {(row ? row : any) + threadIdx.x % 32 / 8 * 16, 0};
    }

    __device__ __forceinline__ void multiply(unsigned slot, const OwnRows& own, int first,
                                             float (&sums)[4]) const {
        const grouped::Reader<R> reader = {slot, static_cast<int>(threadIdx.x) % 32};
        grouped::Codes<R> codes[grouped::COLUMNS / (2 * grouped::STEP)];
        reader.read(codes);
        if constexpr (SCALES_SUMS) {
            multiply_groups(reader, codes, own.row + first, sums);
            return;
        }
        const auto scales = reader.scales();
        grouped::Scales of_group;
        float others[4] = {};  // of every second step, as each product waits for the one before
#pragma unroll
        for (int step = 0; step < grouped::COLUMNS / grouped::STEP; step += 2) {
            unsigned values[4];  // of x, of two steps
            ptx::load_matrices(values, own.row + first + step * grouped::STEP * 2);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if ((step + i) * grouped::STEP % R::GROUP == 0) of_group = scales.of(step + i);
                unsigned rows[4];
                grouped::operand<R>(codes[step / 2], i, of_group, table, rows);
                mma<X>(i ? others : sums, rows, values[2 * i], values[2 * i + 1]);
            }
        }
#pragma unroll
        for (int e = 0; e < 4; e++) sums[e] += others[e];
    }

   private:
    // sums += the products of a record's groups with x, each times its scale.
    __device__ __forceinline__ void multiply_groups(
        const grouped::Reader<R>& reader,
        const grouped::Codes<R> (&codes)[grouped::COLUMNS / (2 * grouped::STEP)], unsigned x,
        float (&sums)[4]) const {
        constexpr int STEPS = R::GROUP / grouped::STEP;  // of a group
        float of_group[4];
        unsigned values[4];  // of x, of two steps
#pragma unroll
        for (int step = 0; step < grouped::COLUMNS / grouped::STEP; step++) {
            if (step % 2 == 0) ptx::load_matrices(values, x + step * grouped::STEP * 2);
            if (step % STEPS == 0)
#pragma unroll
                for (int e = 0; e < 4; e++) of_group[e] = 0.0f;
            unsigned rows[4];
            grouped::decode<R>(codes[step / 2], step % 2, table, rows);
            mma<X>(of_group, rows, values[step % 2 * 2], values[step % 2 * 2 + 1]);
            if (step % STEPS < STEPS - 1) continue;
            float scales[2];  // of the rows l / 4 and l / 4 + 8
            Word<X>::unpack(reader.scales().word(step), scales);
#pragma unroll
            for (int e = 0; e < 4; e++) sums[e] += of_group[e] * scales[e / 2];
        }
    }
};

// Of a weight with values of a type, in stages of so many rows, or of one in records of a type.
template <typename Type, int ROWS>
struct WeightOfType {
    using type = Values<Type, ROWS>;
};
template <int CODES, int GROUP, bool MINIMUMS, bool UNITS, int ROWS>
struct WeightOfType<grouped::Records<CODES, GROUP, MINIMUMS, UNITS>, ROWS> {
    using type = Codes<grouped::Records<CODES, GROUP, MINIMUMS, UNITS>>;
};
template <typename Type, int ROWS>
using WeightOf = typename WeightOfType<Type, ROWS>::type;

// A warp's part of jobs, each a product with Weight::ROWS adjacent rows of a weight: those of its
// team, below `jobs`. BaseOf: from a job to the address of its rows.
template <class Weight, class BaseOf>
struct Stream {
    static constexpr int WIDTH = Weight::WIDTH;

    const Weight& weight;
    unsigned ring, end;  // of this warp
    int stages, first_step, steps;
    int job, jobs, next;
    const BaseOf& base_of;
    int step;            // of the next copy
    const char* source;  // of the next copy, unless it begins a job
    unsigned slot;       // of the next product, then of the next copy

    // row_bytes: of a row of x. Nothing is read before `start`.
    __device__ Stream(const Weight& weight, unsigned ring, int stages, int row_bytes,
                      const Team& team, const BaseOf& base_of)
        : weight(weight),
          ring(ring),
          end(ring + stages * Weight::BYTES),
          stages(stages),
          job(team.number),
          jobs(0),
          next(team.count),
          base_of(base_of),
          step(0),
          source(nullptr),
          slot(ring) {
        const int all = (row_bytes + WIDTH - 1) / WIDTH;
        const int most = (all + team.size - 1) / team.size;
        first_step = team.part * most;
        steps = max(0, min(most, all - team.part * most));  // 0: as many warps are not needed
    }

    // `start` reads no weights of a later one of `jobs`; -1 if it reads none.
    __device__ int last_at_start(int jobs) const {
        if (steps == 0 || job >= jobs) return -1;
        return min(job + (stages - 1) / steps * next, jobs - 1);
    }

    // Request the first stages.
    __device__ void start(int all_jobs) {
        jobs = steps > 0 ? all_jobs : 0;
#pragma unroll 1
        for (int s = 0; s < stages; s++) copy();
    }

    // A stage to the slot, and on to the next slot; after the last one an empty group of copies.
    __device__ __forceinline__ void copy() {
        if (job < jobs) {
            if (step == 0) source = base_of(job) + first_step * Weight::STRIDE;
            weight.copy(slot, source, (first_step + step) * WIDTH);
            source += Weight::STRIDE;
            if (++step == steps) {
                step = 0;
                job += next;
            }
        }
        ptx::commit_copies();
        slot += Weight::BYTES;
        if (slot == end) slot = ring;
    }

    // Right after `start`: wait for what this thread copied before it.
    __device__ void wait_for_earlier() const {
        if (stages == 4 * Weight::RING)
            ptx::wait_copies<4 * Weight::RING>();
        else if (stages == 3 * Weight::RING)
            ptx::wait_copies<3 * Weight::RING>();
        else
            ptx::wait_copies<2 * Weight::RING>();
        __syncwarp();
    }

    // The product of this part of the next job's rows with x, as Weight::token_of says. own: of
    // Weight::own_rows.
    __device__ void multiply(const OwnRows& own, float (&sums)[4]) {
#pragma unroll
        for (int e = 0; e < 4; e++) sums[e] = 0.0f;
        if (stages == 4 * Weight::RING)
            multiply_steps<4 * Weight::RING>(own, sums);
        else if (stages == 3 * Weight::RING)
            multiply_steps<3 * Weight::RING>(own, sums);
        else
            multiply_steps<2 * Weight::RING>(own, sums);
        if constexpr (Weight::X_FACTOR != 1.0f)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[e] *= 1.0f / Weight::X_FACTOR;
    }

   private:
    // STAGES: of the ring, a constant as waits take one. To choose among waits at each step took 5
    // % of the kernels' time.
    template <int STAGES>
    __device__ __forceinline__ void multiply_steps(const OwnRows& own, float (&sums)[4]) {
#pragma unroll 1
        for (int s = 0; s < steps; s++) {
            ptx::wait_copies<STAGES - 1>();
            __syncwarp();
            weight.multiply(slot, own, (first_step + s) * WIDTH, sums);
            __syncwarp();  // all lanes have read the stage
            copy();
        }
    }
};

}  // namespace few
