// Attention on a CPU without gradients, as a custom call of XLA: softmax(q kᵀ · scale) v.
//
// All arrays of numbers are float32, (texts, tokens, heads, width). A block is some queries of one
// head of one text. Its scores never leave a core's cache: they lie with a row for each key and a
// column for each query, so that sums over keys are sums of rows, and each query has a lane of the
// processor's registers to itself.

#include <math.h>

#include "custom_calls.h"
#include "tiles.h"

// Queries of a block.
enum { kQueries = 64, kGroups = kQueries / kLanes };

// Computes some rows of c = a b; the width is a multiple of kLanes.
INLINE void multiply_rows(Factor a, const float* b, int64_t b_per_term, float* c, int64_t c_stride,
                          int width, int terms, int rows) {
  int at = 0;
  for (; at + kTileVectors * kLanes <= width; at += kTileVectors * kLanes)
    multiply_tile(a, b + at, b_per_term, c + at, c_stride, terms, rows, kTileVectors, false);
  const int rest = (width - at) / kLanes;
  if (rest == 3 && kTileVectors > 3)
    multiply_tile(a, b + at, b_per_term, c + at, c_stride, terms, rows, 3, false);
  else if (rest == 2 && kTileVectors > 2)
    multiply_tile(a, b + at, b_per_term, c + at, c_stride, terms, rows, 2, false);
  else if (rest == 1)
    multiply_tile(a, b + at, b_per_term, c + at, c_stride, terms, rows, 1, false);
}

// Computes a tile's rows of c = a b, or one of them.
static void multiply_some(Factor a, const float* b, int64_t b_per_term, float* c, int64_t c_stride,
                          int width, int terms, int rows) {
  if (rows == kTileRows) multiply_rows(a, b, b_per_term, c, c_stride, width, terms, kTileRows);
  else multiply_rows(a, b, b_per_term, c, c_stride, width, terms, 1);
}

typedef struct {
  Job job;
  float *q, *k, *v, *out;
  float scale;
  bool causal;
  // How many tokens a query sees on each side, itself included; 0 is all.
  int window;
  int queries, keys, heads, key_heads, width, blocks;
} Attention;

static int least(int a, int b) { return a < b ? a : b; }
static int most(int a, int b) { return a > b ? a : b; }

// Which keys a query sees: from the first one up to the one before the last.
static int first_key(const Attention* p, int query) {
  return p->window ? least(most(0, query - p->window + 1), p->keys) : 0;
}

static int last_key(const Attention* p, int query) {
  if (p->causal) return least(query + 1, p->keys);
  return p->window ? least(query + p->window, p->keys) : p->keys;
}

// How many rows are computed at a time, of so many that are left.
static int rows_at_once(int left) { return left < kTileRows ? 1 : kTileRows; }

// Replaces the scores of a block, times the scale, by their exponentials beside the largest of each
// query, 0 where a key is not seen, and writes one over the sum of each query: 0 where it sees none.
// Of each group of queries only the first keys have scores, as many as bounds says.
static void weigh(float* scores, float scale, const int* bounds, const int32_t* first,
                  const int32_t* last, float* factors) {
  for (int group = 0; group < kGroups; ++group) {
    const int keys = bounds[group];
    float* column = scores + group * kLanes;
    const Integers from = *(const Integers*)(first + group * kLanes);
    const Integers to = *(const Integers*)(last + group * kLanes);
    Vector largest = spread(-INFINITY), sum = spread(0);
    for (int key = 0; key < keys; ++key) {
      const Integers number = key - (Integers){0};
      const Vector score = load(column + key * kQueries) * scale;
      const Vector seen = choose((number >= from) & (number < to), score, spread(-INFINITY));
      store(column + key * kQueries, seen);
      largest = larger(seen, largest);
    }
    // Where all scores are -∞, so are those that are not seen: their exponentials are 0.
    const Vector shift = choose(largest == spread(-INFINITY), spread(0), largest);
    for (int key = 0; key < keys; ++key) {
      const Vector power = exponential(load(column + key * kQueries) - shift);
      store(column + key * kQueries, power);
      sum += power;
    }
    store(factors + group * kLanes, choose(from < to, 1.0f / sum, spread(0)));
  }
}

