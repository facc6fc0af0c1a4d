// Prompt lookup: drafts from a sequence's own tokens. One block per sequence.

#include "common.cuh"
#include "sampling/row_params.cuh"

typedef unsigned long long u64;

constexpr int THREADS = 256;

constexpr int NO_DRAFT = -2;  // as in batch_state.py

// As in torch_ops/drafting.py.
constexpr int RESUME_TOKENS = 64, RESUME_AGE = 16;

// Where a text has left the passage that it copied.
struct Left {
    int position;    // of the passage's next token; negative if there is none, or left too long ago
    int num_tokens;  // of the text since then
};

// `copy` is the start of the last drafts' source, and the position of the last token at that time.
// All lanes of a warp call it.
__device__ Left left_copy(const int* copy, const int* tokens, int last) {
    const int start = copy[0], first = copy[1] + 1;
    if (start < 0) return {-1, 0};
    int copied = 0;
    for (int offset = threadIdx.x % 32; copied % 32 == 0 && copied < RESUME_TOKENS; offset += 32) {
        const bool same =
            first + offset <= last && tokens[start + offset] == tokens[first + offset];
        const unsigned differ = ~__ballot_sync(FULL_WARP, same);
        if (differ & 1) break;
        copied += differ ? __ffs(differ) - 1 : 32;
    }
    const int since = last + 1 - first - copied;
    return {since > RESUME_AGE ? -1 : start + copied, since};
}

// Each occurrence of the last token is a match; the longest wins and, among equals, the first one
// that resumes a copy, else the latest. All that is encoded in one number, whose maximum is
// computed. Without any, a copy that was left with the last token goes on after the token that this
// one replaces.
//
//   copies [slots, 2]   the source of each sequence's last drafts (left_copy); negative for none;
//                       updated. Null to resume none.
extern "C" __global__ void __launch_bounds__(THREADS)
    draft_ngram(const int* slots, const int* last_positions, const int* history, int width,
                int* drafts, int num_drafts, int max_match, int min_match, int per_match,
                int* copies) {
    pdl_wait();
    pdl_launch_dependents();
    const int slot = slots[blockIdx.x];
    if (slot < 0) return;
    const int last = last_positions[slot];
    const int* const tokens = history + static_cast<long long>(slot) * width;
    u64 best = 0;
    Left left = {-1, 0};
    if (last < width) {
        if (copies) left = left_copy(copies + 2 * slot, tokens, last);
        const int wanted = tokens[last];
        for (int end = threadIdx.x; end < last; end += THREADS) {
            if (tokens[end] != wanted) continue;
            int matched = 1;
            while (matched < max_match && matched <= end &&
                   tokens[end - matched] == tokens[last - matched])
                matched++;
            const unsigned after = end - left.position;
            const bool resumes = left.position >= 0 && after < RESUME_TOKENS;
            const u64 found = static_cast<u64>(2 * matched + resumes) << 32 |
                              (resumes ? ~after : static_cast<unsigned>(end));
            if ((matched >= min_match || resumes) && found > best) best = found;
        }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const u64 other = __shfl_xor_sync(FULL_WARP, best, distance);
        if (other > best) best = other;
    }
    __shared__ u64 bests[THREADS / 32];
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
    __syncthreads();
    for (int warp = 0; warp < THREADS / 32; warp++)
        if (bests[warp] > best) best = bests[warp];
    const int num_matched = static_cast<int>(best >> 33);
    const unsigned place = static_cast<unsigned>(best);
    const bool replaces =
        best == 0 && left.position >= 0 && left.num_tokens == 1 && left.position < last;
    const bool found = best > 0 || replaces;
    int start = 1 + static_cast<int>(place);
    if (best >> 32 & 1) start = 1 + left.position + static_cast<int>(~place);
    if (replaces) start = 1 + left.position;
    const int count = per_match ? min(num_drafts, per_match * num_matched) : num_drafts;
    for (int i = threadIdx.x; i < num_drafts; i += THREADS)
        drafts[slot * num_drafts + i] =
            found && i < count ? tokens[start + i % (last + 1 - start)] : NO_DRAFT;
    if (copies && best > 0 && threadIdx.x < 2)
        copies[2 * slot + threadIdx.x] = threadIdx.x ? last : start;
}

// ---------------------------------------------------------------- draft models

// As in batch_state.py.
constexpr int NUM_CHUNKS = 0, NUM_TOKENS = 2;
constexpr int OK = 0;

// A padding row has token 0 at position 0, whose KV is not stored: it attends to itself, or to the
// first entry of its block table, and its output is not used.
constexpr int PADDING = -1;

