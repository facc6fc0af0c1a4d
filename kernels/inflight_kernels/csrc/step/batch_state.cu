// Persistent batch state: the inputs of a step are expanded at its start, and the sampled tokens
// are stored at its end. See batch_state.py for the layout of a step.

#include "common.cuh"
#include "sampling/row_params.cuh"

// As in batch_state.py.
constexpr int NUM_CHUNKS = 0, RING_INDEX = 1, NUM_TOKENS = 2, NUM_ROWS = 3;
constexpr int OK = 0;  // a status
constexpr int RESULT_ROWS = 6, NOT_DRAFTED = -1;

// Copies a step's n words from pinned host memory. Its values are read before the wait: only the
// host writes there, before this launch. A line of them may be cached from an earlier step, so each
// load goes to the host's memory.
extern "C" __global__ void upload(const int* from, int n, int* to) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int word = i < n ? *reinterpret_cast<const volatile int*>(from + i) : 0;
    pdl_wait();
    pdl_launch_dependents();
    if (i < n) to[i] = word;
}

// Writes table entries: tables[places[i]] = blocks[i].
extern "C" __global__ void write_tables(const int* places, const int* blocks, int n, int* tables) {
    pdl_wait();
    pdl_launch_dependents();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) tables[places[i]] = blocks[i];
}

// Writes sequences' row_params: row_params[slots[i]] = news[i].
extern "C" __global__ void write_row_params(const int* slots, const int* news, int n, int* row_params) {
    pdl_wait();
    pdl_launch_dependents();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n * ROW_PARAMS_WORDS)
        row_params[slots[i / ROW_PARAMS_WORDS] * ROW_PARAMS_WORDS + i % ROW_PARAMS_WORDS] = news[i];
}

// Takes what follows a chunk's first missing draft off a step of this chunk alone. The host has
// scheduled the drafts before the device looked for them.
__device__ void trim(int* header, const int* slots, int* query_start, int* row_start,
                     const int* tokens, const int* drafts, int num_drafts) {
    const int length = query_start[1], own_rows = row_start[1];
    __shared__ int first_missing;
    if (threadIdx.x == 0) first_missing = length;
    __syncthreads();
    for (int i = length - own_rows + 1 + threadIdx.x; i < length; i += blockDim.x)
        if (i > 0 && tokens[i] < 0 && drafts[slots[0] * num_drafts + i - 1] < 0)
            atomicMin(&first_missing, i);
    __syncthreads();
    const int spare = length - first_missing;
    if (threadIdx.x == 0 && spare > 0) {
        header[NUM_TOKENS] = query_start[1] = length - spare;
        header[NUM_ROWS] = row_start[1] = own_rows - spare;
    }
    __syncthreads();
}

// The block tables of all slots, [slots, width], and what a step has of them.
struct Table {
    const int* tables;
    int width;
    long long* slot_mapping;
    int* step_tables;
};

// One block per chunk of the step, and per padding chunk of a CUDA graph. Tokens and rows up to
// `num_tokens` and `num_rows` that are not the step's are padding: nothing of them is stored. For
// one table or, if `more_tables` is not null, two.
extern "C" __global__ void begin_step(
    int* header, const int* slots, const int* starts, int* query_start, int* row_start,
    const int* given, const int* tokens, const int* tables, int table_width,
    long long* slot_mapping, int* step_tables, const int* more_tables, int more_width,
    long long* more_mapping, int* more_step_tables, int block_shift, const long long* last_tokens,
    const int* last_positions, const int* drafts, int num_drafts, const int* row_params,
    int num_tokens, int num_rows, long long* token_ids, long long* positions, int* seq_lens,
    long long* sample_rows, int* step_row_params, long long* sample_positions, int* tail_starts,
    int* tail_lengths, int* count_slots) {
    const Table both[2] = {{tables, table_width, slot_mapping, step_tables},
                           {more_tables, more_width, more_mapping, more_step_tables}};
    const int num_tables = more_tables ? 2 : 1;
    pdl_wait();
    pdl_launch_dependents();
    if (gridDim.x == 1 && num_rows > 1)
        trim(header, slots, query_start, row_start, tokens, drafts, num_drafts);
    const int chunk = blockIdx.x;
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, num_threads = gridDim.x * blockDim.x;
    for (int token = header[NUM_TOKENS] + thread; token < num_tokens; token += num_threads) {
        token_ids[token] = 0;
        positions[token] = 0;
#pragma unroll
        for (int t = 0; t < 2; t++)
            if (t < num_tables) both[t].slot_mapping[token] = -1;
    }
    for (int row = header[NUM_ROWS] + thread; row < num_rows; row += num_threads) {
        sample_rows[row] = row;
        sample_positions[row] = 0;
        tail_starts[row] = 0;
        tail_lengths[row] = 0;
        count_slots[row] = -1;
        // All zeros mean greedy, except the slot, which is none.
        for (int word = 0; word < ROW_PARAMS_WORDS; word++)
            step_row_params[row * ROW_PARAMS_WORDS + word] = word == ROW_PARAMS_SLOT ? -1 : 0;
    }
    if (chunk >= header[NUM_CHUNKS]) {
        if (threadIdx.x == 0) seq_lens[chunk] = 0;
        return;
    }
    const int slot = slots[chunk];
    const int first_token = query_start[chunk];
    const int length = query_start[chunk + 1] - first_token;
    const int start = starts[chunk] >= 0 ? starts[chunk] : last_positions[slot];
    const int end = start + length;
    const int offset_mask = (1 << block_shift) - 1;
    for (int i = threadIdx.x; i < length; i += blockDim.x) {
        int token = tokens[first_token + i];
        // A missing draft that is not trimmed is replaced by token 0, verified like any other.
        if (token < 0)
            token = i == 0 ? static_cast<int>(last_tokens[slot])
                           : max(drafts[slot * num_drafts + i - 1], 0);
        const int position = start + i;
        token_ids[first_token + i] = token;
        positions[first_token + i] = position;
    }
    const int num_blocks = (end + offset_mask) >> block_shift;
#pragma unroll
    for (int t = 0; t < 2; t++) {
        if (t == num_tables) break;
        const long long width = both[t].width;
        const int* table = both[t].tables + slot * width;
        for (int i = threadIdx.x; i < length; i += blockDim.x) {
            const int position = start + i;
            both[t].slot_mapping[first_token + i] =
                (static_cast<long long>(table[position >> block_shift]) << block_shift) |
                (position & offset_mask);
        }
        int* step_table = both[t].step_tables + chunk * width;
        for (int i = threadIdx.x; i < num_blocks; i += blockDim.x) step_table[i] = table[i];
    }
    if (threadIdx.x == 0) seq_lens[chunk] = end;

    const int first_row = row_start[chunk];
    const int own_rows = row_start[chunk + 1] - first_row;
    // A chunk with prompt logprobs has no drafts.
    const bool scores = own_rows && given[first_row] >= 0;
    for (int i = threadIdx.x; i < own_rows; i += blockDim.x) {
        const int offset = length - own_rows + i;
        sample_rows[first_row + i] = first_token + offset;
        sample_positions[first_row + i] = start + offset + 1;
        tail_starts[first_row + i] = first_token + length - own_rows + 1;
        tail_lengths[first_row + i] = scores ? 0 : i;
    }
    for (int i = threadIdx.x; i < own_rows * ROW_PARAMS_WORDS; i += blockDim.x) {
        const int word = i % ROW_PARAMS_WORDS;
        const int unset = word == ROW_PARAMS_SLOT ? -1 : 0;
        step_row_params[first_row * ROW_PARAMS_WORDS + i] =
            given[first_row + i / ROW_PARAMS_WORDS] >= 0 ? unset : row_params[slot * ROW_PARAMS_WORDS + word];
    }
}

