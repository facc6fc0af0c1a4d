// Choose a token for each row of logits: no sort of the vocabulary, nothing for the host to wait
// for.
//
// `scan` reads each row once, in slices of SLICE logits held in registers. The block that finishes
// a row's last slice knows the likeliest token, the softmax's denominators and a lower bound of the
// k-th largest logit: the k-th largest of the maxima of all threads. Greedy rows and rows without
// filters end there. Of the others `gather` reads again what threads with a maximum above the bound
// had, and finds a little more than k candidates; the last block sorts them, cuts and draws. Where
// they do not suffice (k over BOUND_RANK, a nucleus of thousands) it finds the cuts by radix
// selection over the whole row.
#include "sampling.cuh"

constexpr int RUN = 8;  // consecutive logits of a thread
constexpr int RUNS = 4;
constexpr int SLICE = THREADS * RUN * RUNS;

constexpr int CAPACITY = 2048;   // candidates of a row
constexpr int BOUND_RANK = 1024;  // of the bound that candidates lie above, at most
constexpr int MAXIMA = 32;       // of a thread, at most, when it looks for the bound
constexpr int RANKED = 256;      // a nucleus up to this size is drawn from likeliest first

// How to choose in a row; written by the host.
struct Wish {
    u64 seed;
    float temperature;  // 0: greedy
    int top_k;          // 0 or less: all
    float top_p, min_p, repetition, presence, frequency;
    int slot;  // of the row's counts and prompt bits; negative: none
};
static_assert(sizeof(Wish) == 40, "as sampling.py writes it");

// What a slice tells of its row.
struct Partial {
    float raw_top, raw_sum;  // of the logits as they came: maximum, and sum of exp(x - maximum)
    float top, sum;          // the same of the shaped logits over the temperature
    int id;                  // of the first logit that is `top`
    int finite;
    int unused[2];
};

// What `scan` leaves for `gather`.
struct Bound {
    float top, log_sum, sum, threshold;
    int open;  // whether the row still needs a token
    int unused[3];
};

enum Status { FINE = 0, NOT_FINITE = 1, NOTHING_LEFT = 2 };

// All arguments, the same for both kernels.
template <typename T>
struct Job {
    const T* logits;
    long long stride;
    int vocab;
    const Wish* wishes;
    const long long* positions;
    const short* counts;
    const unsigned char* prompt;
    const int* ban_starts;
    const int* bans;
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

// A block's shared memory.
struct Shared {
    union {
        struct {
            u64 candidates[CAPACITY];
            u64 masses[CAPACITY];
        };
        struct {
            unsigned counts[2048], low[2048], high[2048];
        };
    };
    unsigned banned[SLICE / 32];
    union {
        u64 sums[WARPS];
        float floats[WARPS];
        int ints[WARPS];
    };
    u64 mass_before;
    unsigned count_before, bin;
    int count, id, is_last;
};

// ---------------------------------------------------------------- reading a slice

__device__ inline int id_of(int slice, int run, int j) {
    return slice * SLICE + (run * THREADS + threadIdx.x) * RUN + j;
}

// Logits of a slice; -inf past the vocabulary. False where one is not finite.
template <typename T>
__device__ bool read_slice(const Job<T>& job, int row, int slice, float (&x)[RUNS * RUN]) {
    constexpr int N = VECTOR<T>, PARTS = RUN / N;
    const T* const logits = job.logits + row * job.stride;
    const bool whole = reinterpret_cast<size_t>(logits) % 16 == 0;
    bool finite = true;
    if (whole && (slice + 1) * SLICE <= job.vocab) {
        uint4 raw[RUNS * PARTS];
#pragma unroll
        for (int i = 0; i < RUNS * PARTS; i++)
            raw[i] = load_vector(logits + id_of(slice, i / PARTS, i % PARTS * N));
#pragma unroll
        for (int i = 0; i < RUNS * PARTS; i++) {
            float values[N];
            unpack<T>(raw[i], values);
#pragma unroll
            for (int j = 0; j < N; j++) {
                x[i * N + j] = values[j];
                finite &= fabsf(values[j]) <= LARGEST;
            }
        }
        return finite;
    }
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
        const int first = id_of(slice, run, 0);
        float* const values = x + run * RUN;
        if (whole && first + RUN <= job.vocab) {
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                float some[N];
                unpack<T>(load_vector(logits + first + part * N), some);
#pragma unroll
                for (int j = 0; j < N; j++) values[part * N + j] = some[j];
            }
        } else {
#pragma unroll
            for (int j = 0; j < RUN; j++)
                values[j] =
                    first + j < job.vocab ? static_cast<float>(logits[first + j]) : -INFINITE;
        }
#pragma unroll
        for (int j = 0; j < RUN; j++)
            finite &= first + j >= job.vocab || fabsf(values[j]) <= LARGEST;
    }
    return finite;
}

