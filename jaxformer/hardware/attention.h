// What attention forward and back have in common: blocks of queries of one head, whose scores lie
// with a row for each key and a column for each query. So sums over keys are sums of rows, and each
// query has a lane of the processor's registers to itself.
//
// All arrays of numbers are float32, (texts, tokens, heads, width), and the width is a multiple of
// the numbers in a register.

#include <math.h>

#include "custom_calls.h"
#include "squares.h"
#include "tiles.h"

// Queries of a block.
enum { kQueries = 64, kGroups = kQueries / kLanes };

typedef struct {
  Job job;
  float *q, *k, *v, *out;
  // Of each query: what is taken from its scores, and one over the sum of their exponentials. They
  // are two arrays (texts, heads, queries), one behind the other; NULL where nobody wants them.
  float* moments;
  // The gradients of the result, the queries, the keys and the values.
  float *dout, *dq, *dk, *dv;
  float scale;
  bool causal;
  // How many tokens a query sees on each side, itself included; 0 is all.
  int window;
  int texts, queries, keys, heads, key_heads, width, blocks;
} Attention;

static int most(int a, int b) { return a > b ? a : b; }

// Reads what forward and back are given in the same way: queries, keys, values, scale and mask.
static void read_arguments(Attention* p, const XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Buffer* q = argument(frame, 0);
  const XLA_FFI_Buffer* k = argument(frame, 1);
  p->q = q->data;
  p->k = k->data;
  p->v = argument(frame, 2)->data;
  p->scale = *(const float*)argument(frame, 3)->data;
  p->causal = ((const int32_t*)argument(frame, 4)->data)[0] != 0;
  p->window = ((const int32_t*)argument(frame, 4)->data)[1];
  p->texts = (int)q->dims[0];
  p->queries = (int)q->dims[1];
  p->heads = (int)q->dims[2];
  p->width = (int)q->dims[3];
  p->keys = (int)k->dims[1];
  p->key_heads = (int)k->dims[2];
  p->blocks = (p->queries + kQueries - 1) / kQueries;
}

// Returns the operations of so many products of queries by keys.
static double count_operations(const Attention* p, int products) {
  return 2.0 * products * p->texts * p->heads * p->queries * p->keys * p->width;
}

// Which keys a query sees: from the first one up to the one before the last.
static int first_key(const Attention* p, int query) {
  return p->window ? least(most(0, query - p->window + 1), p->keys) : 0;
}

static int last_key(const Attention* p, int query) {
  if (p->causal) return least(query + 1, p->keys);
  return p->window ? least(query + p->window, p->keys) : p->keys;
}

// A block of queries: so many of one head of one text.
typedef struct {
  int text, head, start, rows;
  // The keys that some of them see: the first one, and how many. Of these, by their numbers from that
  // one on, those that each of them sees.
  int from, keys;
  int32_t first[kQueries], last[kQueries];
  // Of each group of queries, the end of the keys whose scores are made: the last keys of the group,
  // and of the tile that the next group has a part of.
  int bounds[kGroups];
} Block;

static void describe_block(const Attention* p, int text, int head, int start, Block* block) {
  const int rows = least(kQueries, p->queries - start);
  const int from = first_key(p, start), to = most(from, last_key(p, start + rows - 1));
  *block = (Block){text, head, start, rows, from, to - from, {0}, {0}, {0}};
  for (int i = 0; i < rows; ++i) {
    block->first[i] = first_key(p, start + i) - from;
    block->last[i] = last_key(p, start + i) - from;
  }
  for (int group = 0; group < kGroups; ++group)
    block->bounds[group] = block->last[least((group + 1) * kLanes + kTileRows - 2, rows - 1)];
}

// Where the moments of a block's first query are.
static float* moments_of(const Attention* p, const Block* block) {
  return p->moments + ((int64_t)block->text * p->heads + block->head) * p->queries + block->start;
}

// How far apart the two moments of a query are.
static int64_t moments_apart(const Attention* p) {
  return (int64_t)p->texts * p->heads * p->queries;
}

// Fetches rows of an array into the cache, of so many numbers, that are read or written soon.
INLINE void fetch(const float* rows, int64_t stride, int count, int width, const bool writes) {
  for (int i = 0; i < count; ++i)
    for (int j = 0; j < width; j += kLine) {
      const float* line = rows + i * stride + j;
      // What is fetched for is a constant to compilers.
      if (writes) __builtin_prefetch(line, 1);
      else __builtin_prefetch(line, 0);
    }
}

