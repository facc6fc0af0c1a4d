// The experts of few tokens, as two kernels: gate and up, then down and the sum of a token's
// experts. See few.cuh. Blocks of both fit on a multiprocessor at once, so that the second kernel
// reads its weights while the first one still runs.
#include "linear/gemm_hopper.cuh"
#include "moe/few.cuh"
#include "moe/gates.cuh"

namespace few {

// Dynamic shared memory: the warps' rings, rows of x, what tokens choose, and what is used
// meanwhile.
struct Memory {
    char* all_rings;
    unsigned ring;  // of this warp
    char* x;
    Choice& choice;
    Scratch& scratch;
    float* rest;

    __device__ Memory(char* all, int stages, int x_bytes)
        : all_rings(all),
          ring(shared_address(all) + threadIdx.x / 32 * stages * STAGE),
          x(all + WARPS * stages * STAGE),
          choice(*reinterpret_cast<Choice*>(x + x_bytes)),
          scratch(*reinterpret_cast<Scratch*>(&choice + 1)),
          rest(reinterpret_cast<float*>(&scratch + 1)) {}
};

// A layer's gate and up.
template <typename In, typename T>
struct GateUp {
    const In* weight;            // [E, 2 * width, hidden], rows of gate and up by turns of 8
    const float* weight_scales;  // [E * 2 * width] of 8-bit values, otherwise null
    const T* bias;               // [E * 2 * width], or null
    T* inner;                    // [T * k, width]
    int hidden, width, gate;