template <typename T>
__device__ bool has_penalties(const Job<T>& job, const Wish& wish) {
    return job.counts && wish.slot >= 0 &&
           (wish.repetition != 1.0f || wish.presence != 0.0f || wish.frequency != 0.0f);
}

template <typename T>
__device__ bool has_bans(const Job<T>& job, int row) {
    return job.ban_starts && job.ban_starts[row] < job.ban_starts[row + 1];
}

// Penalties and bans, in place. Threads of a block call it together. Few rows need it: its code
// stands once, apart, and the others keep their logits in registers.
template <typename T>
__device__ __noinline__ void shape_slice(const Job<T>& job, int row, const Wish& wish, int slice,
                            float (&x)[RUNS * RUN], Shared& shared) {
    if (has_penalties(job, wish)) {
        const long long slot = wish.slot;
        const short* const counts = job.counts + slot * job.vocab;
        const unsigned char* const prompt = job.prompt + slot * ((job.vocab + 31) / 32 * 4);
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            const int first = id_of(slice, run, 0);
            if (first >= job.vocab) continue;
            const int in_prompt = prompt[first / 8];
#pragma unroll
            for (int j = 0; j < RUN; j++) {
                if (first + j >= job.vocab) continue;
                const int count = counts[first + j];
                float& value = x[run * RUN + j];
                if (count || in_prompt >> j & 1)
                    value = value > 0.0f ? value / wish.repetition : value * wish.repetition;
                if (count) value -= wish.presence + wish.frequency * static_cast<float>(count);
            }
        }
    }
    if (!has_bans(job, row)) return;
    __syncthreads();
    for (int i = threadIdx.x; i < SLICE / 32; i += THREADS) shared.banned[i] = 0;
    __syncthreads();
    for (int i = job.ban_starts[row] + threadIdx.x; i < job.ban_starts[row + 1]; i += THREADS) {
        const int at = job.bans[i] - slice * SLICE;
        if (0 <= at && at < SLICE) atomicOr(&shared.banned[at / 32], 1u << at % 32);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < RUNS * RUN; i++) {
        const int at = id_of(0, i / RUN, i % RUN);
        if (shared.banned[at / 32] >> at % 32 & 1) x[i] = -INFINITE;
    }
}

template <typename T>
__device__ void read_shaped(const Job<T>& job, int row, const Wish& wish, int slice,
                            float (&x)[RUNS * RUN], Shared& shared) {
    read_slice(job, row, slice, x);
    if (!has_penalties(job, wish) && !has_bans(job, row)) return;
    float shaped[RUNS * RUN];  // whose address is taken
#pragma unroll
    for (int i = 0; i < RUNS * RUN; i++) shaped[i] = x[i];
    shape_slice(job, row, wish, slice, shaped, shared);
#pragma unroll
    for (int i = 0; i < RUNS * RUN; i++) x[i] = shaped[i];
}

template <typename T>
__device__ bool cuts_rank(const Job<T>& job, const Wish& wish) {
    return wish.top_k > 0 && wish.top_k < job.vocab;
}

// Whether this block is the last of the row's blocks to come here. Their writes are then seen.
template <typename T>
__device__ bool arrives_last(const Job<T>& job, int row, Shared& shared) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.is_last = atomicAdd(job.arrivals + row, 1) == job.slices() - 1;
        if (shared.is_last) job.arrivals[row] = 0;  // as the next launch wants it
    }
    __syncthreads();
    if (shared.is_last) __threadfence();
    return shared.is_last;
}

// One thread calls it.
template <typename T>
__device__ void answer(const Job<T>& job, int row, int id, float log_sum) {
    job.tokens[row] = id;
    job.logprobs[row] = static_cast<float>(job.logits[row * job.stride + id]) - log_sum;
    job.statuses[row] = FINE;
}

template <typename T>
__device__ void refuse(const Job<T>& job, int row, Status status) {
    job.tokens[row] = 0;
    job.logprobs[row] = 0.0f;
    job.statuses[row] = status;
}

// ---------------------------------------------------------------- walking a row by token id

