// Shared by the passes of the sampler: a row's parameters and scratch memory, its adjusted logits,
// and iteration over them in order of token ids.
//
// `scan` reads each row once, in slices of SLICE logits held in registers. The block that finishes
// a row's last slice has the most probable token, the softmax denominators and a lower bound of the
// k-th largest logit: the k-th largest of the maxima of all threads. Greedy rows and rows without
// filters end there. `spread`, for rows with rare filters, reads a row again, for its mean
// surprisal and the standard deviation of its logits. `gather` rereads, for all rows that did not
// end in `scan`, the logits of threads with a maximum above the bound, which yields slightly more
// than k candidates; the last block sorts, filters and samples. If they do not suffice (k over
// BOUND_RANK, a nucleus of thousands) it applies the filters by radix selection over the whole row.
#pragma once

#include "sampling/row_params.cuh"
#include "sampling/sampling.cuh"

constexpr int VALUES = 32;  // logits per thread
constexpr int SLICE = THREADS * VALUES;

constexpr int CAPACITY = 2048;  // candidates per row
constexpr int MAX_SLICES = 256;  // per row

// Consecutive logits of a thread: a vector, so that a warp reads whole cache lines.
template <typename T>
constexpr int RUN = VECTOR<T>;

// Partial results of a slice.
struct Partial {
    float raw_top, raw_sum;  // of the raw logits: maximum, and sum of exp(x - maximum)
    float top, sum;          // the same of the adjusted logits over the temperature
    int id;                  // of the first logit that is `top`
    int finite;
    int unused[2];
};

// Combined results of a row's slices.
struct Bound {
    float top, log_sum, sum, threshold;
    int open;        // whether the row still needs a token
    unsigned worst;  // largest score that top_n_sigma keeps
    unsigned mean;   // as a score: the mean surprisal, up to a constant
    int unused;
    u64 mass;  // of all tokens; it and the fields before it are set by `spread`
    u64 unused_too;
};

enum Status { OK = 0, NOT_FINITE = 1, NO_ALLOWED_TOKENS = 2 };

// All arguments, the same for every pass.
template <typename T>
struct Job {
    const T* logits;
    long long stride;
    int vocab;
    const RowParams* row_params;
    const long long* positions;
    const short* counts;
    const unsigned char* prompt;
    const long long* drafts;
    const int* tail_starts;
    const int* tail_lengths;
    const int* bias_starts;
    const int* bias_ids;
    const float* biases;
    const unsigned char* masks;
    const int* mask_rows;
    char* scratch;
    int* arrivals;
    int* found;
    long long* tokens;
    float* logprobs;
    int* statuses;

    // A row's scratch: Bound, Partial[slices], u64[CAPACITY], float[slices * THREADS].
    __device__ int slices() const { return (vocab + SLICE - 1) / SLICE; }
    __device__ char* of_row(int row) const {
        const long long slice = sizeof(Partial) + THREADS * sizeof(float);
        return scratch + row * (sizeof(Bound) + CAPACITY * sizeof(u64) + slices() * slice);
    }
    __device__ Bound* bound(int row) const { return reinterpret_cast<Bound*>(of_row(row)); }
    __device__ Partial* partials(int row) const {
        return reinterpret_cast<Partial*>(bound(row) + 1);
    }
    __device__ u64* candidates(int row) const {
        return reinterpret_cast<u64*>(partials(row) + slices());
    }
    __device__ float* maxima(int row) const {
        return reinterpret_cast<float*>(candidates(row) + CAPACITY);
    }
};

