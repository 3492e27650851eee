// Attention on a CPU as a custom call of XLA: softmax(q kᵀ · scale) v. The scores of a block never
// leave a core's cache.

#include "attention.h"

// Replaces the scores of a block, times the scale, by their exponentials beside the largest of each
// query, 0 where a key is not seen. Writes what was taken from the scores of each query, and one over
// its sum: 0 where it sees none.
static void weigh(float* scores, float scale, const Block* block, float* shifts, float* factors) {
  for (int group = 0; group < kGroups; ++group) {
    const int keys = block->bounds[group];
    float* column = scores + group * kLanes;
    const Integers from = *(const Integers*)(block->first + group * kLanes);
    const Integers to = *(const Integers*)(block->last + group * kLanes);
    // Two, of every other key: a comparison takes longer than all else that a key needs.
    Vector largest = spread(-INFINITY), other = largest, sum = spread(0);
    for (int key = 0; key < keys; ++key) {
      const Integers number = key - (Integers){0};
      const Vector score = load(column + key * kQueries) * scale;
      const Vector seen = choose((number >= from) & (number < to), score, spread(-INFINITY));
      store(column + key * kQueries, seen);
      const Vector compared = larger(seen, other);
      other = largest;
      largest = compared;
    }
    largest = larger(largest, other);
    // Where all scores are -∞, so are those that are not seen: their exponentials are 0.
    const Vector shift = choose(largest == spread(-INFINITY), spread(0), largest);
    for (int key = 0; key < keys; ++key) {
      const Vector power = exponential(load(column + key * kQueries) - shift);
      store(column + key * kQueries, power);
      sum += power;
    }
    store(shifts + group * kLanes, shift);
    store(factors + group * kLanes, choose(from < to, 1.0f / sum, spread(0)));
  }
}

static void attend(const Job* job, int number) {
  const Attention* p = (const Attention*)job;
  const int width = p->width, head = number / p->blocks % p->heads;
  const int text = number / p->blocks / p->heads, key_head = head / (p->heads / p->key_heads);
  Block block;
  describe_block(p, text, head, number % p->blocks * kQueries, &block);
  const int rows = block.rows, keys = block.keys;
  const Matrix of_queries = head_of(p->q, text, p->queries, head, p->heads, width);
  const Matrix of_keys = head_of(p->k, text, p->keys, key_head, p->key_heads, width);
  const int64_t per_query = of_queries.stride, per_key = of_keys.stride;
  const float* q = of_queries.data + block.start * per_query;
  const float* k = of_keys.data + block.from * per_key;
  // Values lie as keys do, and results as queries.
  const float* v = p->v + (k - p->k);
  float* out = p->out + (q - p->q);
  float shifts[kQueries], factors[kQueries];
  float* turned = malloc(((size_t)2 * width + keys) * kQueries * sizeof(float));
  if (turned == NULL) {
    // A block cannot end the call with an error: without memory the result is no number.
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < width; ++j) out[i * per_query + j] = NAN;
    return;
  }
  float *scores = turned + width * kQueries, *sums = scores + keys * kQueries;
  turn_rows(q, per_query, rows, width, turned);
  multiply_by_turned(k, per_key, turned, &block, 0, keys, width, scores, v);
  fetch(out, per_query, rows, width, true);
  weigh(scores, p->scale, &block, shifts, factors);
  for (int i = 0, some; i < rows; i += some) {
    some = rows_at_once(rows - i);
    const int begin = block.first[i], seen = block.last[i + some - 1] - begin;
    const Factor by_query = {scores + begin * kQueries + i, 1, kQueries};
    multiply_and_fetch(by_query, v + begin * per_key, per_key, sums + i * width, width, width, seen,
                       some, kAhead, false);
  }
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < width; ++j) out[i * per_query + j] = sums[i * width + j] * factors[i];
  if (p->moments != NULL) {
    memcpy(moments_of(p, &block), shifts, rows * sizeof(float));
    memcpy(moments_of(p, &block) + moments_apart(p), factors, rows * sizeof(float));
  }
  free(turned);
}

static XLA_FFI_Error* attend_all(XLA_FFI_CallFrame* frame, bool keeps_moments) {
  if (answers_question(frame)) return NULL;
  Attention* p = calloc(1, sizeof(Attention));
  if (p == NULL) return fail(frame->api, "no memory for attention");
  p->job.compute = attend;
  read_arguments(p, frame);
  p->out = result(frame, 0)->data;
  if (keeps_moments) p->moments = result(frame, 1)->data;
  p->job.count = p->texts * p->heads * p->blocks;
  finish(&p->job, frame, share_of_threads(frame, count_operations(p, 2)));
  return NULL;
}

XLA_FFI_Error* jaxformer_attention(XLA_FFI_CallFrame* frame) { return attend_all(frame, false); }

// With the moments that the gradients need.
XLA_FFI_Error* jaxformer_attention_and_moments(XLA_FFI_CallFrame* frame) {
  return attend_all(frame, true);
}