// What tokens weigh in a walk: their mass, of those with a score up to `worst` and not past token
// `last` at score `edge`; or with `ties`, 1 for those at score `edge`.
struct Scale {
    float top, temperature;
    unsigned worst, edge;
    int last;
    bool ties;

    __device__ u64 weigh(float logit, int id) const {
        if (!(logit > -INFINITE)) return 0;
        const unsigned score = score_of(logit, top, temperature);
        if (ties) return score == edge;
        if (score > worst || score > edge || (score == edge && id > last)) return 0;
        return mass_of(score);
    }
};

constexpr unsigned ANY_SCORE = ~0u;
constexpr int ANY_ID = 0x7fffffff;
constexpr u64 NEVER = ~0ull;

// The first token of slices [begin, end) at which the running sum of weights passes `target`; -1 if
// it does not. `sum` gets the sum up to there. Threads of a block call it together.
template <typename T>
__device__ __noinline__ int walk(const Job<T>& job, int row, const Wish& wish, int begin, int end,
                                 const Scale& scale, u64 target, u64& sum, Shared& shared) {
    u64 running = 0;
    for (int slice = begin; slice < end; slice++) {
        float x[RUNS * RUN];
        read_shaped(job, row, wish, slice, x, shared);
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            u64 mine = 0, total;
#pragma unroll
            for (int j = 0; j < RUN; j++) mine += scale.weigh(x[run * RUN + j], id_of(slice, run, j));
            u64 before = running + block_sum_before(mine, shared.sums, total);
            if (before <= target && target < before + mine) {
                bool open = true;
#pragma unroll
                for (int j = 0; j < RUN; j++) {
                    before += scale.weigh(x[run * RUN + j], id_of(slice, run, j));
                    if (open && target < before) {
                        shared.id = id_of(slice, run, j);
                        open = false;
                    }
                }
            }
            running += total;
            if (target < running) {
                __syncthreads();
                const int id = shared.id;
                __syncthreads();
                sum = running;
                return id;
            }
        }
    }
    sum = running;
    return -1;
}

// ---------------------------------------------------------------- scan

// A value that about `rank` of the row's maxima are not below, and no fewer: at least `rank` logits
// are not below it either. -inf if there are not as many.
template <typename T>
__device__ __noinline__ float find_bound(const Job<T>& job, int row, int rank, float top,
                                         Shared& shared) {
    const float* const maxima = job.maxima(row);
    const int groups = min(job.slices() * THREADS, MAXIMA * THREADS);
    float values[MAXIMA], least = INFINITE;
    int finite = 0;
#pragma unroll
    for (int i = 0; i < MAXIMA; i++) {
        const int at = i * THREADS + threadIdx.x;
        values[i] = at < groups ? __ldcg(maxima + at) : -INFINITE;
        if (values[i] > -INFINITE) {
            finite++;
            least = fminf(least, values[i]);
        }
    }
    if (block_total(finite, shared.ints) < rank) return -INFINITE;
    float low = -block_largest(-least, shared.floats), high = top;
    for (int step = 0; step < 24; step++) {
        const float middle = low + (high - low) * 0.5f;
        int above = 0;
#pragma unroll
        for (int i = 0; i < MAXIMA; i++) above += values[i] >= middle;
        above = block_total(above, shared.ints);
        if (above >= rank) {
            low = middle;
            if (above <= rank + rank / 8) break;
        } else {
            high = middle;
        }
    }
    return low;
}

// A draw from all of a row, by slices and then inside one.
template <typename T>
__device__ __noinline__ void draw_from_all(const Job<T>& job, int row, const Wish& wish, float top,
                              float log_sum, float scale, Shared& shared) {
    const Partial* const partials = job.partials(row);
    // In double the sum of slices is the same whoever adds, and close to exact.
    double sum = 0.0;
    for (int s = 0; s < job.slices(); s++) {
        const float peak = __ldcg(&partials[s].top);
        if (peak > -INFINITE)
            sum += static_cast<double>(__ldcg(&partials[s].sum)) * exp2_fast((peak - top) * scale);
    }
    const u64 random = uniform(wish.seed, job.positions[row]);
    const double target = static_cast<double>(random) * 0x1p-64 * sum;
    double before = 0.0, size = 1.0, running = 0.0;
    int slice = 0;
    for (int s = 0; s < job.slices(); s++) {
        const float peak = __ldcg(&partials[s].top);
        if (!(peak > -INFINITE)) continue;
        const double mass =
            static_cast<double>(__ldcg(&partials[s].sum)) * exp2_fast((peak - top) * scale);
        if (!(mass > 0.0)) continue;
        slice = s;
        before = running;
        size = mass;
        running += mass;
        if (running > target) break;
    }
    // Masses are relative to the slice's own maximum: they do not vanish far below `top`.
    const float peak = __ldcg(&partials[slice].top);
    const Scale all = {peak, wish.temperature, ANY_SCORE, ANY_SCORE, ANY_ID, false};
    u64 total, unused;
    walk(job, row, wish, slice, slice + 1, all, NEVER, total, shared);
    const double share = (target - before) / size;
    u64 inside = static_cast<u64>(fmax(share, 0.0) * static_cast<double>(total));
    inside = min(inside, total - 1);
    const int id = walk(job, row, wish, slice, slice + 1, all, inside, unused, shared);
    if (threadIdx.x == 0) answer(job, row, id, log_sum);
}