// Kernel parameters of all passes, and their job.
//
// Logits [rows, vocab] with row stride `stride`; tokens, logprobs, statuses [rows]. `arrivals` and
// `found` [rows]; arrivals are 0 before and after. See Job::of_row for `scratch`. Nullable: counts
// [slots, vocab] with prompt [slots, words of 32 tokens]; bias_starts [rows + 1] with bias_ids and
// biases, where a row's ids ascend; masks [.., words of 32 tokens] with mask_rows [rows], negative
// for none; tail_starts and tail_lengths [rows], a row's part of drafts, which are tokens.
#define JOB_PARAMETERS                                                                          \
    const T *logits, long long stride, int vocab, const RowParams *row_params, const long long *positions, \
        const short *counts, const unsigned char *prompt, const long long *drafts,              \
        const int *tail_starts, const int *tail_lengths, const int *bias_starts,                \
        const int *bias_ids, const float *biases, const unsigned char *masks,                   \
        const int *mask_rows, char *scratch, int *arrivals, int *found, long long *tokens,      \
        float *logprobs, int *statuses
#define JOB                                                                                     \
    {logits,      stride,   vocab,  row_params, positions, counts,  prompt,   drafts, tail_starts,  \
     tail_lengths, bias_starts, bias_ids, biases, masks, mask_rows, scratch, arrivals, found,   \
     tokens,      logprobs, statuses}

// The block's copy of the job for functions that are not inlined: given the address of a thread's
// copy, each thread would first write all of it to local memory, which is more than its logits.
template <typename T>
struct Common {
    Job<T> job;
    RowParams params;
};

// Make the copy. Called by all threads of a block.
template <typename T>
__device__ void copy_to_shared(const Job<T>& job, const RowParams& params, Common<T>& common) {
    __syncthreads();
    if (threadIdx.x == 0) {
        common.job = job;
        common.params = params;
    }
    __syncthreads();
}

// Shared memory that every pass needs.
struct Shared {
    unsigned marked[SLICE / 32];
    u64 run_sums[VALUES / 4][WARPS];  // sums of a slice's runs, by warp
    union {
        u64 sums[WARPS];
        double doubles[WARPS];
        float floats[WARPS];
        int ints[WARPS];
        unsigned unsigneds[WARPS];
    };
    int id;
};

// ---------------------------------------------------------------- reading a slice

// The token of a thread's i-th logit in a slice.
template <typename T>
__device__ int id_of(int slice, int i) {
    return slice * SLICE + (i / RUN<T> * THREADS + threadIdx.x) * RUN<T> + i % RUN<T>;
}

// Load the logits of a slice; -inf past the vocabulary. Returns false if one is not finite.
template <typename T>
__device__ bool read_slice(const Job<T>& job, int row, int slice, float (&x)[VALUES]) {
    constexpr int N = RUN<T>, RUNS = VALUES / N;
    const T* const logits = job.logits + row * job.stride;
    const bool whole = reinterpret_cast<size_t>(logits) % 16 == 0;
    bool finite = true;
    if (whole && (slice + 1) * SLICE <= job.vocab) {
        uint4 raw[RUNS];
#pragma unroll
        for (int run = 0; run < RUNS; run++) raw[run] = load_vector(logits + id_of<T>(slice, run * N));
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            float values[N];
            unpack<T>(raw[run], values);
#pragma unroll
            for (int j = 0; j < N; j++) {
                x[run * N + j] = values[j];
                finite &= fabsf(values[j]) <= LARGEST;
            }
        }
        return finite;
    }
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
        const int first = id_of<T>(slice, run * N);
        float values[N];
        if (whole && first + N <= job.vocab) {
            unpack<T>(load_vector(logits + first), values);
        } else {
#pragma unroll
            for (int j = 0; j < N; j++)
                values[j] =
                    first + j < job.vocab ? static_cast<float>(logits[first + j]) : -INFINITE;
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            x[run * N + j] = values[j];
            finite &= first + j >= job.vocab || fabsf(values[j]) <= LARGEST;
        }
    }
    return finite;
}

// ---------------------------------------------------------------- adjusting it

template <typename T>
__device__ bool has_penalties(const Job<T>& job, const RowParams& params) {
    return job.counts && params.slot >= 0 && has_penalties(params);
}

template <typename T>
__device__ bool has_biases(const Job<T>& job, int row) {
    return job.bias_starts && job.bias_starts[row] < job.bias_starts[row + 1];
}