    // By all blocks; `scale_of` returns the scale of a token's x, if it has 8 bits.
    template <class ScaleOf>
    __device__ void run(const Memory& at, int num_tokens, int top_k, int stages,
                        const ScaleOf& scale_of) const {
        const Choice& choice = at.choice;
        const int row_bytes = hidden * static_cast<int>(sizeof(In)), pitch = x_pitch(row_bytes);
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
        const Divisor units(width / 8);
        const int jobs = choice.count * units.number;
        const auto first_row = [&](int job) {
            return choice.experts[units.quotient(job)] * 2 * width + units.remainder(job) * 16;
        };
        const auto base_of = [&](int job) {
            return reinterpret_cast<const char*>(weight) +
                   static_cast<long long>(first_row(job)) * row_bytes;
        };
        const int first = warp * gridDim.x + blockIdx.x, next = WARPS * gridDim.x;
        Stream<16, decltype(base_of)> stream(at.ring, stages, row_bytes, first, jobs, next,
                                             base_of);
        const unsigned own_x = g < num_tokens ? shared_address(at.x + g * pitch) : 0;
#pragma unroll 1
        for (int job = first; job < jobs; job += next) {
            const int row = first_row(job) + g, which = units.quotient(job);
            float scales[2] = {1.0f, 1.0f}, added[2] = {}, sums[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (sizeof(In) == 1) scales[i] = __ldg(weight_scales + row + 8 * i);
                if (bias) added[i] = static_cast<float>(bias[row + 8 * i]);
            }
            stream.template multiply<In>(own_x, sums);
            const int column = units.remainder(job) * 8 + g;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int token = 2 * q + i, rank = choice.ranks[which][token];
                if (rank < 0) continue;
                const float factor = sizeof(In) == 1 ? scale_of(token) : 1.0f;
                const float a = sums[i] * (factor * scales[0]) + added[0];
                const float b = sums[2 + i] * (factor * scales[1]) + added[1];
                inner[(token * top_k + rank) * width + column] =
                    narrow<T>(gate == CLAMPED ? clamped_swiglu(a, b) : silu_mul(a, b));
            }
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
//          and the weight of 16 bytes
//
// Threads: THREADS. Dynamic shared memory: WARPS * stages * STAGE, T * x_pitch(of hidden),
// sizeof(Choice), sizeof(Scratch), and num_experts floats, rounded up to 32, for each warp if there
// are groups.
template <typename In, typename T, int PER_LANE>
__global__ void __launch_bounds__(few::THREADS, 2)
    few_gate_up(const In* x, const float* x_scales, const float* logits, int stride, int parts,
                int rows, const float* router_bias, const float* select_bias, int shared_gate,
                int num_shared, int num_experts, int top_k, int flags, int num_groups,
                int top_groups, float scale, few::Choice* choice, const In* weight,
                const float* weight_scales, const T* bias, T* inner, int num_tokens, int hidden,
                int width, int gate, int stages) {
    using namespace few;
    extern __shared__ __align__(128) char memory[];
    const RouterParams router = {router_bias, select_bias, num_experts, top_k,      parts,
                                 rows,        stride,      flags,       num_groups, top_groups,
                                 shared_gate, num_shared,  scale};
    const int row_bytes = hidden * static_cast<int>(sizeof(In)), pitch = x_pitch(row_bytes);
    const Memory at(memory, stages, num_tokens * pitch);
    pdl_wait();
#pragma unroll 1
    for (int i = threadIdx.x; i < num_tokens * (pitch / 16); i += THREADS) {
        const int token = i / (pitch / 16), column = i % (pitch / 16) * 16;
        const char* const source =
            reinterpret_cast<const char*>(x) + static_cast<long long>(token) * row_bytes + column;
        store_vector(at.x + token * pitch + column,
                     column < row_bytes ? load_vector(source) : make_uint4(0, 0, 0, 0));
    }
    const auto logit = [&](int token, int column) {
        return load_l2(logits + token * stride + column);
    };
    choose_all<PER_LANE>(logit, router, num_tokens, at.choice, at.scratch, at.rest);
    hand_on(at.choice, choice);
    const GateUp<In, T> layer = {weight, weight_scales, bias, inner, hidden, width, gate};
    layer.run(at, num_tokens, router.all_top_k(), stages,
              [&](int token) { return load_l2(x_scales + token); });
}

namespace few {

constexpr int CLUSTER = 8;
constexpr int ROUTER_ROWS = 16;  // of a block

// Sums over a warp of N values of each lane, a power of two of at most 16: lane l has that with the
// number that the upper bits of l are.
template <int N>
__device__ float warp_sums(float (&values)[N]) {
    constexpr int STEPS = N == 16 ? 4 : N == 8 ? 3 : N == 4 ? 2 : N == 2 ? 1 : 0;
    static_assert(1 << STEPS == N, "a power of two");
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int kept = N >> (step + 1), distance = 16 >> step;
        const bool upper = threadIdx.x & distance;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            if (i >= kept) continue;
            const float sent = upper ? values[i] : values[i + kept];
            values[i] =
                (upper ? values[i + kept] : values[i]) + __shfl_xor_sync(FULL_WARP, sent, distance);
        }
    }
    float sum = values[0];
#pragma unroll
    for (int distance = 16 >> STEPS; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(FULL_WARP, sum, distance);
    return sum;
}

__device__ inline void send(float* place, int rank, float value) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.f32 [there], %2;\n"
        "}" ::"r"(shared_address(place)),
        "r"(rank), "f"(value)
        : "memory");
}

// x of a mixture: the norm of a residual stream; see score_experts (few_scores_hopper.cu).
template <typename T, typename R>
struct NormedStream {
    const T* x;
    const R* residual;
    const float* norm;
    R* total;
    T* out;
    int hidden;
    float eps;
};

// What blocks of a cluster exchange, in shared memory.
struct Exchange {
    float logits[TOKENS][CLUSTER * ROUTER_ROWS];
    float scales[TOKENS];  // of x in 8 bits
    float products[WARPS][ROUTER_ROWS];
    unsigned maxima[WARPS];
    float squares[32];
};

// The norm of each token -> rows of x in shared memory, and its products with `count` rows of the
// router, which `rows` has in shared memory, -> the logits from `first_logit` on in all blocks of
// the cluster. The copies of `rows` may be on their way.
template <typename In, typename T, typename R, int VECTORS, bool ADD>
__device__ void score_rows(const NormedStream<T, R>& stream, const T* rows, int first_logit,
                           int count, int num_tokens, char* x, Exchange& to) {
    constexpr int N = VECTOR<T>, M = VECTOR<R>, PARTS = N / M;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, hidden = stream.hidden;
    const int row_bytes = hidden * static_cast<int>(sizeof(In)), pitch = x_pitch(row_bytes);
    const bool writes = blockIdx.x == 0;
    const auto column_of = [&](int i) { return (i * THREADS + static_cast<int>(threadIdx.x)) * N; };
    float norms[VECTORS][N];
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (column_of(i) < hidden) load_floats(stream.norm + column_of(i), norms[i]);
    pdl_wait();
#pragma unroll 1
    for (int token = 0; token < num_tokens; token++) {
        const int start = token * hidden;
        float values[VECTORS][N] = {}, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int column = column_of(i);
            if (column >= hidden) continue;
            unpack<T>(load_vector(stream.x + start + column), values[i]);
            if constexpr (ADD) {
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    const int place = start + column + part * M;
                    float more[M];
                    unpack<R>(load_vector(stream.residual + place), more);
                    float (&sum)[M] = *reinterpret_cast<float (*)[M]>(values[i] + part * M);
#pragma unroll
                    for (int j = 0; j < M; j++) sum[j] += more[j];
                    if (writes) store_vector(stream.total + place, pack<R>(sum));
                }
            }
#pragma unroll
            for (int j = 0; j < N; j++) squares += values[i][j] * values[i][j];
        }
        if (token == 0) ptx::wait_copies<0>();  // of this thread; a barrier follows
        const float scale = rsqrtf(block_sum(squares, to.squares) / hidden + stream.eps);