// Keeps the accepted drafts of each chunk and the token after them for the next step, and writes
// them to the host's memory (results). Row i of a chunk was sampled after the first i drafts, so it
// is accepted if these are. Rows whose next token is given sample nothing.
//
//   results [ring, RESULT_ROWS, max_rows]: tokens, logprobs as bits, statuses; of each chunk the
//                                          number of accepted rows, that of the drafts it had, and
//                                          whether its last token is the draft that had no row
//   history [slots, width], may be null: the sequences' tokens
extern "C" __global__ void end_step(const int* header, const int* sample_slots,
                                    const int* row_start, const int* given,
                                    const long long* sample_rows,
                                    const long long* sample_positions, const long long* token_ids,
                                    const long long* chosen, const float* logprobs,
                                    const int* statuses, const int* row_params, int n, int max_rows,
                                    long long* last_tokens, int* last_positions, int* drafts,
                                    int num_drafts, int* count_slots, int* history,
                                    int history_width, int* results) {
    pdl_wait();
    pdl_launch_dependents();
    const int chunk = blockIdx.x * blockDim.x + threadIdx.x;
    if (chunk >= n || chunk >= header[NUM_CHUNKS]) return;
    const int slot = sample_slots[chunk];
    int first = row_start[chunk];
    const int last = row_start[chunk + 1];
    for (int row = first; row < last; row++) count_slots[row] = -1;
    int* result = results + static_cast<long long>(header[RING_INDEX]) * RESULT_ROWS * max_rows;
    if (slot < 0) {
        result[3 * max_rows + chunk] = 0;
        return;
    }
    if (given[first] >= 0) first = last - 1;
    const int count_slot = row_params[slot * ROW_PARAMS_WORDS + ROW_PARAMS_SLOT];
    int row = first;
    for (;; row++) {
        const long long token = chosen[row];
        const int position = static_cast<int>(sample_positions[row]);
        result[row] = static_cast<int>(token);
        result[max_rows + row] = __float_as_int(logprobs[row]);
        result[2 * max_rows + row] = statuses[row];
        count_slots[row] = count_slot;
        if (history && position < history_width)
            history[static_cast<long long>(slot) * history_width + position] =
                static_cast<int>(token);
        if (row + 1 == last || statuses[row] != OK || token != token_ids[sample_rows[row] + 1])
            break;
    }
    result[3 * max_rows + chunk] = row + 1 - first;
    last_tokens[slot] = chosen[row];
    last_positions[slot] = static_cast<int>(sample_positions[row]);
    if (num_drafts == 0) return;
    // Clear the drafts: they must not be used for the next step.
    int* const own = drafts + slot * num_drafts;
    const int verified = row - first;
    result[5 * max_rows + chunk] = verified < num_drafts && own[verified] == chosen[row];
    int num_proposed = own[0] == NOT_DRAFTED ? NOT_DRAFTED : 0;
    for (int i = 0; i < num_drafts; i++) {
        if (own[i] >= 0) num_proposed++;
        own[i] = NOT_DRAFTED;
    }
    result[4 * max_rows + chunk] = num_proposed;
}