template <typename T>
__device__ bool has_mask(const Job<T>& job, int row) {
    return job.mask_rows && job.mask_rows[row] >= 0;
}

template <typename T>
__device__ bool is_adjusted(const Job<T>& job, int row, const RowParams& params) {
    return has_penalties(job, params) || has_biases(job, row) || has_mask(job, row);
}

// The bias of a token: 0 if its id is not in the row's list, which is in ascending order.
template <typename T>
__device__ __noinline__ float bias_of(const Job<T>& job, int row, int id) {
    int low = job.bias_starts[row], high = job.bias_starts[row + 1];
    while (low < high) {
        const int middle = (low + high) / 2;
        if (job.bias_ids[middle] < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low < job.bias_starts[row + 1] && job.bias_ids[low] == id ? job.biases[low] : 0.0f;
}

// Mark a token, if it is in the slice, for processing.
__device__ inline void mark(long long id, int slice, Shared& shared) {
    const long long at = id - static_cast<long long>(slice) * SLICE;
    if (0 <= at && at < SLICE) atomicOr(&shared.marked[at / 32], 1u << at % 32);
}

// Number of occurrences of a token in the first `count` drafts.
__device__ __noinline__ int times_drafted(const long long* drafts, int count, int id) {
    int times = 0;
#pragma unroll 1
    for (int i = 0; i < count; i++) times += drafts[i] == id;
    return times;
}

// Counts of a run of tokens; 0 for those past the vocabulary.
template <int N>
__device__ void read_counts(const short* counts, int first, int vocab, short (&found)[N]) {
    if (vocab % N == 0) {  // then runs are inside the vocabulary, and aligned to their size
        unsigned words[N / 2];
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const uint2 some = reinterpret_cast<const uint2*>(counts + first)[i];
            words[2 * i] = some.x;
            words[2 * i + 1] = some.y;
        }
#pragma unroll
        for (int j = 0; j < N; j++) found[j] = static_cast<short>(words[j / 2] >> j % 2 * 16);
        return;
    }
#pragma unroll
    for (int j = 0; j < N; j++) found[j] = first + j < vocab ? counts[first + j] : 0;
}

// Apply penalties, biases and the mask, in place. Called by all threads of a block. Unrolled over
// UNROLL runs of tokens.
template <int UNROLL, typename T>
__device__ __forceinline__ void adjust(const Job<T>& job, int row, const RowParams& params, int slice,
                                      float (&x)[VALUES], Shared& shared) {
    constexpr int N = RUN<T>, RUNS = VALUES / N;
    const bool penalized = has_penalties(job, params), biased = has_biases(job, row);
    const int num_drafts = penalized && job.tail_lengths ? job.tail_lengths[row] : 0;
    const long long* const drafts = num_drafts ? job.drafts + job.tail_starts[row] : nullptr;
    const bool marked = biased || num_drafts;
    if (marked) {
        __syncthreads();
        for (int i = threadIdx.x; i < SLICE / 32; i += THREADS) shared.marked[i] = 0;
        __syncthreads();
        if (biased)
            for (int i = job.bias_starts[row] + threadIdx.x; i < job.bias_starts[row + 1];
                 i += THREADS)
                mark(job.bias_ids[i], slice, shared);
        for (int i = threadIdx.x; i < num_drafts; i += THREADS) mark(drafts[i], slice, shared);
        __syncthreads();
    }
    const long long words = (job.vocab + 31) / 32;
    if (penalized) {
        const long long slot = params.slot;
        const short* const counts = job.counts + slot * job.vocab;
        const unsigned char* const prompt = job.prompt + slot * words * 4;
#pragma unroll UNROLL
        for (int run = 0; run < RUNS; run++) {
            const int first = id_of<T>(slice, run * N), place = id_of<T>(0, run * N);
            if (first >= job.vocab) continue;
            short count[N];
            read_counts(counts, first, job.vocab, count);
            const int in_prompt = prompt[first / 8] >> first % 8;
            const unsigned looked_at = num_drafts ? shared.marked[place / 32] >> place % 32 : 0;
#pragma unroll
            for (int j = 0; j < N; j++) {
                float& value = x[run * N + j];
                int times = count[j];
                if (looked_at >> j & 1) times += times_drafted(drafts, num_drafts, first + j);
                if (times || in_prompt >> j & 1)
                    value = value > 0.0f ? value / params.repetition_penalty
                                         : value * params.repetition_penalty;
                if (times)
                    value -= params.presence_penalty +
                             params.frequency_penalty * static_cast<float>(times);
            }
        }
    }
    if (biased) {
#pragma unroll UNROLL
        for (int run = 0; run < RUNS; run++) {
            const int first = id_of<T>(slice, run * N), place = id_of<T>(0, run * N);
            const unsigned looked_at = shared.marked[place / 32] >> place % 32;
#pragma unroll
            for (int j = 0; j < N; j++)
                if (looked_at >> j & 1) x[run * N + j] += bias_of(job, row, first + j);
        }
    }
    if (has_mask(job, row)) {
        const unsigned char* const mask = job.masks + job.mask_rows[row] * words * 4;
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            const int first = id_of<T>(slice, run * N);
            const int allowed = first < job.vocab ? mask[first / 8] >> first % 8 : 0;
#pragma unroll
            for (int j = 0; j < N; j++)
                if (!(allowed >> j & 1)) x[run * N + j] = -INFINITE;
        }
    }
}