static void attend(const Job* job, int block) {
  const Attention* p = (const Attention*)job;
  const int start = block % p->blocks * kQueries, head = block / p->blocks % p->heads;
  const int text = block / p->blocks / p->heads, key_head = head / (p->heads / p->key_heads);
  const int rows = least(kQueries, p->queries - start), width = p->width;
  const int from = first_key(p, start), to = most(from, last_key(p, start + rows - 1));
  const int keys = to - from;
  const Matrix of_queries = head_of(p->q, text, p->queries, head, p->heads, width);
  const Matrix of_keys = head_of(p->k, text, p->keys, key_head, p->key_heads, width);
  const int64_t per_query = of_queries.stride, per_key = of_keys.stride;
  const float* q = of_queries.data + start * per_query;
  const float* k = of_keys.data + from * per_key;
  // Values lie as keys do, and results as queries.
  const float* v = p->v + (k - p->k);
  float* out = p->out + (q - p->q);
  float* turned = malloc(((size_t)2 * width + keys) * kQueries * sizeof(float));
  if (turned == NULL) {
    // A block cannot end the call with an error: without memory the result is no number.
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < width; ++j) out[i * per_query + j] = NAN;
    return;
  }
  float *scores = turned + width * kQueries, *sums = scores + keys * kQueries;
  float factors[kQueries];
  int32_t first[kQueries] = {0}, last[kQueries] = {0};
  for (int i = 0; i < kQueries; ++i) {
    for (int j = 0; j < width; ++j)
      turned[j * kQueries + i] = i < rows ? q[i * per_query + j] : 0;
    if (i < rows) {
      first[i] = first_key(p, start + i) - from;
      last[i] = last_key(p, start + i) - from;
    }
  }
  // The last keys of a group of queries, and of the tile that the next group has a part of.
  int bounds[kGroups];
  for (int group = 0; group < kGroups; ++group)
    bounds[group] = last[least((group + 1) * kLanes + kTileRows - 2, rows - 1)];
  for (int key = 0, some; key < keys; key += some) {
    some = rows_at_once(keys - key);
    int group = 0;
    while (bounds[group] <= key) ++group;
    const Factor by_key = {k + key * per_key, per_key, 1};
    const int skipped = group * kLanes;
    multiply_some(by_key, turned + skipped, kQueries, scores + key * kQueries + skipped, kQueries,
                  kQueries - skipped, width, some);
  }
  weigh(scores, p->scale, bounds, first, last, factors);
  for (int i = 0, some; i < rows; i += some) {
    some = rows_at_once(rows - i);
    const int begin = first[i], seen = last[i + some - 1] - begin;
    const Factor by_query = {scores + begin * kQueries + i, 1, kQueries};
    multiply_some(by_query, v + begin * per_key, per_key, sums + i * width, width, width, seen,
                  some);
  }
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < width; ++j) out[i * per_query + j] = sums[i * width + j] * factors[i];
  free(turned);
}

XLA_FFI_Error* jaxformer_attention(XLA_FFI_CallFrame* frame) {
  if (answers_question(frame)) return NULL;
  const XLA_FFI_Buffer* q = argument(frame, 0);
  const XLA_FFI_Buffer* k = argument(frame, 1);
  Attention* p = calloc(1, sizeof(Attention));
  if (p == NULL) return fail(frame->api, "no memory for attention");
  p->job.compute = attend;
  p->q = q->data;
  p->k = k->data;
  p->v = argument(frame, 2)->data;
  p->out = result(frame, 0)->data;
  p->scale = *(const float*)argument(frame, 3)->data;
  p->causal = ((const int32_t*)argument(frame, 4)->data)[0] != 0;
  p->window = ((const int32_t*)argument(frame, 4)->data)[1];
  p->queries = (int)q->dims[1];
  p->heads = (int)q->dims[2];
  p->width = (int)q->dims[3];
  p->keys = (int)k->dims[1];
  p->key_heads = (int)k->dims[2];
  p->blocks = (p->queries + kQueries - 1) / kQueries;
  p->job.count = (int)q->dims[0] * p->heads * p->blocks;
  const double pairs = (double)q->dims[0] * p->heads * p->queries * p->keys;
  finish(&p->job, frame, share_of_threads(frame, 4 * pairs * p->width));
  return NULL;
}