        char* const x_row = x + token * pitch;
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (column_of(i) >= hidden) continue;
#pragma unroll
            for (int j = 0; j < N; j++) values[i][j] *= scale * norms[i][j];
            const uint4 rounded = pack<T>(values[i]);
            if (writes) store_vector(stream.out + start + column_of(i), rounded);
            unpack<T>(rounded, values[i]);
            if (SAME<In, T>) store_vector(x_row + column_of(i) * sizeof(T), rounded);
#pragma unroll
            for (int j = 0; j < N; j++) largest = max(largest, magnitude(values[i][j]));
        }
        float sums[ROUTER_ROWS] = {};
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (column_of(i) >= hidden) continue;
#pragma unroll
            for (int r = 0; r < ROUTER_ROWS; r++) {
                float w[N];  // of a row that does not exist those of the first
                unpack<T>(load_vector(rows + (r < count ? r : 0) * hidden + column_of(i)), w);
#pragma unroll
                for (int j = 0; j < N; j++) sums[r] += values[i][j] * w[j];
            }
        }
        const float sum = warp_sums(sums);
        constexpr int LANES = 32 / ROUTER_ROWS;  // with the same sum
        if (lane % LANES == 0) to.products[warp][lane / LANES] = sum;
        largest = __reduce_max_sync(FULL_WARP, largest);
        if (lane == 0) to.maxima[warp] = largest;
        __syncthreads();
        if (threadIdx.x < CLUSTER * ROUTER_ROWS) {
            const int rank = threadIdx.x / ROUTER_ROWS, row = threadIdx.x % ROUTER_ROWS;
            float logit = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) logit += to.products[w][row];
            if (row < count) send(&to.logits[token][first_logit + row], rank, logit);
        }
        if constexpr (!SAME<In, T>) {
#pragma unroll
            for (int w = 0; w < WARPS; w++) largest = max(largest, to.maxima[w]);
            const RowScale<In> quantized(largest);
            if (threadIdx.x == 0) to.scales[token] = quantized.scale;
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                if (column_of(i) < hidden)
                    store_bytes<T>(reinterpret_cast<In*>(x_row) + column_of(i), quantized,
                                   values[i]);
        }