// Computes some rows of c = a b, or of c += a b; the width is a multiple of kLanes.
INLINE void multiply_rows(Factor a, const float* b, int64_t b_per_term, float* c, int64_t c_stride,
                          int width, int terms, int rows, int ahead, bool adds) {
  int at = 0;
  for (; at + kTileVectors * kLanes <= width; at += kTileVectors * kLanes)
    multiply_tile(a, b + at, b_per_term, c + at, c_stride, terms, rows, kTileVectors, 0, ahead,
                  adds);
  const int rest = (width - at) / kLanes;
  if (rest == 3 && kTileVectors > 3)
    multiply_tile(a, b + at, b_per_term, c + at, c_stride, terms, rows, 3, 0, ahead, adds);
  else if (rest == 2 && kTileVectors > 2)
    multiply_tile(a, b + at, b_per_term, c + at, c_stride, terms, rows, 2, 0, ahead, adds);
  else if (rest == 1)
    multiply_tile(a, b + at, b_per_term, c + at, c_stride, terms, rows, 1, 0, ahead, adds);
}

// How many rows are computed at a time, of so many that are left.
static int rows_at_once(int left) {
  return left >= kTileRows ? kTileRows : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

// Does so for as many rows as are computed at a time; fetches what b has so many terms later.
INLINE void multiply_and_fetch(Factor a, const float* b, int64_t b_per_term, float* c,
                               int64_t c_stride, int width, int terms, int rows, int ahead,
                               bool adds) {
  if (rows == kTileRows && adds)
    multiply_rows(a, b, b_per_term, c, c_stride, width, terms, kTileRows, ahead, true);
  else if (rows == kTileRows)
    multiply_rows(a, b, b_per_term, c, c_stride, width, terms, kTileRows, ahead, false);
  else if (rows == 4)
    multiply_rows(a, b, b_per_term, c, c_stride, width, terms, 4, ahead, adds);
  else if (rows == 2)
    multiply_rows(a, b, b_per_term, c, c_stride, width, terms, 2, ahead, adds);
  else
    multiply_rows(a, b, b_per_term, c, c_stride, width, terms, 1, ahead, adds);
}

// Does so where b is in the cache.
static void multiply_some(Factor a, const float* b, int64_t b_per_term, float* c, int64_t c_stride,
                          int width, int terms, int rows, bool adds) {
  multiply_and_fetch(a, b, b_per_term, c, c_stride, width, terms, rows, 0, adds);
}

// Turns the rows of a block: one of so many numbers becomes a column. Of rows that the block does not
// have the columns are zeros.
static void turn_rows(const float* from, int64_t stride, int rows, int width, float* to) {
  for (int i = 0; i < kQueries; i += kSquare)
    for (int j = 0; j < width; j += kSquare) {
      if (i + kSquare <= rows) {
        turn_square(from + i * stride + j, stride, to + j * kQueries + i, kQueries);
        continue;
      }
      for (int s = 0; s < kSquare; ++s)
        for (int t = 0; t < kSquare; ++t)
          to[(j + t) * kQueries + i + s] = i + s < rows ? from[(i + s) * stride + j + t] : 0;
    }
}

// Makes some products of keys, or values, by the turned rows of a block, whose groups see so many
// keys: those from and up to so many of the block's keys. Meanwhile the rows of another array, which
// lie as those of the keys, are fetched, if there is one.
static void multiply_by_turned(const float* keys, int64_t per_key, const float* turned,
                               const Block* block, int from, int to, int width, float* products,
                               const float* others) {
  for (int key = from, some; key < to; key += some) {
    some = rows_at_once(to - key);
    const int next = key + some;
    fetch(keys + next * per_key, per_key, least(kTileRows, to - next), width, false);
    if (others != NULL) fetch(others + key * per_key, per_key, some, width, false);
    int group = 0;
    while (block->bounds[group] <= key) ++group;
    const Factor by_key = {keys + key * per_key, per_key, 1};
    const int skipped = group * kLanes;
    multiply_some(by_key, turned + skipped, kQueries,
                  products + (int64_t)(key - from) * kQueries + skipped, kQueries,
                  kQueries - skipped, width, some, false);
  }
}
