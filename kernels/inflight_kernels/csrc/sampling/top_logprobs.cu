// The most probable tokens of a row, and the rank of the sampled, or of a given, token. Runs after
// the sampler.
//
// A token's key is its logit, as an order-preserving integer, and the complement of its id: a
// larger key is a more probable token, or the first one of equal logits. Each block finds the
// largest keys of a slice, the last block of a row the largest of those.
#include "sampling/sampling_job.cuh"

constexpr int MOST = 20;  // maximum tokens per row

// Partial results of a slice; overwrites the maxima, which are no longer needed.
struct Best {
    u64 keys[MOST];
    int before;  // keys above the row's own token's
};
static_assert(sizeof(Best) <= THREADS * sizeof(float), "a slice's best have room");
static_assert(MAX_SLICES <= THREADS, "one thread for each slice");

constexpr u64 NO_KEY = 0;

__device__ inline u64 key_of(float logit, int id) {
    const unsigned bits = __float_as_uint(logit);
    const unsigned order = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<u64>(order) << 32 | ~static_cast<unsigned>(id);
}

__device__ inline int id_in(u64 key) { return static_cast<int>(~static_cast<unsigned>(key)); }

__device__ inline float logit_in(u64 key) {
    const unsigned order = static_cast<unsigned>(key >> 32);
    return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
}

__device__ inline u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// Grid: (slices, rows). wanted [rows]: number of tokens for each row, at most MOST; negative for no
// output. chosen, statuses [rows]: outputs of the sampler; given [rows], may be null: the token to
// look up instead of the sampled one, negative for none. ids and logprobs [rows, MOST]: -1 and -inf
// past the tokens wanted; own_logprobs and ranks [rows], from 1, of the row's own token; 0 if the
// status is not OK. See Job::of_row for `scratch`, unmodified since the sampler.
template <typename T>
__global__ void __launch_bounds__(THREADS, 4)
    top_logprobs(const T* logits, long long stride, int vocab, const long long* chosen,
                 const int* statuses, const int* given, const int* wanted, char* scratch,
                 int* arrivals, int* ids, float* logprobs, float* own_logprobs, int* ranks) {
    __shared__ Shared shared;
    pdl_wait();
    pdl_launch_dependents();
    const int row = blockIdx.y, slice = blockIdx.x, number = min(wanted[row], MOST);
    if (number < 0) return;
    Job<T> job = {logits, stride, vocab};
    job.scratch = scratch;
    job.arrivals = arrivals;
    const bool fine = statuses[row] == OK;
    const long long token = given && given[row] >= 0 ? given[row] : chosen[row];
    Best* const best = reinterpret_cast<Best*>(job.maxima(row));

    if (fine) {
        float x[VALUES];
        read_slice(job, row, slice, x);
        const u64 own = key_of(static_cast<float>(logits[row * stride + token]), token);
        int before = 0;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const int id = id_of<T>(slice, i);
            before += id < vocab && key_of(x[i], id) > own;
        }
        before = block_total(before, shared.ints);
        // Only the largest of a thread's remaining keys takes part.
        const auto largest_below = [&](u64 limit) {
            u64 found = NO_KEY;
#pragma unroll
            for (int i = 0; i < VALUES; i++) {
                const int id = id_of<T>(slice, i);
                const u64 key = id < vocab ? key_of(x[i], id) : NO_KEY;
                if (key < limit) found = larger(found, key);
            }
            return found;
        };
        u64 mine = largest_below(~NO_KEY);
        for (int n = 0; n < number; n++) {
            const u64 key = block_reduce(mine, shared.sums, larger);
            if (threadIdx.x == 0) best[slice].keys[n] = key;
            if (mine == key) mine = largest_below(key);
        }
        if (threadIdx.x == 0) best[slice].before = before;
    }
    if (!arrives_last(job, row)) return;

    int taken = 0, before = 0;  // in this thread's slice
    const bool mine = fine && static_cast<int>(threadIdx.x) < job.slices();
    if (mine) before = __ldcg(&best[threadIdx.x].before);
    before = block_total(before, shared.ints);
    const float log_sum = job.bound(row)->log_sum;
    if (threadIdx.x == 0) {
        ranks[row] = fine ? before + 1 : 0;
        own_logprobs[row] =
            fine ? static_cast<float>(logits[row * stride + token]) - log_sum : 0.0f;
    }
    for (int n = 0; n < MOST; n++) {
        u64 key = NO_KEY;
        if (n < number && fine) {
            const u64 own = mine && taken < number ? __ldcg(&best[threadIdx.x].keys[taken]) : NO_KEY;
            key = block_reduce(own, shared.sums, larger);
            taken += own == key;
        }
        if (threadIdx.x != 0) continue;
        ids[row * MOST + n] = key == NO_KEY ? -1 : id_in(key);
        logprobs[row * MOST + n] = key == NO_KEY ? -INFINITE : logit_in(key) - log_sum;
    }
}
