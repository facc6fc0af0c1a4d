// The experts of few tokens, as two kernels: gate and up, then down and the sum of a token's
// experts. See few.cuh. Blocks of both fit on a multiprocessor at once, so that the second kernel
// may read its weights while the first one still runs. With weights of 16 bits a block has a
// multiprocessor for itself, as `overlaps` of few_sizes.py says.
#include "moe/few.cuh"
#include "moe/gates.cuh"

namespace few {

// Dynamic shared memory: the warps' rings, rows of x, what tokens choose, and what is used to
// choose.
struct Memory {
    unsigned ring;  // of this warp
    char* x;
    Choice& choice;
    Scratch& scratch;  // until experts are chosen; then for partial sums
    float* ranks;      // of a warp's Ranking

    // ring_bytes: of a warp; padded_experts: of the router, for ranks.
    __device__ Memory(char* all, int ring_bytes, int x_bytes, int padded_experts = 0)
        : ring(shared_address(all) + threadIdx.x / 32 * ring_bytes),
          x(all + WARPS * ring_bytes),
          choice(*reinterpret_cast<Choice*>(x + x_bytes)),
          scratch(*reinterpret_cast<Scratch*>(&choice + 1)),
          ranks(reinterpret_cast<float*>(&scratch + 1) + threadIdx.x / 32 * padded_experts) {}
};

constexpr int PARTIAL_SUMS = 2304;  // floats

// A vector of x, times the factor of a weight.
template <class Weight>
__device__ uint4 multiplied(const uint4& raw) {
    if constexpr (Weight::X_FACTOR == 1.0f) return raw;
    float values[VECTOR<typename Weight::X>];
    unpack<typename Weight::X>(raw, values);
#pragma unroll
    for (float& value : values) value *= Weight::X_FACTOR;
    return pack<typename Weight::X>(values);
}

// A layer's gate and up. Weight: with 16 rows of a stage.
template <class Weight, typename T>
struct GateUp {
    using X = typename Weight::X;

    const Weight& weight;        // [E, 2 * width, hidden], rows of gate and up by turns of 8
    const float* weight_scales;  // [E * 2 * width] of 8-bit values, otherwise null
    const T* bias;               // [E * 2 * width], or null
    T* inner;                    // [T * k, width]
    int hidden, width, gate;