// Prepares the first pass: the last token of each chunk's sequence, or, with `behind`, the position
// before it. One block per row; rows past the chunks, and those of chunks that sampled nothing, are
// padding.
//
// The block tables of the step's chunks are extended up to the last position of a draft. A
// sequence's block table ends with a negative entry: positions from there on use one scratch block
// per chunk.
extern "C" __global__ void begin_drafting(
    const int* header, const int* sample_slots, const int* query_start,
    const long long* step_positions, const long long* last_tokens, const int* last_positions,
    const int* tables, int table_width, int block_shift, const int* row_params, int behind,
    int num_drafts, int max_positions, int first_scratch, int* slots, long long* rows,
    long long* token_ids, long long* positions, long long* slot_mapping, int* seq_lens,
    int* step_tables, int* draft_row_params, long long* sample_positions) {
    pdl_wait();
    pdl_launch_dependents();
    const int chunk = blockIdx.x;
    int slot = chunk < header[NUM_CHUNKS] ? sample_slots[chunk] : PADDING;
    const int last = slot < 0 ? 0 : last_positions[slot];
    if (last >= max_positions) slot = PADDING;
    const int word = threadIdx.x;
    if (word < ROW_PARAMS_WORDS) {
        const int value = slot < 0 ? 0 : row_params[slot * ROW_PARAMS_WORDS + word];
        // Drafts are sampled without penalties and rare filters: no slot, and defaults.
        draft_row_params[chunk * ROW_PARAMS_WORDS + word] =
            word == ROW_PARAMS_SLOT ? -1 : without_rare_filters(word, value);
    }
    if (threadIdx.x != 0) return;
    slots[chunk] = slot;
    if (slot < 0) {
        rows[chunk] = token_ids[chunk] = positions[chunk] = sample_positions[chunk] = 0;
        slot_mapping[chunk] = -1;
        seq_lens[chunk] = 1;
        return;
    }
    const long long table = static_cast<long long>(slot) * table_width;
    const long long step_table = static_cast<long long>(chunk) * table_width;
    const int last_block = min((last + num_drafts - 1) >> block_shift, table_width - 1);
    bool ended = false;
    for (int block = ((last - 1) >> block_shift) + 1; block <= last_block; block++) {
        const int known = tables[table + block];
        ended |= known < 0;
        step_tables[step_table + block] = ended ? first_scratch + chunk : known;
    }
    const int position = last - behind;
    const int first = query_start[chunk];
    rows[chunk] = first + last - 1 - step_positions[first];
    token_ids[chunk] = last_tokens[slot];
    positions[chunk] = position;
    slot_mapping[chunk] =
        (static_cast<long long>(step_tables[step_table + (position >> block_shift)])
         << block_shift) |
        (position & ((1 << block_shift) - 1));
    seq_lens[chunk] = position + 1;
    sample_positions[chunk] = last + 1;
}

// Stores the sampled token of a pass as the next draft, and as the token of the next pass.
extern "C" __global__ void advance_drafting(int* slots, const long long* chosen,
                                            const int* statuses, const int* last_positions,
                                            const int* step_tables, int table_width,
                                            int block_shift, int behind, int max_positions,
                                            int num_chunks, int* drafts, int num_drafts,
                                            long long* token_ids, long long* positions,
                                            long long* slot_mapping, int* seq_lens,
                                            long long* sample_positions) {
    pdl_wait();
    pdl_launch_dependents();
    const int chunk = blockIdx.x * blockDim.x + threadIdx.x;
    if (chunk >= num_chunks) return;
    const int slot = slots[chunk];
    if (slot < 0) return;
    const int position = static_cast<int>(positions[chunk]);
    const int index = position - last_positions[slot] + behind;
    const bool fine = statuses[chunk] == OK;
    if (fine && index < num_drafts)
        drafts[slot * num_drafts + index] = static_cast<int>(chosen[chunk]);
    const int next = position + 1;
    if (!fine || index + 1 >= num_drafts || next >= max_positions) {
        slots[chunk] = PADDING;
        token_ids[chunk] = positions[chunk] = 0;
        slot_mapping[chunk] = -1;
        seq_lens[chunk] = 1;
        return;
    }
    token_ids[chunk] = chosen[chunk];
    positions[chunk] = next;
    const long long table = static_cast<long long>(chunk) * table_width;
    slot_mapping[chunk] =
        (static_cast<long long>(step_tables[table + (next >> block_shift)]) << block_shift) |
        (next & ((1 << block_shift) - 1));
    seq_lens[chunk] = next + 1;
    sample_positions[chunk]++;
}

// The token after each token of a step if it is known, otherwise an arbitrary one. One block per
// chunk, and per padding chunk of a CUDA graph; tokens up to `num_tokens` that are not the step's
// are padding.
extern "C" __global__ void next_tokens(const int* header, const int* slots, const int* query_start,
                                       const long long* positions, const int* history, int width,
                                       int num_tokens, long long* token_ids) {
    pdl_wait();
    pdl_launch_dependents();
    const int chunk = blockIdx.x;
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (int token = header[NUM_TOKENS] + thread; token < num_tokens; token += gridDim.x * blockDim.x)
        token_ids[token] = 0;
    if (chunk >= header[NUM_CHUNKS]) return;
    const int* const tokens = history + static_cast<long long>(slots[chunk]) * width;
    for (int i = query_start[chunk] + threadIdx.x; i < query_start[chunk + 1]; i += blockDim.x) {
        const long long next = positions[i] + 1;
        token_ids[i] = next < width ? tokens[next] : 0;
    }
}
