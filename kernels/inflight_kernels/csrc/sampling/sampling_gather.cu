// The last pass of the sampler, over the rows that still need a token (see sampling_job.cuh).
#include "sampling/sampling_job.cuh"

constexpr int RANKED = 256;  // a nucleus up to this size is sampled in descending probability

struct GatherShared : Shared {
    union {
        struct {
            u64 candidates[CAPACITY];
            u64 masses[CAPACITY];
        };
        struct {
            unsigned counts[2048], low[2048], high[2048];
        };
    };
    Bound bound;
    u64 mass_before;
    unsigned count_before, bin;
    int count;
};

// ---------------------------------------------------------------- candidates

// Sort `shared.candidates[0:size]`, size a power of two, ascending (Batcher's bitonic network).
// Called once or twice per row, so it is not inlined, like the following functions.
__device__ __noinline__ void sort_candidates(int size, GatherShared& shared) {
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
__device__ __noinline__ void sum_masses(int count, int shift, GatherShared& shared) {
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

// Number of i < count with good(i), a predicate that is true up to some i and false from there on.
template <typename Good>
__device__ int count_while(int count, GatherShared& shared, Good good) {
    int mine = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) mine += good(i);
    return block_total(mine, shared.ints);
}

// The first of `count` candidates at which the cumulative mass exceeds `target`.
__device__ __noinline__ int candidate_at(int count, u64 target, int shift, GatherShared& shared) {
    for (int i = threadIdx.x; i < count; i += THREADS)
        if ((i == 0 || shared.masses[i - 1] <= target) && target < shared.masses[i])
            shared.id = static_cast<int>(static_cast<unsigned>(shared.candidates[i] >> shift));
    __syncthreads();
    return shared.id;
}

// Sort `count` candidates by score, then by token id, and sum their masses. Returns the count
// padded to a power of two.
__device__ __noinline__ int order_candidates(int count, GatherShared& shared) {
    int size = 2;
    while (size < count) size *= 2;
    for (int i = count + threadIdx.x; i < size; i += THREADS) shared.candidates[i] = NEVER;
    sort_candidates(size, shared);
    sum_masses(count, 32, shared);
    return size;
}

// Sample from `count` candidates in shared memory if they suffice: the token, or -1.
template <typename T>
__device__ __noinline__ int draw_from_candidates(const Job<T>& job, const RowParams& params,
                                                 const Bound& bound, int count, u64 random,
                                                 GatherShared& shared) {
    const bool cut_k = cuts_rank(job, params), cut_p = params.top_p < 1.0f;
    const bool all = !(bound.threshold > -INFINITE);
    if (cut_k && count < params.top_k && !all) return -1;

    const int size = order_candidates(count, shared);
    const int limit = cut_k ? min(params.top_k, count) : count;
    int kept = limit;
    if (cut_p) {
        const double total = cut_k || all ? static_cast<double>(shared.masses[limit - 1])
                                          : static_cast<double>(bound.sum) * MASS_ONE;
        const double wanted = params.top_p * total;
        if (!cut_k && !all && static_cast<double>(shared.masses[count - 1]) < wanted) return -1;
        kept = count_while(limit, shared, [&](int i) {
            return i == 0 || static_cast<double>(shared.masses[i - 1]) < wanted;
        });
    }
    const bool ranked = cut_k || (cut_p && kept <= RANKED);
    if (params.min_p > 0.0f) {
        const int likely = count_while(kept, shared, [&](int i) {
            return weight_of(static_cast<unsigned>(shared.candidates[i] >> 32)) >= params.min_p;
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
    return candidate_at(kept, target, shift, shared);
}

// The mass from which XTC treats a token as a top choice. A token without mass cannot be sampled,
// so it is never the one that is kept.
__device__ inline double least_top(const RowParams& params, u64 mass) {
    return fmax(static_cast<double>(params.xtc_threshold) * static_cast<double>(mass), 1.0);
}

// The mass from which on epsilon_cutoff keeps a token.
__device__ inline double least_epsilon(const RowParams& params, u64 mass) {
    return static_cast<double>(params.epsilon_cutoff) * static_cast<double>(mass);
}

// Number of the first `count` candidates with scores below `score`. Callable by a single thread.
__device__ inline int count_below(unsigned score, int count, const GatherShared& shared) {
    int low = 0, high = count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (static_cast<unsigned>(shared.candidates[middle] >> 32) < score)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// The same with any filters. They keep candidates [begin, end); while `open`, tokens that are not
// candidates may follow.
template <typename T>
__device__ __noinline__ int draw_rare_from_candidates(const Job<T>& job, const RowParams& params,
                                                      const Bound& bound, int count, u64 random,
                                                      bool excludes, GatherShared& shared) {
    const bool cut_k = cuts_rank(job, params);
    bool open = bound.threshold > -INFINITE;
    order_candidates(count, shared);
    // Some tokens with exactly the bound's score may not be candidates.
    const unsigned known = open ? score_of(bound.threshold, bound.top, params.temperature) : ANY_SCORE;
    if (open) count = count_below(known, count, shared);
    if (count == 0) return -1;
    const auto score_at = [&](int i) { return static_cast<unsigned>(shared.candidates[i] >> 32); };
    const auto mass_before = [&](int i) { return i ? shared.masses[i - 1] : 0; };
    int begin = 0, end = count;

    if (params.top_n_sigma > 0.0f && bound.worst < known) {
        if (bound.worst != ANY_SCORE) end = count_below(bound.worst + 1, count, shared);
        open = false;
    }
    if (cut_k && params.top_k <= end) {
        end = params.top_k;
        open = false;
    }
    // These filters need all tokens that they apply to as candidates.
    if (open && (cut_k || params.top_n_sigma > 0.0f)) return -1;
    if (params.typical_p < 1.0f) {
        u64 mass = bound.mass;
        unsigned mean = bound.mean;
        if (!open) {
            u64 moment = 0;
            for (int i = threadIdx.x; i < end; i += THREADS) moment += moment_of(score_at(i));
            moment = block_total(moment, shared.sums);
            mass = mass_before(end);
            mean = mean_score(mass, moment);
        }
        const double wanted = static_cast<double>(params.typical_p) * static_cast<double>(mass);
        unsigned furthest = ANY_SCORE;
        bool enough = false;
        for (int i = threadIdx.x; i < end; i += THREADS) {
            const unsigned score = score_at(i);
            const unsigned distance = score > mean ? score - mean : mean - score;
            const unsigned low = mean - min(mean, distance);
            const unsigned high = mean + min(ANY_SCORE - 1 - mean, distance);
            const u64 within = mass_before(count_below(high + 1, end, shared)) -
                               mass_before(count_below(low, end, shared));
            if (static_cast<double>(within) >= wanted) {
                furthest = min(furthest, distance);
                enough = true;
            }
        }
        if (!__syncthreads_or(enough)) return -1;
        furthest = block_reduce(furthest, shared.unsigneds,
                                [](unsigned a, unsigned b) { return min(a, b); });
        const unsigned high = mean + min(ANY_SCORE - 1 - mean, furthest);
        if (open && high >= known) return -1;
        begin = count_below(mean - min(mean, furthest), end, shared);
        end = count_below(high + 1, end, shared);
        open = false;
    }
    if (params.top_p < 1.0f) {
        const u64 base = mass_before(begin);
        const u64 total = open ? bound.mass : mass_before(end) - base;
        const double wanted = static_cast<double>(params.top_p) * static_cast<double>(total);
        if (open && static_cast<double>(mass_before(end) - base) < wanted) return -1;
        const int kept = count_while(end, shared, [&](int i) {
            return i <= begin || static_cast<double>(mass_before(i) - base) < wanted;
        });
        end = kept;
        open = false;
    }
    if (params.min_p > 0.0f) {
        const float least = params.min_p * weight_of(score_at(begin));
        if (open && weight_of(known) < least) open = false;
        const int kept = count_while(
            end, shared, [&](int i) { return i <= begin || weight_of(score_at(i)) >= least; });
        open &= kept == end;
        end = kept;
    }
    if (params.epsilon_cutoff > 0.0f) {
        // What min_p has left of the tokens that are no candidates is not known here.
        if (open && params.min_p > 0.0f) return -1;
        const u64 base = mass_before(begin);
        const u64 total = open ? bound.mass : mass_before(end) - base;
        const double least = least_epsilon(params, total);
        if (open && static_cast<double>(mass_of(known)) < least) open = false;
        const int kept = count_while(end, shared, [&](int i) {
            return i <= begin || static_cast<double>(mass_of(score_at(i))) >= least;
        });
        open &= kept == end;
        end = kept;
    }
    if (open) return -1;
    if (excludes) {
        const u64 base = mass_before(begin);
        const double least = least_top(params, mass_before(end) - base);
        const int top = count_while(end, shared, [&](int i) {
            return i < begin || static_cast<double>(mass_of(score_at(i))) >= least;
        });
        begin = max(begin, top - 1);
    }
    const u64 base = mass_before(begin);
    return candidate_at(end, base + __umul64hi(random, mass_before(end) - base), 0, shared);
}

// ---------------------------------------------------------------- filters over the whole row

// A token's position among all sorted by score, then id: the `tie`-th, from 0, of those with this
// score; mass and count are those of the tokens with lower scores.
struct Place {
    unsigned score;
    u64 tie, mass_before;
    unsigned count_before;
};

// Sort key of tokens: their score, or its distance from `center`. Tokens outside `scale` are
// excluded.
struct Order {
    Scale scale;
    bool by_distance;
    unsigned center;

    __device__ unsigned key(unsigned score) const {
        if (!by_distance) return score;
        return score > center ? score - center : center - score;
    }
};

// Add a row's keys whose upper bits are `prefix` to the histogram of the next bits.
template <typename T>
__device__ void fill_histogram(const Job<T>& job, int row, const RowParams& params, const Order& order,
                               unsigned prefix, int prefix_shift, int shift, GatherShared& shared) {
    __syncthreads();
    for (int i = threadIdx.x; i < 2048; i += THREADS)
        shared.counts[i] = shared.low[i] = shared.high[i] = 0;
    __syncthreads();
    for (int slice = 0; slice < job.slices(); slice++) {
        float x[VALUES];
        read_adjusted(job, row, params, slice, x, shared);
#pragma unroll 4
        for (int i = 0; i < VALUES; i++) {
            if (!(x[i] > -INFINITE)) continue;
            const unsigned score = score_of(x[i], order.scale.top, params.temperature);
            if (!order.scale.has(score, id_of<T>(slice, i))) continue;
            const unsigned key = order.key(score);
            if (prefix_shift < 32 && key >> prefix_shift != prefix) continue;
            const unsigned bin = key >> shift & 2047;
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

// The position at which the cumulative mass, or count, exceeds `target`; false if it does not. With
// distances, where two scores have the same key, the position is the key and what precedes it.
template <typename T>
__device__ __noinline__ bool descend(const Job<T>& job, int row, const RowParams& params,
                                     const Order order, bool by_mass, u64 target, Place& place, GatherShared& shared) {
    constexpr int EACH = 2048 / THREADS;
    unsigned prefix = 0;
    u64 mass_before = 0, count_before = 0;
    for (int level = 0; level < 3; level++) {
        const int shift = level == 0 ? 21 : level == 1 ? 10 : 0;
        const int width = level == 2 ? 10 : 11;
        fill_histogram(job, row, params, order, prefix, shift + width, shift, shared);
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
    if (order.by_distance)
        place.tie = 0;
    else
        place.tie = by_mass ? (target - mass_before) / mass_of(prefix) : target - count_before;
    return true;
}

template <typename T>
__device__ __noinline__ int draw_from_row(const Job<T>& job, int row, const RowParams& params, float top,
                                          u64 random, GatherShared& shared) {
    const bool cut_k = cuts_rank(job, params), cut_p = params.top_p < 1.0f;
    const Scale all = {top, params.temperature, ANY_SCORE, ANY_SCORE, ANY_ID, MASS};
    const Order ranks = {all};
    const auto sum_of = [&](const Scale& scale) {
        u64 sum;
        walk(job, row, params, 0, job.slices(), scale, NEVER, sum, shared);
        return sum;
    };
    const auto find = [&](const Scale& scale, u64 target) {
        u64 unused;
        return walk(job, row, params, 0, job.slices(), scale, target, unused, shared);
    };
    const auto id_at = [&](const Place& place) {
        Scale ties = all;
        ties.edge = place.score;
        ties.weight = TIES;
        return find(ties, place.tie);
    };
    const auto mass_up_to = [&](const Place& place) {
        return place.mass_before + (place.tie + 1) * mass_of(place.score);
    };
    // Each filter keeps a prefix in order of score: the shortest applies. It is represented by its
    // mass.
    u64 kept = sum_of(all);
    Scale allowed = all;
    bool ranked = cut_k;
    Place place;
    if (cut_k && descend(job, row, params, ranks, false, params.top_k - 1, place, shared))
        kept = min(kept, mass_up_to(place));
    if (cut_p) {
        const double wanted = ceil(params.top_p * static_cast<double>(kept));
        const u64 target = min(static_cast<u64>(fmax(wanted, 1.0)) - 1, kept - 1);
        descend(job, row, params, ranks, true, target, place, shared);
        kept = min(kept, mass_up_to(place));
        ranked |= place.count_before + place.tie + 1 <= RANKED;
        if (!ranked) {
            allowed.edge = place.score;
            allowed.last = id_at(place);
        }
    }
    if (params.min_p > 0.0f) {
        allowed.worst = 0;
        for (int bit = 31; bit >= 0; bit--)
            if (weight_of(allowed.worst | 1u << bit) >= params.min_p) allowed.worst |= 1u << bit;
        Scale likely = all;
        likely.worst = allowed.worst;
        kept = min(kept, sum_of(likely));
    }
    const u64 target = __umul64hi(random, kept);
    if (!ranked) return find(allowed, target);
    descend(job, row, params, ranks, true, target, place, shared);
    return id_at(place);
}

// The largest score with good(score), a predicate that is true from 0 up to some score; ANY_SCORE
// if it is false for 0.
template <typename Good>
__device__ unsigned largest_score(Good good) {
    if (!good(0u)) return ANY_SCORE;
    unsigned found = 0;
    for (int bit = 31; bit >= 0; bit--)
        if (good(found | 1u << bit)) found |= 1u << bit;
    return found;
}

// The same with any filters. Tokens sorted by score, then id, are laid end to end, each as long as
// its mass: [begin, end) of that is kept.
template <typename T>
__device__ __noinline__ int draw_rare_from_row(const Job<T>& job, int row, const RowParams& params,
                                               const Bound& bound, u64 random, bool excludes,
                                               GatherShared& shared) {
    const Scale all = {bound.top, params.temperature, ANY_SCORE, ANY_SCORE, ANY_ID, MASS};
    const Order ranks = {all};
    Place place;
    const auto sum_of = [&](const Scale& scale) {
        u64 sum;
        walk(job, row, params, 0, job.slices(), scale, NEVER, sum, shared);
        return sum;
    };
    const auto mass_up_to_score = [&](unsigned score) {
        Scale some = all;
        some.worst = score;
        return sum_of(some);
    };
    const auto id_at = [&](const Place& at) {
        Scale ties = all;
        ties.edge = at.score;
        ties.weight = TIES;
        u64 unused;
        return walk(job, row, params, 0, job.slices(), ties, at.tie, unused, shared);
    };
    const auto mass_up_to = [&](const Place& at) {
        return at.mass_before + (at.tie + 1) * mass_of(at.score);
    };

    u64 begin = 0, end = bound.mass;
    if (params.top_n_sigma > 0.0f) end = mass_up_to_score(bound.worst);
    if (cuts_rank(job, params) &&
        descend(job, row, params, ranks, false, params.top_k - 1, place, shared))
        end = min(end, mass_up_to(place));
    if (params.typical_p < 1.0f) {
        Order nearest = {all, true, bound.mean};
        if (end < bound.mass) {
            descend(job, row, params, ranks, true, end - 1, place, shared);
            nearest.scale.edge = place.score;
            nearest.scale.last = id_at(place);
            Scale moments = nearest.scale;
            moments.weight = MOMENT;
            nearest.center = mean_score(end, sum_of(moments));
        }
        const double wanted =
            ceil(static_cast<double>(params.typical_p) * static_cast<double>(end));
        const u64 target = min(static_cast<u64>(fmax(wanted, 1.0)) - 1, end - 1);
        descend(job, row, params, nearest, true, target, place, shared);
        const unsigned mean = nearest.center, furthest = place.score;
        if (mean > furthest) begin = min(mass_up_to_score(mean - furthest - 1), end);
        end = min(end, mass_up_to_score(mean + min(ANY_SCORE - 1 - mean, furthest)));
    }
    if (params.top_p < 1.0f) {
        const double wanted =
            ceil(static_cast<double>(params.top_p) * static_cast<double>(end - begin));
        const u64 target = min(begin + static_cast<u64>(fmax(wanted, 1.0)) - 1, end - 1);
        descend(job, row, params, ranks, true, target, place, shared);
        end = min(end, mass_up_to(place));
    }
    if (params.min_p > 0.0f) {
        unsigned first = 0;
        if (begin > 0) {
            descend(job, row, params, ranks, true, begin, place, shared);
            first = place.score;
        }
        const float least = params.min_p * weight_of(first);
        const unsigned worst =
            largest_score([&](unsigned score) { return weight_of(score) >= least; });
        end = min(end, mass_up_to_score(worst));
    }
    if (params.epsilon_cutoff > 0.0f) {
        unsigned first = 0;
        if (begin > 0) {
            descend(job, row, params, ranks, true, begin, place, shared);
            first = place.score;
        }
        const double least = least_epsilon(params, end - begin);
        const unsigned worst = largest_score(
            [&](unsigned score) { return static_cast<double>(mass_of(score)) >= least; });
        const u64 likely = worst == ANY_SCORE ? 0 : mass_up_to_score(worst);
        end = min(end, max(likely, begin + mass_of(first)));
    }
    if (excludes) {
        const double least = least_top(params, end - begin);
        const unsigned worst = largest_score(
            [&](unsigned score) { return static_cast<double>(mass_of(score)) >= least; });
        const u64 top = worst == ANY_SCORE ? 0 : min(end, mass_up_to_score(worst));
        if (top > begin) {
            descend(job, row, params, ranks, true, top - 1, place, shared);
            begin = max(begin, place.mass_before + place.tie * mass_of(place.score));
        }
    }
    const u64 target = begin + __umul64hi(random, end - begin);
    descend(job, row, params, ranks, true, target, place, shared);
    return id_at(place);
}

// ---------------------------------------------------------------- the pass

template <typename T>
__device__ void gather_slice(int row, int slice, const Common<T>& common, GatherShared& shared) {
    const Job<T>& job = common.job;
    const RowParams& params = common.params;
    if (threadIdx.x == 0) {
        shared.bound = *job.bound(row);
        shared.count = 0;
    }
    __syncthreads();
    const Bound& bound = shared.bound;
    // Most threads know from `scan` that they have no candidates, and read nothing.
    const float top = __ldcg(job.maxima(row) + slice * THREADS + threadIdx.x);
    const bool hot = top >= bound.threshold && top > -INFINITE;
    float x[VALUES];
    if (is_adjusted(job, row, params))
        read_adjusted(job, row, params, slice, x, shared);
    else if (hot)
        read_slice(job, row, slice, x);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        if (hot && x[i] >= bound.threshold && x[i] > -INFINITE) {
            const int at = atomicAdd(&shared.count, 1);
            const u64 score = score_of(x[i], bound.top, params.temperature);
            if (at < CAPACITY)
                shared.candidates[at] = score << 32 | id_of<T>(slice, i);
        }
    }
    __syncthreads();
    const int mine = shared.count;
    if (threadIdx.x == 0) shared.bin = mine ? atomicAdd(job.found + row, mine) : 0;
    __syncthreads();
    const int first = shared.bin;
    for (int i = threadIdx.x; i < mine && first + i < CAPACITY && i < CAPACITY; i += THREADS)
        __stcg(job.candidates(row) + first + i, shared.candidates[i]);
    __syncthreads();
    if (!arrives_last(job, row)) return;

    const u64 random = uniform(params.seed, job.positions[row], DRAW);
    const bool rare = has_rare_filters(params);
    const bool excludes =
        params.xtc_probability > 0.0f &&
        static_cast<double>(uniform(params.seed, job.positions[row], XTC)) * 0x1p-64 <
            static_cast<double>(params.xtc_probability);
    const int count = __ldcg(job.found + row);
    int id = -1;
    if (count <= CAPACITY) {
        for (int i = threadIdx.x; i < count; i += THREADS)
            shared.candidates[i] = __ldcg(job.candidates(row) + i);
        id = rare ? draw_rare_from_candidates(job, params, bound, count, random, excludes, shared)
                  : draw_from_candidates(job, params, bound, count, random, shared);
    }
    if (id < 0)
        id = rare ? draw_rare_from_row(job, row, params, bound, random, excludes, shared)
                  : draw_from_row(job, row, params, bound.top, random, shared);
    if (threadIdx.x == 0) write_result(job, row, id, bound.log_sum);
}

// Grid: (slices, rows). After `scan`, and after `spread` if a row has rare filters, with the same
// arguments.
template <typename T>
__global__ void __launch_bounds__(THREADS, 4) gather(JOB_PARAMETERS) {
    __shared__ Common<T> common;
    __shared__ GatherShared shared;
    pdl_wait();
    pdl_launch_dependents();
    const Job<T> job = JOB;
    if (!job.bound(blockIdx.y)->open) return;
    copy_to_shared(job, row_params[blockIdx.y], common);
    gather_slice(blockIdx.y, blockIdx.x, common, shared);
}