// The same, for the passes that few rows need: not inlined and not unrolled, since it dominates the
// compile time of these passes.
template <typename T>
__device__ __noinline__ void adjust_slice(const Job<T>& job, int row, const RowParams& params, int slice,
                                         float (&x)[VALUES], Shared& shared) {
    adjust<1>(job, row, params, slice, x, shared);
}

template <typename T>
__device__ void read_adjusted(const Job<T>& job, int row, const RowParams& params, int slice,
                            float (&x)[VALUES], Shared& shared) {
    read_slice(job, row, slice, x);
    if (!is_adjusted(job, row, params)) return;
    float adjusted[VALUES];  // its address is taken
#pragma unroll
    for (int i = 0; i < VALUES; i++) adjusted[i] = x[i];
    adjust_slice(job, row, params, slice, adjusted, shared);
#pragma unroll
    for (int i = 0; i < VALUES; i++) x[i] = adjusted[i];
}

// ---------------------------------------------------------------- a row and its blocks

template <typename T>
__device__ bool cuts_rank(const Job<T>& job, const RowParams& params) {
    return params.top_k > 0 && params.top_k < job.vocab;
}

// Whether this block is the last of the row's blocks to arrive; the writes of the others are then
// visible. Must be called after a barrier, so that the signalling thread releases the writes of its
// whole block.
template <typename T>
__device__ bool arrives_last(const Job<T>& job, int row) {
    bool last = false;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(job.arrivals + row, 1) == job.slices() - 1;
        if (last) job.arrivals[row] = 0;  // reset for the next launch
        __threadfence();
    }
    return __syncthreads_or(last);
}

// Called by one thread.
template <typename T>
__device__ void write_result(const Job<T>& job, int row, int id, float log_sum) {
    job.tokens[row] = id;
    job.logprobs[row] = static_cast<float>(job.logits[row * job.stride + id]) - log_sum;
    job.statuses[row] = OK;
}

template <typename T>
__device__ void write_failure(const Job<T>& job, int row, Status status) {
    job.tokens[row] = 0;
    job.logprobs[row] = 0.0f;
    job.statuses[row] = status;
}

// ---------------------------------------------------------------- iteration by token id

enum Weight { MASS, MOMENT, TIES };