// A row whose slices are all scanned.
template <typename T>
__device__ __noinline__ void finish_scan(const Job<T>& job, int row, const Wish& wish,
                                         Shared& shared) {
    const Partial* const partials = job.partials(row);
    const float scale = LOG2_E / wish.temperature;
    float raw_top = -INFINITE, top = -INFINITE;
    int finite = 1, id = job.vocab;
    for (int s = threadIdx.x; s < job.slices(); s += THREADS) {
        raw_top = fmaxf(raw_top, __ldcg(&partials[s].raw_top));
        finite &= __ldcg(&partials[s].finite);
        const float peak = __ldcg(&partials[s].top);
        if (peak > top) {
            top = peak;
            id = __ldcg(&partials[s].id);
        }
    }
    const float highest = block_largest(top, shared.floats);
    raw_top = block_largest(raw_top, shared.floats);
    finite = block_total(1 - finite, shared.ints) == 0;
    id = block_reduce(top == highest ? id : job.vocab, shared.ints,
                      [](int a, int b) { return min(a, b); });
    top = highest;
    if (!finite || !(top > -INFINITE)) {
        if (threadIdx.x == 0) {
            refuse(job, row, finite ? NOTHING_LEFT : NOT_FINITE);
            job.bound(row)->open = 0;
        }
        return;
    }
    float raw_sum = 0.0f, sum = 0.0f;
    for (int s = threadIdx.x; s < job.slices(); s += THREADS) {
        raw_sum += __ldcg(&partials[s].raw_sum) *
                   exp2_fast((__ldcg(&partials[s].raw_top) - raw_top) * LOG2_E);
        const float peak = __ldcg(&partials[s].top);
        if (peak > -INFINITE) sum += __ldcg(&partials[s].sum) * exp2_fast((peak - top) * scale);
    }
    raw_sum = block_total(raw_sum, shared.floats);
    sum = block_total(sum, shared.floats);
    const float log_sum = raw_top + logf(raw_sum);
    const bool greedy = !(wish.temperature > 0.0f);
    const bool cut_k = cuts_rank(job, wish), cut_p = wish.top_p < 1.0f;
    const bool open = !greedy && (cut_k || cut_p || wish.min_p > 0.0f);
    if (greedy) {
        if (threadIdx.x == 0) answer(job, row, id, log_sum);
    } else if (!open) {
        draw_from_all(job, row, wish, top, log_sum, scale, shared);
    }
    float threshold = -INFINITE;
    if (open && job.vocab > CAPACITY) {
        if (cut_k || cut_p) {
            const int rank = cut_k ? wish.top_k : max(job.vocab / (4 * RUN * RUNS), 1);
            threshold = find_bound(job, row, min(rank, BOUND_RANK), top, shared);
        } else {
            threshold = top + wish.temperature * (logf(wish.min_p) - 1e-3f);
        }
    }
    if (threadIdx.x == 0) {
        *job.bound(row) = {top, log_sum, sum, threshold, open};
        job.found[row] = 0;
    }
}

