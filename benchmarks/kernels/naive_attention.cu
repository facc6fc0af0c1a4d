// Attention of one new token per sequence over a paged KV cache, with nothing done for speed: what
// csrc/attention computes, for reading. Nothing launches it.
//
// One thread per value of the output. Shapes: n sequences, H query heads, G KV heads, D values.
//
//   q, out             [n, H, D]
//   k_cache, v_cache   [num_blocks, block_size, G, D]
//   block_tables       [n, table_width]
//   seq_lens           [n], the new token included
//
// Launch with a grid of (n, H) and D threads.
extern "C" __global__ void naive_attention(const float* q, const float* k_cache,
                                           const float* v_cache, float* out,
                                           const int* block_tables, const int* seq_lens,
                                           int table_width, int block_size, int num_heads,
                                           int num_kv_heads, float scale) {
    const int sequence = blockIdx.x, head = blockIdx.y, column = threadIdx.x, D = blockDim.x;
    const int kv_head = head / (num_heads / num_kv_heads);
    const float* query = q + (sequence * num_heads + head) * D;

    // Online softmax: the sums so far are relative to the largest score so far.
    float max = -1e30f, total = 0.0f, sum = 0.0f;
    for (int key = 0; key < seq_lens[sequence]; ++key) {
        const int block = block_tables[sequence * table_width + key / block_size];
        const long long row =
            ((long long)block * block_size + key % block_size) * num_kv_heads + kv_head;
        // Every thread of the block computes this score again, and every head of a group reads the
        // same keys again.
        float score = 0.0f;
        for (int i = 0; i < D; ++i) score += query[i] * k_cache[row * D + i];
        score *= scale;

        const float new_max = score > max ? score : max;
        const float rescale = __expf(max - new_max);
        const float weight = __expf(score - new_max);
        total = total * rescale + weight;
        sum = sum * rescale + weight * v_cache[row * D + column];
        max = new_max;
    }
    out[(sequence * num_heads + head) * D + column] = sum / total;
}
