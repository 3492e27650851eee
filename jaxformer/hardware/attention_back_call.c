// The gradients of attention on a CPU, as a custom call of XLA. The weights of a block of queries are
// made again of their scores and of the moments that the pass forward has kept, some keys at a time,
// and never leave a core's cache (arXiv 2205.14135, algorithm 4).

#include "attention.h"

// Of a block's keys, so many at a time: a multiple of a tile's rows.
enum { kKeys = 16 * kTileRows };

// Replaces the scores of a block by its weights, and the gradients of the weights by those of the
// scores before the scale; 0 where a key is not seen. The keys are some of the block's. In each group
// of queries it goes as far as tiles of keys have scores.
static void weigh_back(const Attention* p, const Block* block, int from, int to, float* scores,
                       float* slopes, const float* shifts, const float* factors,
                       const float* shared) {
  for (int group = 0; group < kGroups; ++group) {
    const int tiles = (block->bounds[group] - from + kTileRows - 1) / kTileRows;
    const int end = least(to - from, tiles * kTileRows), at = group * kLanes;
    const Integers first = *(const Integers*)(block->first + at);
    const Integers last = *(const Integers*)(block->last + at);
    const Vector shift = load(shifts + at), factor = load(factors + at), less = load(shared + at);
    for (int key = 0; key < end; ++key) {
      const Integers number = from + key - (Integers){0};
      const Integers seen = (number >= first) & (number < last);
      float* score = scores + key * kQueries + at;
      float* slope = slopes + key * kQueries + at;
      const Vector shifted = choose(seen, load(score) * p->scale - shift, spread(-INFINITY));
      const Vector weight = exponential(shifted) * factor;
      store(score, weight);
      store(slope, choose(seen, weight * (load(slope) - less) * p->scale, spread(0)));
    }
  }
}

// Sums, of each query of a block, the products of its result by the gradient of its result.
static void sum_products(const float* out, const float* dout, int64_t per_query, int rows, int width,
                         float* sums) {
  for (int i = 0; i < rows; ++i) {
    Vector sum = spread(0);
    for (int j = 0; j < width; j += kLanes)
      sum += load(out + i * per_query + j) * load(dout + i * per_query + j);
    sums[i] = total(sum);
  }
}

// What a thread needs besides the arrays of the call: for a block of queries, and the keys and values
// of a head with their gradients, which each block of queries reads and adds to. In the arrays the rows
// of a head lie far apart, and few of them stay in a cache at the same time.
typedef struct {
  float *turned, *turned_dout, *scores, *slopes;
  Matrix k, v, dk, dv;
} Space;

// Adds what the keys' and values' gradients have of a block of queries, and writes the queries'.
static void make_gradients(const Attention* p, const Block* block, Space space) {
  const int width = p->width, rows = block->rows;
  const Matrix of_queries = head_of(p->q, block->text, p->queries, block->head, p->heads, width);
  const int64_t per_query = of_queries.stride, per_key = space.k.stride;
  const int64_t query_at = of_queries.data - p->q + block->start * per_query;
  const int64_t key_at = block->from * per_key;
  const float *q = p->q + query_at, *k = space.k.data + key_at, *v = space.v.data + key_at;
  const float* dout = p->dout + query_at;
  float *dq = p->dq + query_at, *dk = space.dk.data + key_at, *dv = space.dv.data + key_at;
  float shifts[kQueries] = {0}, factors[kQueries] = {0}, shared[kQueries] = {0};
  memcpy(shifts, moments_of(p, block), rows * sizeof(float));
  memcpy(factors, moments_of(p, block) + moments_apart(p), rows * sizeof(float));
  sum_products(p->out + query_at, dout, per_query, rows, width, shared);
  turn_rows(q, per_query, rows, width, space.turned);
  turn_rows(dout, per_query, rows, width, space.turned_dout);
  int from = 0;
  do {
    const int to = least(from + kKeys, block->keys);
    multiply_by_turned(k, per_key, space.turned, block, from, to, width, space.scores, NULL);
    multiply_by_turned(v, per_key, space.turned_dout, block, from, to, width, space.slopes, NULL);
    weigh_back(p, block, from, to, space.scores, space.slopes, shifts, factors, shared);
    // Of the queries, those from the first one up to the end see a key of a tile.
    int first = 0, end = 0;
    for (int key = from, some; key < to; key += some) {
      some = rows_at_once(to - key);
      while (first < rows && block->last[first] <= key) ++first;
      while (end < rows && block->first[end] < key + some) ++end;
      if (first >= end) continue;
      const int64_t at = (int64_t)(key - from) * kQueries + first;
      const Factor weights = {space.scores + at, kQueries, 1};
      const Factor slopes = {space.slopes + at, kQueries, 1};
      multiply_some(weights, dout + first * per_query, per_query, dv + key * per_key, per_key, width,
                    end - first, some, true);
      multiply_some(slopes, q + first * per_query, per_query, dk + key * per_key, per_key, width,
                    end - first, some, true);
    }
    for (int i = 0, some; i < rows; i += some) {
      some = rows_at_once(rows - i);
      const int begin = most(block->first[i], from), stop = least(block->last[i + some - 1], to);
      const Factor by_query = {space.slopes + (int64_t)(begin - from) * kQueries + i, 1, kQueries};
      if (from == 0) {
        // Of the next block.
        const int64_t next = (i + kQueries) * per_query;
        fetch(q + next, per_query, some, width, false);
        fetch(dout + next, per_query, some, width, false);
        fetch(p->out + query_at + next, per_query, some, width, false);
      }
      multiply_some(by_query, k + begin * per_key, per_key, dq + i * per_query, per_query, width,
                    most(stop - begin, 0), some, from > 0);
    }
    from = to;
  } while (from < block->keys);
}