    // By all blocks, which hand on what tokens choose. x_scales [T]: of x in 8 bits. A job is 8
    // columns of an expert's inner layer. Teams leave the sums of some jobs in shared memory, from
    // where a thread takes those of one column and token.
    template <int PER_LANE>
    __device__ void run(const Memory& at, const X* x, const float* x_scales, const float* logits,
                        const RouterParams& router, Choice* handed_on, int num_tokens, int stages,
                        int team_size) const {
        Choice& choice = at.choice;
        const int row_bytes = hidden * static_cast<int>(sizeof(X)),
                  pitch = x_pitch<Weight>(row_bytes), top_k = router.all_top_k();
        // Read from a lane, so that the compiler knows that warps do not diverge.
        const int warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
        const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
        const int block = blockIdx.x, blocks = gridDim.x;
        const Divisor units(width / 8);
        const auto jobs_of = [&](int experts) {
            return (experts * units.number - block + blocks - 1) / blocks;
        };
        // One token's experts are in the order of their ranks: the first ones are enough to begin.
        const bool is_single = num_tokens == 1;
        int* const first_experts = at.scratch.chosen[warp];
        const int* experts = is_single ? first_experts : choice.experts;
        const auto first_row = [&](int own) {
            const int job = block + own * blocks;
            return experts[units.quotient(job)] * 2 * width + units.remainder(job) * 16;
        };
        const auto base_of = [&](int own) { return weight.address(first_row(own)); };
        const Team team(team_size, warp);
        Stream<Weight, decltype(base_of)> stream(weight, at.ring, stages, row_bytes, team, base_of);
        int jobs = jobs_of(top_k);
        const int last = stream.last_at_start(jobs);
        const int at_start = last < 0 ? 0 : units.quotient(block + last * blocks) + 1;
        const float* const own_logits = logits + min(warp, num_tokens - 1) * router.stride;
        const auto logit = [&](int column) { return load_l2(own_logits + column); };
        pdl_wait();
        copy_x(x, at.x, num_tokens, row_bytes, pitch);
        Ranking<PER_LANE> ranking(logit, router, at.ranks);
        if (is_single) {
            choose_first(ranking, router, at_start, first_experts);
        } else {
            choose_all(ranking, logit, router, num_tokens, choice, at.scratch);
            jobs = jobs_of(choice.count);
        }
        stream.start(jobs);
        if (is_single && warp == 0) choose_rest(ranking, logit, router, at_start, choice);
        stream.wait_for_earlier();  // for x
        if constexpr (Weight::X_FACTOR != 1.0f) multiply_x(at.x, num_tokens, pitch);
        __syncthreads();
        experts = choice.experts;
        hand_on(choice, handed_on);
        const OwnRows own_x =
            Weight::own_rows(g < num_tokens ? shared_address(at.x + g * pitch) : 0);

        float* const partial =
            reinterpret_cast<float*>(&at.scratch);  // [jobs, team_size, 16, tokens]
        const int part_floats = 16 * num_tokens, job_floats = team_size * part_floats + 8;
        const int at_once = min(THREADS / (8 * num_tokens), PARTIAL_SUMS / job_floats);
        const int place = threadIdx.x / 8, column = threadIdx.x % 8;
        const int finished = place / num_tokens, token = place % num_tokens;
        int job = team.number;
#pragma unroll 1
        for (int start = 0; start < jobs; start += at_once) {
            const int end = min(start + at_once, jobs), own = start + finished;
            const bool finishes = finished < at_once && own < end;
            float scales[2] = {1.0f, 1.0f}, added[2] = {};  // read before they are needed
            const float factor = sizeof(X) == 1 && finishes ? load_l2(x_scales + token) : 1.0f;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = finishes ? first_row(own) + 8 * i + column : 0;
                if (sizeof(X) == 1) scales[i] = __ldg(weight_scales + row);
                if (bias) added[i] = static_cast<float>(bias[row]);
            }
#pragma unroll 1
            for (; job < end; job += team.count) {
                float sums[4];
                stream.multiply(own_x, sums);
                float* const to =
                    partial + (job - start) * job_floats + team.part * part_floats + g * num_tokens;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (2 * q + i >= num_tokens) continue;
                    to[2 * q + i] = sums[i];
                    to[8 * num_tokens + 2 * q + i] = sums[2 + i];
                }
            }
            __syncthreads();
            if (finishes) {
                const float* const from =
                    partial + finished * job_floats + column * num_tokens + token;
                float sums[2] = {};
#pragma unroll 1
                for (int part = 0; part < team_size; part++)
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        sums[i] += from[part * part_floats + i * 8 * num_tokens];
                const int number = block + own * blocks;
                const int rank = choice.ranks[units.quotient(number)][token];
                const float a = sums[0] * (factor * scales[0]) + added[0];
                const float b = sums[1] * (factor * scales[1]) + added[1];
                if (rank >= 0)
                    inner[(token * top_k + rank) * width + units.remainder(number) * 8 + column] =
                        narrow<T>(gate == CLAMPED ? clamped_swiglu(a, b) : silu_mul(a, b));
            }
            if (end < jobs) __syncthreads();
        }
    }

   private:
    // Rows of x -> shared memory, with zeros past their ends; they arrive while experts are chosen.
    static __device__ void copy_x(const X* x, char* to, int num_tokens, int row_bytes, int pitch) {
#pragma unroll 1
        for (int token = 0; token < num_tokens; token++) {
            const char* const row = reinterpret_cast<const char*>(x) + token * row_bytes;
#pragma unroll 1
            for (int column = threadIdx.x * 16; column < pitch; column += THREADS * 16) {
                const bool valid = column < row_bytes;
                ptx::copy_async(shared_address(to + token * pitch + column),
                                row + (valid ? column : 0), valid);
            }
        }
        ptx::commit_copies();
    }

    // What this thread has copied of x, times its factor.
    static __device__ void multiply_x(char* x, int num_tokens, int pitch) {
#pragma unroll 1
        for (int token = 0; token < num_tokens; token++)
#pragma unroll 1
            for (int column = threadIdx.x * 16; column < pitch; column += THREADS * 16) {
                uint4& raw = *reinterpret_cast<uint4*>(x + token * pitch + column);
                raw = multiplied<Weight>(raw);
            }
    }
};

}  // namespace few