#pragma unroll 1
        for (int i = row_bytes + threadIdx.x * 16; i < pitch; i += THREADS * 16)
            store_vector(x_row + i, make_uint4(0, 0, 0, 0));
    }
}

}  // namespace few

// few_gate_up from the residual stream on: x is its norm, and logits are the products of that,
// rounded to T, with a router [columns, hidden] of up to CLUSTER * ROUTER_ROWS rows, columns =
// parts * rows. Each block multiplies with some of them, and blocks of a cluster exchange what they
// have.
//
//   x and what follows: see score_experts (few_scores_hopper.cu), with `residual` and `total`
//          if ADD
//
// Dynamic shared memory: as of few_gate_up, and sizeof(Exchange). The rings have room for the rows
// of the router of a block.
template <typename In, typename T, typename R, int VECTORS, bool ADD, int PER_LANE>
__global__ void __cluster_dims__(few::CLUSTER, 1, 1) __launch_bounds__(few::THREADS, 2)
    few_scored_gate_up(const T* x, const R* residual, const float* norm, R* total, T* out,
                       float eps, const T* router_weight, int parts, int rows,
                       const float* router_bias, const float* select_bias, int shared_gate,
                       int num_shared, int num_experts, int top_k, int flags, int num_groups,
                       int top_groups, float scale, few::Choice* choice, const In* weight,
                       const float* weight_scales, const T* bias, T* inner, int num_tokens,
                       int hidden, int width, int gate, int stages) {
    using namespace few;
    extern __shared__ __align__(128) char memory[];
    const RouterParams router = {router_bias, select_bias, num_experts, top_k,      parts,
                                 rows,        0,           flags,       num_groups, top_groups,
                                 shared_gate, num_shared,  scale};
    const int pitch = x_pitch(hidden * static_cast<int>(sizeof(In)));
    const Memory at(memory, stages, num_tokens * pitch);
    Exchange& exchange = *reinterpret_cast<Exchange*>(at.rest);
    // A block must have started before anything is sent to it.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    const int own_rows = (parts * rows + CLUSTER - 1) / CLUSTER;
    const int first_logit = gemm::rank_in_cluster() * own_rows;
    const int count = max(min(parts * rows - first_logit, own_rows), 0);
    // No kernel writes weights: they are read while the preceding one ends.
    const char* const source = reinterpret_cast<const char*>(router_weight + first_logit * hidden);
#pragma unroll 4
    for (int i = threadIdx.x * 16; i < count * hidden * static_cast<int>(sizeof(T));
         i += THREADS * 16)
        ptx::copy_async(shared_address(at.all_rings + i), source + i, true);
    ptx::commit_copies();
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    const NormedStream<T, R> stream = {x, residual, norm, total, out, hidden, eps};
    score_rows<In, T, R, VECTORS, ADD>(stream, reinterpret_cast<const T*>(at.all_rings),
                                       first_logit, count, num_tokens, at.x, exchange);
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
    const auto logit = [&](int token, int column) { return exchange.logits[token][column]; };
    float* const ranks = reinterpret_cast<float*>(&exchange + 1);
    choose_all<PER_LANE>(logit, router, num_tokens, at.choice, at.scratch, ranks);
    hand_on(at.choice, choice);
    const GateUp<In, T> layer = {weight, weight_scales, bias, inner, hidden, width, gate};
    layer.run(at, num_tokens, router.all_top_k(), stages,
              [&](int token) { return exchange.scales[token]; });
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

// Rows of T -> shared memory, as they are or quantised by rows; zeros past their ends. A warp for
// each row. `scales` has a float for each row.
template <typename In, typename T>
__device__ void load_rows(const T* rows, int count, int width, char* to, int pitch, float* scales) {
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
                    if (column < columns) store_vector(target + column, raw[i]);
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
//   shared, total [T, hidden], hidden a multiple of 8
//
// Threads: THREADS. Dynamic shared memory: WARPS * stages * STAGE, T * top_k * (x_pitch(of width) +
// 4), 64 bytes for each pair of a token and its expert and each 8 rows of a block, and
// sizeof(Choice).
template <typename In, typename T>
__global__ void __launch_bounds__(few::THREADS, 2)
    few_down(const T* inner, const few::Choice* from, const In* weight, const float* weight_scales,
             const T* bias, const T* shared, T* total, int adds, int num_tokens, int top_k,
             int hidden, int width, int stages) {
    using namespace few;
    extern __shared__ __align__(128) char memory[];
    const int row_bytes = width * static_cast<int>(sizeof(In)), pitch = x_pitch(row_bytes);
    const int pairs = num_tokens * top_k, blocks = gridDim.x;
    // Eight rows of the weights at a time: those of this block, at most and actually.
    const int units = hidden / 8, most = (units + blocks - 1) / blocks;
    const int own_units = (units - static_cast<int>(blockIdx.x) + blocks - 1) / blocks;
    const int x_bytes = (pairs * pitch + pairs * 4 + 2 * most * pairs * 32 + 15) / 16 * 16;
    const Memory at(memory, stages, x_bytes);
    float* const scales = reinterpret_cast<float*>(at.x + pairs * pitch);
    float* const sums_of = scales + pairs;                 // [own_units, pairs, 8]
    float* const row_scales = sums_of + most * pairs * 8;  // of weights, [jobs, 8]

    take_over(from, at.choice);
    const Choice& choice = at.choice;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const Divisor count(choice.count);
    const int jobs = own_units * choice.count;
    const auto first_row = [&](int job) {
        const int unit = blockIdx.x + count.quotient(job) * blocks;
        return choice.experts[count.remainder(job)] * hidden + unit * 8;
    };
    const auto base_of = [&](int job) {
        return reinterpret_cast<const char*>(weight) +
               static_cast<long long>(first_row(job)) * row_bytes;
    };
    // No kernel writes weights: they are read while the preceding one ends.
    Stream<8, decltype(base_of)> stream(at.ring, stages, row_bytes, warp, jobs, WARPS, base_of);
    if constexpr (sizeof(In) == 1) {
#pragma unroll 1
        for (int i = threadIdx.x; i < jobs * 8; i += THREADS)
            row_scales[i] = __ldg(weight_scales + first_row(i / 8) + i % 8);
    }
    pdl_wait();
    pdl_launch_dependents();
    load_rows<In, T>(inner, pairs, width, at.x, pitch, scales);
    __syncthreads();

#pragma unroll 1
    for (int job = warp; job < jobs; job += WARPS) {
        const int row = first_row(job) + g, which = count.remainder(job);
        const float added = bias ? static_cast<float>(bias[row]) : 0.0f;
        const int own = choice.ranks[which][g];
        float sums[4];
        stream.template multiply<In>(own < 0 ? 0 : shared_address(at.x + (g * top_k + own) * pitch),
                                     sums);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = 2 * q + i, rank = choice.ranks[which][token];
            if (rank < 0) continue;
            const int pair = token * top_k + rank;
            const float both = sizeof(In) == 1 ? row_scales[job * 8 + g] * scales[pair] : 1.0f;
            sums_of[(count.quotient(job) * pairs + pair) * 8 + g] = sums[i] * both + added;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < own_units * num_tokens * 8; i += THREADS) {
        const int row = i % 8, token = i / 8 % num_tokens, unit = i / 8 / num_tokens;
        const float* const parts_of = sums_of + (unit * pairs + token * top_k) * 8 + row;
        T* const to =
            total + static_cast<long long>(token) * hidden + (blockIdx.x + unit * blocks) * 8 + row;
        float sum = adds ? static_cast<float>(*to) : 0.0f;
#pragma unroll 1
        for (int r = 0; r < top_k; r++) sum += choice.weights[token][r] * parts_of[r * 8];
        if (shared) sum += choice.weights[token][top_k] * static_cast<float>(shared[to - total]);
        *to = narrow<T>(sum);
    }
}