template <typename T>
__device__ void scan_slice(const Job<T>& job, int row, int slice, Shared& shared) {
    const Wish wish = job.wishes[row];
    const bool drawn = wish.temperature > 0.0f;
    const bool shaped = has_penalties(job, wish) || has_bans(job, row);
    // Whoever cuts by rank or by likelihood alone never asks for the mass of all.
    const bool summed = drawn && !cuts_rank(job, wish) && (wish.top_p < 1.0f || wish.min_p == 0.0f);
    const float scale = LOG2_E / wish.temperature;

    float x[RUNS * RUN];
    const bool finite = read_slice(job, row, slice, x);
    float raw_top = x[0];
#pragma unroll
    for (int i = 1; i < RUNS * RUN; i++) raw_top = fmaxf(raw_top, x[i]);
    float raw_sum = 0.0f;
    // Not -inf, from which -inf cannot be subtracted.
    const float raw_base = fmaxf(raw_top, -LARGEST);
#pragma unroll
    for (int i = 0; i < RUNS * RUN; i++) raw_sum += exp2_fast((x[i] - raw_base) * LOG2_E);

    float top = raw_top, sum = raw_sum;
    if (shaped) {
        float y[RUNS * RUN];  // whose address is taken
#pragma unroll
        for (int i = 0; i < RUNS * RUN; i++) y[i] = x[i];
        shape_slice(job, row, wish, slice, y, shared);
#pragma unroll
        for (int i = 0; i < RUNS * RUN; i++) x[i] = y[i];
        top = x[0];
#pragma unroll
        for (int i = 1; i < RUNS * RUN; i++) top = fmaxf(top, x[i]);
    }
    const float base = fmaxf(top, -LARGEST);
    if (summed && (shaped || wish.temperature != 1.0f)) {
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < RUNS * RUN; i++) sum += exp2_fast((x[i] - base) * scale);
    }
    if (drawn) job.maxima(row)[slice * THREADS + threadIdx.x] = top;

    Partial result;
    result.raw_top = block_largest(raw_top, shared.floats);
    result.top = block_largest(top, shared.floats);
    if (threadIdx.x == 0) shared.id = job.vocab;
    const float raw_peak = fmaxf(result.raw_top, -LARGEST), peak = fmaxf(result.top, -LARGEST);
    result.raw_sum =
        block_total(raw_sum * exp2_fast((raw_base - raw_peak) * LOG2_E), shared.floats);
    result.sum = summed ? block_total(sum * exp2_fast((base - peak) * scale), shared.floats) : 0.0f;
    if (top == result.top) {
        int id = job.vocab;
#pragma unroll
        for (int i = RUNS * RUN - 1; i >= 0; i--)
            if (x[i] == top) id = id_of(slice, i / RUN, i % RUN);
        atomicMin(&shared.id, id);
    }
    result.finite = __syncthreads_or(!finite) == 0;
    result.id = shared.id;
    if (threadIdx.x == 0) job.partials(row)[slice] = result;
    if (arrives_last(job, row, shared)) finish_scan(job, row, wish, shared);
}

// ---------------------------------------------------------------- the last candidates

// Sort `shared.candidates[0:size]`, size a power of two, ascending (Batcher's bitonic network).
__device__ inline void sort_candidates(int size, Shared& shared) {
    u64* const keys = shared.candidates;
    for (int width = 2; width <= size; width *= 2) {
        for (int distance = width / 2; distance > 0; distance /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                const int a = 2 * i - (i & distance - 1), b = a + distance;
                const u64 first = keys[a], second = keys[b];
                if (first > second == ((a & width) == 0)) {
                    keys[a] = second;
                    keys[b] = first;
                }
            }
        }
    }
    __syncthreads();
}

// shared.masses[i] = running sum over shared.candidates[0:count] up to i, scores at bit `shift`.
__device__ inline void sum_masses(int count, int shift, Shared& shared) {
    constexpr int EACH = CAPACITY / THREADS;
    const int first = threadIdx.x * EACH;
    u64 sums[EACH], sum = 0, total;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (first + i < count)
            sum += mass_of(static_cast<unsigned>(shared.candidates[first + i] >> shift));
        sums[i] = sum;
    }
    const u64 before = block_sum_before(sum, shared.sums, total);
#pragma unroll
    for (int i = 0; i < EACH; i++) shared.masses[first + i] = before + sums[i];
    __syncthreads();
}

// How many i < count have good(i), which holds up to some i and not from there on.
template <typename Good>
__device__ int count_while(int count, Shared& shared, Good good) {
    int mine = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) mine += good(i);
    return block_total(mine, shared.ints);
}