// inner[t * k + r] = gate(x[t] @ gate_up[the r-th expert of t]^T + bias), for up to TOKENS tokens;
// k is all_top_k() of the router.
//
//   x [T, hidden], x_scales [T] of 8-bit values, otherwise null
//   logits [T, stride] and what follows: see RouterParams
//   choice   for few_down
//   weight and what follows: see GateUp; gate SILU or CLAMPED, width a multiple of 8, and rows of x
//          and of values of 16 bytes
//   stages     of a warp's ring: 2, 3 or 4 times Weight::RING
//   team_size  warps that share a job, which divides WARPS
//   table      of codes that are indices, otherwise null
//
// Type: of x and the weight; or the weight is in these grouped::Records and x in bfloat16. Threads:
// THREADS. Dynamic shared memory: WARPS * stages * Weight::BYTES, T * x_pitch(of hidden),
// sizeof(Choice), and the larger of PARTIAL_SUMS floats and sizeof(Scratch) with, if
// there are groups, num_experts floats, rounded up to 32, for each warp.
template <typename Type, typename T, int PER_LANE>
__global__ void __launch_bounds__(few::THREADS, (few::WeightOf<Type, 16>::BLOCKS))
    few_gate_up(const typename few::WeightOf<Type, 16>::X* x, const float* x_scales,
                const float* logits, int stride, int parts, int rows, const float* router_bias,
                const float* select_bias, int shared_gate, int num_shared, int num_experts,
                int top_k, int flags, int num_groups, int top_groups, float scale,
                few::Choice* choice, const typename few::WeightOf<Type, 16>::Stored* weight,
                const float* weight_scales, const T* bias, T* inner, int num_tokens, int hidden,
                int width, int gate, int stages, int team_size, const grouped::Table* table) {
    using namespace few;
    using Weight = WeightOf<Type, 16>;
    extern __shared__ __align__(128) char memory[];
    const RouterParams router = {router_bias, select_bias, num_experts, top_k,      parts,
                                 rows,        stride,      flags,       num_groups, top_groups,
                                 shared_gate, num_shared,  scale};
    const int row_bytes = hidden * static_cast<int>(sizeof(*x)), pitch = x_pitch<Weight>(row_bytes);
    const Memory at(memory, stages * Weight::BYTES, num_tokens * pitch, router.padded_experts());
    const Weight matrix(weight, hidden, table);
    const GateUp<Weight, T> layer = {matrix, weight_scales, bias, inner, hidden, width, gate};
    layer.template run<PER_LANE>(at, x, x_scales, logits, router, choice, num_tokens, stages,
                                 team_size);
}

namespace few {

// Vectors of T of a row that each lane reads at once.
constexpr int AT_ONCE = 4;

// Vectors at `from` + lane and so on -> raw; zeros past the row's end.
template <typename T>
__device__ void read_vectors(const T* row, int from, int width, uint4 (&raw)[AT_ONCE]) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const int column = from + (i * 32 + static_cast<int>(threadIdx.x) % 32) * VECTOR<T>;
        raw[i] = column < width ? load_vector(row + column) : make_uint4(0, 0, 0, 0);
    }
}

// The largest magnitude of a row, as bits, by a warp.
template <typename T>
__device__ unsigned largest_of(const T* row, int width, uint4 (&raw)[AT_ONCE]) {
    unsigned pairs = 0;  // of 15 bits each, which compare as magnitudes do
#pragma unroll 1
    for (int from = 0; from < width; from += AT_ONCE * 32 * VECTOR<T>) {
        read_vectors(row, from, width, raw);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            pairs = __vmaxu2(pairs, raw[i].x & 0x7fff7fffu);
            pairs = __vmaxu2(pairs, raw[i].y & 0x7fff7fffu);
            pairs = __vmaxu2(pairs, raw[i].z & 0x7fff7fffu);
            pairs = __vmaxu2(pairs, raw[i].w & 0x7fff7fffu);
        }
    }
    float both[2];
    Word<T>::unpack(pairs, both);
    return __reduce_max_sync(FULL_WARP, max(magnitude(both[0]), magnitude(both[1])));
}

