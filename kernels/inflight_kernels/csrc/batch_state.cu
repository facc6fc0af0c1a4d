// The batch as it stays on the device: what the host sends of a step is spread out at its beginning,
// and what was chosen is kept at its end. See batch_state.py for the layout of a step.

#include "common.cuh"

// As in batch_state.py.
constexpr int NUM_CHUNKS = 0, RING_INDEX = 1;
constexpr int WISH_WORDS = 10;
constexpr int WISH_SLOT = 9;

// Writes table entries: tables[places[i]] = blocks[i].
extern "C" __global__ void write_tables(const int* places, const int* blocks, int n, int* tables) {
    wait_for_previous();
    launch_next();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) tables[places[i]] = blocks[i];
}

// Writes sequences' wishes: wishes[slots[i]] = news[i].
extern "C" __global__ void write_wishes(const int* slots, const int* news, int n, int* wishes) {
    wait_for_previous();
    launch_next();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n * WISH_WORDS)
        wishes[slots[i / WISH_WORDS] * WISH_WORDS + i % WISH_WORDS] = news[i];
}

// One block per row of the step. The rows past its chunks are those that fill up a CUDA graph, where
// each chunk has one token: they get a token that is nobody's, and go nowhere.
extern "C" __global__ void begin_step(const int* header, const int* slots, const int* sample_slots,
                                      const int* seq_lens, const int* query_start,
                                      const int* tokens, const int* tables, int table_width,
                                      int block_shift, const long long* last_tokens,
                                      const int* wishes, long long* token_ids,
                                      long long* positions, long long* slot_mapping,
                                      long long* last_rows, int* step_tables, int* step_wishes,
                                      long long* sample_positions, int* count_slots) {
    wait_for_previous();
    launch_next();
    const int chunk = blockIdx.x;
    if (chunk >= header[NUM_CHUNKS]) {
        if (threadIdx.x == 0) {
            token_ids[chunk] = 0;
            positions[chunk] = 0;
            slot_mapping[chunk] = -1;
            last_rows[chunk] = chunk;
            sample_positions[chunk] = 0;
            count_slots[chunk] = -1;
        }
        // All zero is greedy, but for the slot: none.
        if (threadIdx.x < WISH_WORDS)
            step_wishes[chunk * WISH_WORDS + threadIdx.x] = threadIdx.x == WISH_SLOT ? -1 : 0;
        return;
    }
    const int slot = slots[chunk];
    const int first_row = query_start[chunk];
    const int length = query_start[chunk + 1] - first_row;
    const int end = seq_lens[chunk];
    const int start = end - length;
    const int* table = tables + static_cast<long long>(slot) * table_width;
    const int offset_mask = (1 << block_shift) - 1;
    for (int i = threadIdx.x; i < length; i += blockDim.x) {
        const int token = tokens[first_row + i];
        const int position = start + i;
        token_ids[first_row + i] = token >= 0 ? token : last_tokens[slot];
        positions[first_row + i] = position;
        slot_mapping[first_row + i] =
            (static_cast<long long>(table[position >> block_shift]) << block_shift) |
            (position & offset_mask);
    }
    const int num_blocks = (end + offset_mask) >> block_shift;
    int* step_table = step_tables + static_cast<long long>(chunk) * table_width;
    for (int i = threadIdx.x; i < num_blocks; i += blockDim.x) step_table[i] = table[i];
    if (threadIdx.x < WISH_WORDS)
        step_wishes[chunk * WISH_WORDS + threadIdx.x] = wishes[slot * WISH_WORDS + threadIdx.x];
    if (threadIdx.x == 0) {
        last_rows[chunk] = first_row + length - 1;
        sample_positions[chunk] = end;
        count_slots[chunk] = sample_slots[chunk] < 0 ? -1 : wishes[slot * WISH_WORDS + WISH_SLOT];
    }
}

// Keeps each sequence's token for its next step, and tells the host: results is its memory.
//
//   results [ring, 3, max_chunks]: tokens, log probabilities as bits, statuses
extern "C" __global__ void end_step(const int* header, const int* sample_slots,
                                    const long long* token_ids, const float* logprobs,
                                    const int* statuses, int n, int max_chunks,
                                    long long* last_tokens, int* results) {
    wait_for_previous();
    launch_next();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || i >= header[NUM_CHUNKS]) return;
    const int slot = sample_slots[i];
    if (slot < 0) return;
    last_tokens[slot] = token_ids[i];
    int* result = results + static_cast<long long>(header[RING_INDEX]) * 3 * max_chunks + i;
    result[0] = static_cast<int>(token_ids[i]);
    result[max_chunks] = __float_as_int(logprobs[i]);
    result[2 * max_chunks] = statuses[i];
}