// Draw from `count` candidates in shared memory, if they are enough: the token, or -1.
template <typename T>
__device__ __noinline__ int draw_from_candidates(const Job<T>& job, const Wish& wish,
                                                 const Bound& bound, int count, u64 random,
                                                 Shared& shared) {
    const bool cut_k = cuts_rank(job, wish), cut_p = wish.top_p < 1.0f;
    const bool all = !(bound.threshold > -INFINITE);
    if (cut_k && count < wish.top_k && !all) return -1;

    int size = 2;
    while (size < count) size *= 2;
    for (int i = count + threadIdx.x; i < size; i += THREADS) shared.candidates[i] = NEVER;
    sort_candidates(size, shared);  // by score, then by token id
    sum_masses(count, 32, shared);

    const int limit = cut_k ? min(wish.top_k, count) : count;
    int kept = limit;
    if (cut_p) {
        const double total = cut_k || all ? static_cast<double>(shared.masses[limit - 1])
                                          : static_cast<double>(bound.sum) * MASS_ONE;
        const double wanted = wish.top_p * total;
        if (!cut_k && !all && static_cast<double>(shared.masses[count - 1]) < wanted) return -1;
        kept = count_while(limit, shared, [&](int i) {
            return i == 0 || static_cast<double>(shared.masses[i - 1]) < wanted;
        });
    }
    const bool ranked = cut_k || (cut_p && kept <= RANKED);
    if (wish.min_p > 0.0f) {
        const int likely = count_while(kept, shared, [&](int i) {
            return weight_of(static_cast<unsigned>(shared.candidates[i] >> 32)) >= wish.min_p;
        });
        kept = max(likely, 1);
    }
    int shift = 0;  // of the token's id
    if (!ranked) {
        for (int i = threadIdx.x; i < size; i += THREADS) {
            const u64 key = shared.candidates[i];
            shared.candidates[i] = i < kept ? key << 32 | key >> 32 : NEVER;
        }
        sort_candidates(size, shared);
        sum_masses(kept, 0, shared);
        shift = 32;
    }
    const u64 target = __umul64hi(random, shared.masses[kept - 1]);
    for (int i = threadIdx.x; i < kept; i += THREADS)
        if ((i == 0 || shared.masses[i - 1] <= target) && target < shared.masses[i])
            shared.id = static_cast<int>(static_cast<unsigned>(shared.candidates[i] >> shift));
    __syncthreads();
    return shared.id;
}

// ---------------------------------------------------------------- cuts through the whole row

// A token's place among all in order of score, then of id: the `tie`-th, from 0, of those with the
// score; before it, tokens with lower scores have this mass and count.
struct Place {
    unsigned score;
    u64 tie, mass_before;
    unsigned count_before;
};

// Add a row's scores, of those whose upper bits are `prefix`, to the histogram of the next bits.
template <typename T>
__device__ void fill_histogram(const Job<T>& job, int row, const Wish& wish, float top,
                               unsigned prefix, int prefix_shift, int shift, Shared& shared) {
    __syncthreads();
    for (int i = threadIdx.x; i < 2048; i += THREADS)
        shared.counts[i] = shared.low[i] = shared.high[i] = 0;
    __syncthreads();
    for (int slice = 0; slice < job.slices(); slice++) {
        float x[RUNS * RUN];
        read_shaped(job, row, wish, slice, x, shared);
#pragma unroll 4
        for (int i = 0; i < RUNS * RUN; i++) {
            if (!(x[i] > -INFINITE)) continue;
            const unsigned score = score_of(x[i], top, wish.temperature);
            if (prefix_shift < 32 && score >> prefix_shift != prefix) continue;
            const unsigned bin = score >> shift & 2047;
            const u64 mass = mass_of(score);
            const unsigned low = static_cast<unsigned>(mass);
            const unsigned carry = atomicAdd(&shared.low[bin], low) + low < low;
            const unsigned high = static_cast<unsigned>(mass >> 32) + carry;
            if (high) atomicAdd(&shared.high[bin], high);
            atomicAdd(&shared.counts[bin], 1u);
        }
    }
    __syncthreads();
}