// Rows of T -> shared memory, as they are or quantised by rows, times the weight's factor; zeros
// past their ends. A warp for each row. `scales` has a float for each row.
template <class Weight, typename T>
__device__ void load_rows(const T* rows, int count, int width, char* to, int pitch, float* scales) {
    using In = typename Weight::X;
    constexpr int N = VECTOR<T>, STEP = AT_ONCE * 32 * N;
    const int lane = threadIdx.x % 32, columns = pitch / static_cast<int>(sizeof(In));
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < count; row += WARPS) {
        const T* const source = rows + row * width;
        In* const target = reinterpret_cast<In*>(to + row * pitch);
        uint4 raw[AT_ONCE];
        if constexpr (SAME<In, T>) {
#pragma unroll 1
            for (int from = 0; from < columns; from += STEP) {
                read_vectors(source, from, width, raw);
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    const int column = from + (i * 32 + lane) * N;
                    if (column < columns) store_vector(target + column, multiplied<Weight>(raw[i]));
                }
            }
        } else {
            const RowScale<In> scale(largest_of(source, width, raw));
            if (lane == 0) scales[row] = scale.scale;
#pragma unroll 1
            for (int from = 0; from < columns; from += STEP) {
                if (width > STEP) read_vectors(source, from, width, raw);
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    const int column = from + (i * 32 + lane) * N;
                    float values[N];
                    unpack<T>(raw[i], values);
                    if (column < columns) store_bytes<T>(target + column, scale, values);
                }
            }
        }
    }
}

}  // namespace few

