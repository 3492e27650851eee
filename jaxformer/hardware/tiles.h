// Tiles of products: some rows and registers of the result, whose sums stay in registers.

#include <stdbool.h>

#include "vectors.h"

// The rows and registers of a tile fill most of the processor's registers.
#ifdef __AVX512F__
enum { kTileRows = 6, kTileVectors = 4 };
#else
enum { kTileRows = 6, kTileVectors = 2 };
#endif

// How many rows before it is read, or written, a row is fetched into the cache.
enum { kAhead = 8 };

// A factor of a product: where it begins, and how far apart its numbers are from row to row, and
// along the sum.
typedef struct {
  const float* data;
  int64_t per_row, per_term;
} Factor;

// Computes so many rows and registers of c = a b, or of c += a b, where b has its numbers side by
// side along a row. Meanwhile what is wanted later is fetched into the cache: what a tile will write,
// so many columns to the right, 0 for this one; and what b has so many terms later, 0 for nothing.
INLINE void multiply_tile(Factor a, const float* b, int64_t b_per_term, float* c, int64_t c_stride,
                          int terms, int rows, int vectors, int fetched, const int ahead,
                          bool adds) {
  Vector sums[kTileRows][kTileVectors];
  UNROLL for (int i = 0; i < rows; ++i)
    UNROLL for (int j = 0; j < vectors; ++j) {
      sums[i][j] = spread(0);
      __builtin_prefetch(c + i * c_stride + j * kLanes + fetched, 1);
    }
  for (int t = 0; t < terms; ++t) {
    Vector right[kTileVectors];
    if (ahead > 0)
      UNROLL for (int j = 0; j < vectors * kLanes; j += kLine)
        __builtin_prefetch(b + (t + ahead) * b_per_term + j);
    UNROLL for (int j = 0; j < vectors; ++j) right[j] = load(b + t * b_per_term + j * kLanes);
    UNROLL for (int i = 0; i < rows; ++i) {
      const Vector left = spread(a.data[i * a.per_row + t * a.per_term]);
      UNROLL for (int j = 0; j < vectors; ++j) sums[i][j] += left * right[j];
    }
  }
  UNROLL for (int i = 0; i < rows; ++i)
    UNROLL for (int j = 0; j < vectors; ++j) {
      float* to = c + i * c_stride + j * kLanes;
      if (adds) sums[i][j] += load(to);
      store(to, sums[i][j]);
    }
}