// Weight of tokens in an iteration: their mass, or its moment, for those with a score up to `worst`
// and not past token `last` at score `edge`; or for TIES, 1 for those at score `edge`.
struct Scale {
    float top, temperature;
    unsigned worst, edge;
    int last;
    Weight weight;

    __device__ bool has(unsigned score, int id) const {
        return score <= worst && (score < edge || (score == edge && id <= last));
    }
    __device__ u64 weigh(float logit, int id) const {
        if (!(logit > -INFINITE)) return 0;
        const unsigned score = score_of(logit, top, temperature);
        if (weight == TIES) return score == edge;
        if (!has(score, id)) return 0;
        return weight == MASS ? mass_of(score) : moment_of(score);
    }
    // Of four tokens from `id` on. Separate: inlined, it adds half a second of compile time.
    __device__ __noinline__ u64 weigh_four(float a, float b, float c, float d, int id) const {
        return weigh(a, id) + weigh(b, id + 1) + weigh(c, id + 2) + weigh(d, id + 3);
    }
};

// Weights like a Scale that excludes nothing, by mass.
struct Masses {
    float top, temperature;

    __device__ u64 weigh(float logit, int id) const {
        return logit > -INFINITE ? mass_of(score_of(logit, top, temperature)) : 0;
    }
    __device__ u64 weigh_four(float a, float b, float c, float d, int id) const {
        return weigh(a, id) + weigh(b, id + 1) + weigh(c, id + 2) + weigh(d, id + 3);
    }
};

constexpr unsigned ANY_SCORE = ~0u;
constexpr int ANY_ID = 0x7fffffff;
constexpr u64 NEVER = ~0ull;

// The first token of slices [begin, end) at which the cumulative weight exceeds `target`; -1 if it
// does not, and then `sum` is the total weight. Called by all threads of a block.
template <typename T, typename Weights>
__device__ __noinline__ int walk(const Job<T>& job, int row, const RowParams& params, int begin, int end,
                                 const Weights weights, u64 target, u64& sum, Shared& shared) {
    constexpr int N = RUN<T>, RUNS = VALUES / N;
    u64 running = 0;
    for (int slice = begin; slice < end; slice++) {
        float x[VALUES];
        read_adjusted(job, row, params, slice, x, shared);
        u64 mine[RUNS], all = 0;
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            mine[run] = 0;
#pragma unroll
            for (int j = run * N; j < (run + 1) * N; j += 4)
                mine[run] +=
                    weights.weigh_four(x[j], x[j + 1], x[j + 2], x[j + 3], id_of<T>(slice, j));
            all += mine[run];
        }
        all = block_total(all, shared.sums);
        if (target >= running + all) {
            running += all;
            continue;
        }
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            u64 part = mine[run];
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2)
                part += __shfl_xor_sync(FULL_WARP, part, distance);
            if (threadIdx.x % 32 == 0) shared.run_sums[run][threadIdx.x / 32] = part;
        }
        __syncthreads();
        // Find its run, then the thread, then the token. Not unrolled over runs, which halves the
        // compile time.
        int run_at = 0;
        for (; run_at < RUNS - 1; run_at++) {
            u64 total = 0;
            for (int warp = 0; warp < WARPS; warp++) total += shared.run_sums[run_at][warp];
            if (target < running + total) break;
            running += total;
        }
        u64 part = 0, total;
        float found[N];
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            if (run != run_at) continue;
            part = mine[run];
#pragma unroll
            for (int j = 0; j < N; j++) found[j] = x[run * N + j];
        }
        u64 before = running + block_sum_before(part, shared.sums, total);
        if (before <= target && target < before + part) {
            bool open = true;
#pragma unroll
            for (int j = 0; j < N; j++) {
                const int id = id_of<T>(slice, run_at * N + j);
                before += weights.weigh(found[j], id);
                if (open && target < before) {
                    shared.id = id;
                    open = false;
                }
            }
        }
        sum = running + total;
        __syncthreads();
        const int id = shared.id;
        __syncthreads();
        return id;
    }
    sum = running;
    return -1;
}