// total[t] = (adds: total[t]) + sum over r of the weight of the r-th expert of t * (inner[t * top_k
// + r] @ down[that expert]^T + bias), in this order, + that of the shared expert * shared[t] unless
// that is null.
//
//   inner [T * top_k, width], quantised here if the weight has 8 bits
//   from    what tokens choose, from few_gate_up
//   weight [E, hidden, width], weight_scales [E * hidden], bias [E * hidden] or null
//   shared, total [T, hidden], hidden a multiple of ROWS: 8, or 16 of a weight in records
//
// Type, stages and what follows: see few_gate_up. Threads: THREADS. Dynamic shared memory: WARPS *
// stages * Weight::BYTES, T * top_k * (x_pitch(of width) + 4), (1 + team_size) * 4 * ROWS bytes for
// each pair of a token and its expert and each ROWS rows of a block, and sizeof(Choice).
template <typename Type, typename T>
__global__ void __launch_bounds__(few::THREADS, (few::WeightOf<Type, 8>::BLOCKS))
    few_down(const T* inner, const few::Choice* from,
             const typename few::WeightOf<Type, 8>::Stored* weight, const float* weight_scales,
             const T* bias, const T* shared, T* total, int adds, int num_tokens, int top_k,
             int hidden, int width, int stages, int team_size, const grouped::Table* table) {
    using namespace few;
    using Weight = WeightOf<Type, 8>;
    using X = typename Weight::X;
    constexpr int ROWS = Weight::ROWS;
    extern __shared__ __align__(128) char memory[];
    const int row_bytes = width * static_cast<int>(sizeof(X)), pitch = x_pitch<Weight>(row_bytes);
    const int pairs = num_tokens * top_k, blocks = gridDim.x;
    // ROWS rows of the weights at a time: those of this block, at most and actually.
    const int units = hidden / ROWS, most = (units + blocks - 1) / blocks;
    const int own_units = (units - static_cast<int>(blockIdx.x) + blocks - 1) / blocks;
    const int x_bytes =
        (pairs * pitch + pairs * 4 + (1 + team_size) * most * pairs * 4 * ROWS + 15) / 16 * 16;
    const Memory at(memory, stages * Weight::BYTES, x_bytes);
    const Weight matrix(weight, width, table);
    float* const scales = reinterpret_cast<float*>(at.x + pairs * pitch);
    float* const row_scales = scales + pairs;                 // of weights, [jobs, ROWS]
    float* const sums_of = row_scales + most * pairs * ROWS;  // [team_size, most, pairs, ROWS]

    take_over(from, at.choice);
    const Choice& choice = at.choice;
    const int g = threadIdx.x % 32 / 4;
    const Divisor count(choice.count);
    const int jobs = own_units * choice.count;
    const auto first_row = [&](int job) {
        const int unit = blockIdx.x + count.quotient(job) * blocks;
        return choice.experts[count.remainder(job)] * hidden + unit * ROWS;
    };
    const auto base_of = [&](int job) { return matrix.address(first_row(job)); };
    // No kernel writes weights: they are read while the preceding one ends.
    const Team team(team_size, __shfl_sync(FULL_WARP, threadIdx.x / 32, 0));
    Stream<Weight, decltype(base_of)> stream(matrix, at.ring, stages, row_bytes, team, base_of);
    stream.start(jobs);
    if constexpr (sizeof(X) == 1) {
#pragma unroll 1
        for (int i = threadIdx.x; i < jobs * ROWS; i += THREADS)
            row_scales[i] = __ldg(weight_scales + first_row(i / ROWS) + i % ROWS);
    }
    pdl_wait();
    pdl_launch_dependents();
    const auto place_of = [&](int i) {
        const int row = i % ROWS, token = i / ROWS % num_tokens, unit = i / ROWS / num_tokens;
        return static_cast<long long>(token) * hidden + (blockIdx.x + unit * blocks) * ROWS + row;
    };
    const auto added_of = [&](int i) {
        return adds ? static_cast<float>(total[place_of(i)]) : 0.0f;
    };
    // Of this thread's first result, loaded while the product is computed.
    const int results = own_units * num_tokens * ROWS;
    const float added_first = threadIdx.x < results ? added_of(threadIdx.x) : 0.0f;
    load_rows<Weight, T>(inner, pairs, width, at.x, pitch, scales);
    __syncthreads();

#pragma unroll 1
    for (int job = team.number; job < jobs; job += team.count) {
        const int row = first_row(job) + g, which = count.remainder(job);
        float added[ROWS / 8];
#pragma unroll
        for (int half = 0; half < ROWS / 8; half++)
            added[half] = bias && team.part == 0 ? static_cast<float>(bias[row + 8 * half]) : 0.0f;
        const int own = choice.ranks[which][g];
        float sums[4];
        stream.multiply(
            Weight::own_rows(own < 0 ? 0 : shared_address(at.x + (g * top_k + own) * pitch)), sums);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = Weight::token_of(i), rank = choice.ranks[which][token];
            if (rank < 0) continue;
            const int pair = token * top_k + rank;
            const int unit = team.part * most + count.quotient(job);
#pragma unroll
            for (int half = 0; half < ROWS / 8; half++) {
                const int of_unit = g + 8 * half;
                const float both =
                    sizeof(X) == 1 ? row_scales[job * ROWS + of_unit] * scales[pair] : 1.0f;
                sums_of[(unit * pairs + pair) * ROWS + of_unit] =
                    sums[i + 2 * half] * both + added[half];
            }
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < results; i += THREADS) {
        const int row = i % ROWS, token = i / ROWS % num_tokens, unit = i / ROWS / num_tokens;
        const float* const parts_of = sums_of + (unit * pairs + token * top_k) * ROWS + row;
        float sum = i == threadIdx.x ? added_first : added_of(i);
#pragma unroll 1
        for (int r = 0; r < top_k; r++) {
            float output = parts_of[r * ROWS];
#pragma unroll 1
            for (int part = 1; part < team_size; part++)
                output += parts_of[(part * most * pairs + r) * ROWS];
            sum += choice.weights[token][r] * output;
        }
        const long long place = place_of(i);
        if (shared) sum += choice.weights[token][top_k] * static_cast<float>(shared[place]);
        total[place] = narrow<T>(sum);
    }
}