// Where the running mass, or count, passes `target`; false if it does not.
template <typename T>
__device__ __noinline__ bool descend(const Job<T>& job, int row, const Wish& wish, float top,
                                     bool by_mass, u64 target, Place& place, Shared& shared) {
    constexpr int EACH = 2048 / THREADS;
    unsigned prefix = 0;
    u64 mass_before = 0, count_before = 0;
    for (int level = 0; level < 3; level++) {
        const int shift = level == 0 ? 21 : level == 1 ? 10 : 0;
        const int width = level == 2 ? 10 : 11;
        fill_histogram(job, row, wish, top, prefix, shift + width, shift, shared);
        const int first = threadIdx.x * EACH;
        u64 mass = 0, count = 0, all_mass, all_count;
        for (int i = first; i < first + EACH; i++) {
            mass += static_cast<u64>(shared.high[i]) << 32 | shared.low[i];
            count += shared.counts[i];
        }
        u64 masses = mass_before + block_sum_before(mass, shared.sums, all_mass);
        u64 counts = count_before + block_sum_before(count, shared.sums, all_count);
        if (target >= (by_mass ? mass_before + all_mass : count_before + all_count)) return false;
        const u64 begin = by_mass ? masses : counts;
        if (begin <= target && target < begin + (by_mass ? mass : count)) {
            for (int i = first;; i++) {
                const u64 bin_mass = static_cast<u64>(shared.high[i]) << 32 | shared.low[i];
                const u64 bin_count = shared.counts[i];
                if (target < (by_mass ? masses + bin_mass : counts + bin_count)) {
                    shared.bin = i;
                    shared.mass_before = masses;
                    shared.count_before = static_cast<unsigned>(counts);
                    break;
                }
                masses += bin_mass;
                counts += bin_count;
            }
        }
        __syncthreads();
        prefix = prefix << width | shared.bin;
        mass_before = shared.mass_before;
        count_before = shared.count_before;
        __syncthreads();
    }
    place.score = prefix;
    place.mass_before = mass_before;
    place.count_before = static_cast<unsigned>(count_before);
    place.tie = by_mass ? (target - mass_before) / mass_of(prefix) : target - count_before;
    return true;
}

template <typename T>
__device__ __noinline__ int draw_from_row(const Job<T>& job, int row, const Wish& wish, float top,
                                          u64 random, Shared& shared) {
    const bool cut_k = cuts_rank(job, wish), cut_p = wish.top_p < 1.0f;
    const Scale all = {top, wish.temperature, ANY_SCORE, ANY_SCORE, ANY_ID, false};
    const auto sum_of = [&](const Scale& scale) {
        u64 sum;
        walk(job, row, wish, 0, job.slices(), scale, NEVER, sum, shared);
        return sum;
    };
    const auto find = [&](const Scale& scale, u64 target) {
        u64 unused;
        return walk(job, row, wish, 0, job.slices(), scale, target, unused, shared);
    };
    const auto id_at = [&](const Place& place) {
        Scale ties = all;
        ties.edge = place.score;
        ties.ties = true;
        return find(ties, place.tie);
    };
    const auto mass_up_to = [&](const Place& place) {
        return place.mass_before + (place.tie + 1) * mass_of(place.score);
    };
    // Each filter keeps the first so many in order of score: the strictest decides. What is kept is
    // known by its mass.
    u64 kept = sum_of(all);
    Scale allowed = all;
    bool ranked = cut_k;
    Place place;
    if (cut_k && descend(job, row, wish, top, false, wish.top_k - 1, place, shared))
        kept = min(kept, mass_up_to(place));
    if (cut_p) {
        const double wanted = ceil(wish.top_p * static_cast<double>(kept));
        const u64 target = min(static_cast<u64>(fmax(wanted, 1.0)) - 1, kept - 1);
        descend(job, row, wish, top, true, target, place, shared);
        kept = min(kept, mass_up_to(place));
        ranked |= place.count_before + place.tie + 1 <= RANKED;
        if (!ranked) {
            allowed.edge = place.score;
            allowed.last = id_at(place);
        }
    }
    if (wish.min_p > 0.0f) {
        allowed.worst = 0;
        for (int bit = 31; bit >= 0; bit--)
            if (weight_of(allowed.worst | 1u << bit) >= wish.min_p) allowed.worst |= 1u << bit;
        Scale likely = all;
        likely.worst = allowed.worst;
        kept = min(kept, sum_of(likely));
    }
    const u64 target = __umul64hi(random, kept);
    if (!ranked) return find(allowed, target);
    descend(job, row, wish, top, true, target, place, shared);
    return id_at(place);
}

// ---------------------------------------------------------------- gather