static void copy(Matrix from, Matrix to, int rows, int width) {
  for (int i = 0; i < rows; ++i) {
    float *target = to.data + (int64_t)i * to.stride, *source = from.data + (int64_t)i * from.stride;
    fetch(source + kAhead * from.stride, from.stride, 1, width, false);
    fetch(target + kAhead * to.stride, to.stride, 1, width, true);
    memcpy(target, source, width * sizeof(float));
  }
}

static void fill(Matrix a, int rows, int width, float value) {
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < width; ++j) a.data[(int64_t)i * a.stride + j] = value;
}

// Makes all gradients of a head of keys and of the heads of queries that use it.
static void attend_back(const Job* job, int number) {
  const Attention* p = (const Attention*)job;
  const int text = number / p->key_heads, key_head = number % p->key_heads;
  const int shared = p->heads / p->key_heads, keys = p->keys, width = p->width;
  const Matrix k = head_of(p->k, text, keys, key_head, p->key_heads, width);
  const Matrix v = head_of(p->v, text, keys, key_head, p->key_heads, width);
  const Matrix dk = head_of(p->dk, text, keys, key_head, p->key_heads, width);
  const Matrix dv = head_of(p->dv, text, keys, key_head, p->key_heads, width);
  const size_t of_block = (size_t)width * kQueries, of_scores = kKeys * kQueries;
  const size_t of_keys = (size_t)keys * width;
  float* memory = malloc((2 * of_block + 2 * of_scores + 4 * of_keys) * sizeof(float));
  if (memory == NULL) {
    // A block cannot end the call with an error: without memory the gradients are no numbers.
    fill(dk, keys, width, NAN);
    fill(dv, keys, width, NAN);
    for (int head = key_head * shared; head < (key_head + 1) * shared; ++head)
      fill(head_of(p->dq, text, p->queries, head, p->heads, width), p->queries, width, NAN);
    return;
  }
  float *scores = memory + 2 * of_block, *side_by_side = scores + 2 * of_scores;
  const Space space = {memory,
                       memory + of_block,
                       scores,
                       scores + of_scores,
                       {side_by_side, width},
                       {side_by_side + of_keys, width},
                       {side_by_side + 2 * of_keys, width},
                       {side_by_side + 3 * of_keys, width}};
  copy(k, space.k, keys, width);
  copy(v, space.v, keys, width);
  memset(space.dk.data, 0, 2 * of_keys * sizeof(float));
  for (int head = key_head * shared; head < (key_head + 1) * shared; ++head)
    for (int start = 0; start < p->queries; start += kQueries) {
      Block block;
      describe_block(p, text, head, start, &block);
      make_gradients(p, &block, space);
    }
  copy(space.dk, dk, keys, width);
  copy(space.dv, dv, keys, width);
  free(memory);
}

XLA_FFI_Error* jaxformer_attention_back(XLA_FFI_CallFrame* frame) {
  if (answers_question(frame)) return NULL;
  Attention* p = calloc(1, sizeof(Attention));
  if (p == NULL) return fail(frame->api, "no memory for the gradients of attention");
  p->job.compute = attend_back;
  read_arguments(p, frame);
  p->out = argument(frame, 5)->data;
  p->moments = argument(frame, 6)->data;
  p->dout = argument(frame, 7)->data;
  p->dq = result(frame, 0)->data;
  p->dk = result(frame, 1)->data;
  p->dv = result(frame, 2)->data;
  p->job.count = p->texts * p->key_heads;
  finish(&p->job, frame, share_of_threads(frame, count_operations(p, 5)));
  return NULL;
}