template <typename T>
__device__ void gather_slice(const Job<T>& job, int row, int slice, Shared& shared) {
    const Bound bound = *job.bound(row);
    if (!bound.open) return;
    const Wish wish = job.wishes[row];
    if (threadIdx.x == 0) shared.count = 0;
    __syncthreads();
    // Most threads know from `scan` that they have no candidate, and read nothing.
    const float top = __ldcg(job.maxima(row) + slice * THREADS + threadIdx.x);
    const bool hot = top >= bound.threshold && top > -INFINITE;
    float x[RUNS * RUN];
    if (has_penalties(job, wish) || has_bans(job, row))
        read_shaped(job, row, wish, slice, x, shared);
    else if (hot)
        read_slice(job, row, slice, x);
#pragma unroll
    for (int i = 0; i < RUNS * RUN; i++) {
        if (hot && x[i] >= bound.threshold && x[i] > -INFINITE) {
            const int at = atomicAdd(&shared.count, 1);
            const u64 score = score_of(x[i], bound.top, wish.temperature);
            if (at < CAPACITY)
                shared.candidates[at] = score << 32 | id_of(slice, i / RUN, i % RUN);
        }
    }
    __syncthreads();
    const int mine = shared.count;
    if (threadIdx.x == 0) shared.bin = mine ? atomicAdd(job.found + row, mine) : 0;
    __syncthreads();
    const int first = shared.bin;
    for (int i = threadIdx.x; i < mine && first + i < CAPACITY && i < CAPACITY; i += THREADS)
        __stcg(job.candidates(row) + first + i, shared.candidates[i]);
    if (!arrives_last(job, row, shared)) return;

    const u64 random = uniform(wish.seed, job.positions[row]);
    const int count = __ldcg(job.found + row);
    int id = -1;
    if (count <= CAPACITY) {
        for (int i = threadIdx.x; i < count; i += THREADS)
            shared.candidates[i] = __ldcg(job.candidates(row) + i);
        id = draw_from_candidates(job, wish, bound, count, random, shared);
    }
    if (id < 0) id = draw_from_row(job, row, wish, bound.top, random, shared);
    if (threadIdx.x == 0) answer(job, row, id, bound.log_sum);
}

// ---------------------------------------------------------------- kernels

// Grid: (slices, rows). Logits [rows, vocab], `stride` apart; tokens, logprobs, statuses [rows].
// `arrivals` and `found` [rows]; arrivals are 0 before and after. See Job::of_row for `scratch`.
// Any of counts [slots, vocab] with prompt [slots, words of 32 tokens], and of ban_starts
// [rows + 1] with bans, may be null.
template <typename T>
__global__ void __launch_bounds__(THREADS, 4)
    scan(const T* logits, long long stride, int vocab, const Wish* wishes,
         const long long* positions, const short* counts, const unsigned char* prompt,
         const int* ban_starts, const int* bans, char* scratch, int* arrivals, int* found,
         long long* tokens, float* logprobs, int* statuses) {
    __shared__ Shared shared;
    wait_for_previous();
    launch_next();
    const Job<T> job = {logits,     stride, vocab,   wishes,   positions, counts, prompt,  ban_starts,
                        bans,       scratch, arrivals, found,  tokens,    logprobs, statuses};
    scan_slice(job, blockIdx.y, blockIdx.x, shared);
}

// After `scan`, with the same arguments.
template <typename T>
__global__ void __launch_bounds__(THREADS, 4)
    gather(const T* logits, long long stride, int vocab, const Wish* wishes,
           const long long* positions, const short* counts, const unsigned char* prompt,
           const int* ban_starts, const int* bans, char* scratch, int* arrivals, int* found,
           long long* tokens, float* logprobs, int* statuses) {
    __shared__ Shared shared;
    wait_for_previous();
    launch_next();
    const Job<T> job = {logits,     stride, vocab,   wishes,   positions, counts, prompt,  ban_starts,
                        bans,       scratch, arrivals, found,  tokens,    logprobs, statuses};
    gather_slice(job, blockIdx.y, blockIdx.x, shared);
}

// Count token ids[i] of the output of slots[i], for i < n; negative slots and ids are passed over.
// A count stays at 32767.
__global__ void note_output(const int* slots, const long long* ids, short* counts, int n,
                            int vocab) {
    wait_for_previous();
    launch_next();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || slots[i] < 0 || ids[i] < 0 || ids[i] >= vocab) return;
    const long long at = static_cast<long long>(slots[i]) * vocab + ids[i];
    unsigned* const word = reinterpret_cast<unsigned*>(counts) + at / 2;
    const int shift = at % 2 * 16;
    for (unsigned seen = *word;;) {
        if ((seen >> shift & 0xffffu) == 32767u) return;
        const unsigned before = atomicCAS(word, seen, seen + (1u << shift));
        if (before == seen) return;
        seen = before;
    }
}

// Set the bits of token ids[i] in the prompt of slots[i], for i < n.
__global__ void note_prompt(const int* slots, const long long* ids, unsigned* prompt, int n,
                            int vocab) {
    wait_for_previous();
    launch_next();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || slots[i] < 0 || ids[i] < 0 || ids[i] >= vocab) return;
    const long long words = (vocab + 31) / 32;
    atomicOr(prompt + slots[i] * words + ids[i] / 32, 1u << ids[i] % 32);
}
