// Products of matrices by tiles. What a tile reads of b lies in a panel: as many columns as a tile
// has, one row after the other, for so many terms of the sum that it stays in a core's cache. So
// does a block of a, which all panels of a block of columns are multiplied by. A number of the
// result is added up in the same order wherever it lies and however products are cut.

#include "squares.h"
#include "tiles.h"

enum { kPanel = kTileVectors * kLanes };
// The most terms of a panel, and columns of b that have panels at a time. The most numbers of a block
// of a, and its most rows, which fill whole tiles.
enum { kTerms = 384, kBlockColumns = 768, kBlock = 96 * kTerms, kMostRows = 384 };
// How many columns of b, or tiles of a block that is transposed, are copied at a time.
enum { kCopied = 128, kPackedTiles = 8, kPadding = 16 };
_Static_assert(kMostRows % kTileRows == 0 && kBlockColumns % kCopied == 0 && kCopied % kPanel == 0,
               "blocks have whole tiles and whole panels");
// Of a result that is cut by columns, each part is as wide as some panels.
enum { kColumnStep = kPanel };

static inline bool best_cut_by_rows(int rows, int columns, bool transpose_a, int threads) {
  // Cut by columns each thread makes panels of its own, and all read the same rows; cut by rows it is
  // the other way round. A number of a panel takes twice as long as one of rows that lie as they are
  // needed, and a third as long as one of rows that are packed.
  if ((columns + kPanel - 1) / kPanel % threads != 0) return true;
  return transpose_a ? 3.0 * rows > columns : rows >= 2.0 * columns;
}

// Each thread's.
static _Thread_local struct {
  float panels[kTerms * kBlockColumns];
  float rows[kBlock + kMostRows / kTileRows * kPadding];
} space __attribute__((aligned(64)));

// Makes a panel, of so many numbers a row, of which so many columns are used and others are 0.
static void make_panel(Matrix b, bool transposed, int terms, int width, int columns,
                       float* panel) {
  if (columns < width) memset(panel, 0, sizeof(float) * terms * width);
  if (!transposed) {
    for (int t = 0; t < terms; ++t) {
      const float* from = b.data + (int64_t)t * b.stride;
      // A constant size makes it a few instructions.
      if (columns == kPanel) memcpy(panel + t * width, from, sizeof(float) * kPanel);
      else memcpy(panel + t * width, from, sizeof(float) * columns);
    }
    return;
  }
  for (int j = 0; j < columns; j += kSquare)
    for (int t = 0; t < terms; t += kSquare) {
      const float* from = b.data + (int64_t)j * b.stride + t;
      float* to = panel + t * width + j;
      if (j + kSquare <= columns && t + kSquare <= terms) {
        turn_square(from, b.stride, to, width);
        continue;
      }
      for (int i = 0; i < kSquare && j + i < columns; ++i)
        for (int s = 0; s < kSquare && t + s < terms; ++s)
          to[s * width + i] = from[(int64_t)i * b.stride + s];
    }
}

// Brings what each tile has of a term side by side: of a row with the numbers of so many rows of tiles.
static inline void pack_term(const float* row, int rows, int64_t per_tile, float* tile) {
  typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
  int i = 0;
  // Two numbers more than a tile has are written over by the next term, or lie in the padding.
  for (; i + 8 <= rows; i += kTileRows, tile += per_tile) *(Eight*)tile = *(const Eight*)(row + i);
  for (; i < rows; i += kTileRows, tile += per_tile)
    memcpy(tile, row + i, sizeof(float) * least(rows - i, kTileRows));
}

// Does so for all terms of a matrix with a row for each, some tiles at a time, so that what is written
// stays in a core's cache. Returns how far apart tiles are: the padding brings them to different sets
// of the cache.
static int64_t pack_rows(const float* a, int64_t stride, int rows, int terms, float* to) {
  const int64_t per_tile = kTileRows * terms + kPadding;
  const int most = kPackedTiles * kTileRows;
  for (int row = 0; row < rows; row += most, to += kPackedTiles * per_tile)
    for (int t = 0; t < terms; ++t) {
      UNROLL for (int i = 0; i < most; i += kLine)
        __builtin_prefetch(a + (t + kAhead) * stride + row + i);
      pack_term(a + t * stride + row, least(rows - row, most), per_tile, to + t * kTileRows);
    }
  return per_tile;
}

// Computes a tile of so many columns, fewer than its registers hold where the result ends.
INLINE void multiply_columns(Factor a, const float* panel, float* c, int64_t c_stride, int terms,
                             int rows, int vectors, int columns, bool adds) {
  const int width = vectors * kLanes;
  const bool is_cut = columns < width;
  float part[kTileRows * kPanel];
  for (int i = 0; is_cut && adds && i < rows; ++i)
    memcpy(part + i * width, c + i * c_stride, sizeof(float) * columns);
  // What a tile writes may come from memory, which takes longer than a tile: so that of the tile to
  // the right is fetched, whose turn is after the rest of this column.
  multiply_tile(a, panel, width, is_cut ? part : c, is_cut ? width : c_stride, terms, rows, vectors,
                width, kAhead, adds);
  for (int i = 0; is_cut && i < rows; ++i)
    memcpy(c + i * c_stride, part + i * width, sizeof(float) * columns);
}

// Fetches where each row of a tile begins.
INLINE void fetch_tile(Factor a) {
  // The numbers of rows that are packed lie side by side.
  const int64_t apart = a.per_row > 1 ? a.per_row : kLine;
  for (int i = 0; i < kTileRows; ++i) __builtin_prefetch(a.data + i * apart);
}

// Computes all rows of so many columns; the factor's numbers are so far apart from tile to tile.
INLINE void multiply_rows(Factor a, int64_t per_tile, const float* panel, float* c,
                          int64_t c_stride, int terms, int rows, int vectors, int columns,
                          bool adds) {
  for (; rows >= kTileRows; rows -= kTileRows, a.data += per_tile, c += kTileRows * c_stride) {
    fetch_tile((Factor){a.data + per_tile, a.per_row, a.per_term});
    multiply_columns(a, panel, c, c_stride, terms, kTileRows, vectors, columns, adds);
  }
  for (; rows >= 2; rows -= 2, a.data += 2 * a.per_row, c += 2 * c_stride)
    multiply_columns(a, panel, c, c_stride, terms, 2, vectors, columns, adds);
  if (rows > 0) multiply_columns(a, panel, c, c_stride, terms, 1, vectors, columns, adds);
}

// Each is compiled once, with the registers of a tile as a constant.
typedef void MultiplyRows(Factor a, int64_t per_tile, const float* panel, float* c,
                          int64_t c_stride, int terms, int rows, int columns, bool adds);
#define MULTIPLY_ROWS(name, vectors)                                                             \
  static void name(Factor a, int64_t per_tile, const float* panel, float* c, int64_t c_stride,   \
                   int terms, int rows, int columns, bool adds) {                                \
    multiply_rows(a, per_tile, panel, c, c_stride, terms, rows, vectors, columns, adds);         \
  }
MULTIPLY_ROWS(multiply_wide, kTileVectors)
MULTIPLY_ROWS(multiply_half, kTileVectors / 2)
MULTIPLY_ROWS(multiply_narrow, 1)

// Returns the registers of a tile where so many columns are left.
static inline int vectors_for(int columns) {
  return columns >= kPanel ? kTileVectors : columns > kLanes ? kTileVectors / 2 : 1;
}

// Makes some whole panels of b at once: more of a row is read before the next one.
static void copy_rows(Matrix b, int terms, float* panels) {
  for (int t = 0; t < terms; ++t) {
    const float* from = b.data + (int64_t)t * b.stride;
    UNROLL for (int i = 0; i < kCopied; i += kLine)
      __builtin_prefetch(from + (int64_t)kAhead * b.stride + i);
    UNROLL for (int i = 0; i < kCopied / kPanel; ++i)
      memcpy(panels + (i * terms + t) * kPanel, from + i * kPanel, sizeof(float) * kPanel);
  }
}

// Makes the panels of so many columns of op(b), one after the other.
static void make_panels(Matrix b, bool transposed, int terms, int columns, float* panels) {
  for (int first = 0, width; first < columns; first += width, panels += terms * width) {
    const int rest = columns - first;
    const Matrix part = {b.data + (transposed ? (int64_t)first * b.stride : first), b.stride};
    if (!transposed && rest >= kCopied) {
      width = kCopied;
      copy_rows(part, terms, panels);
    } else {
      width = vectors_for(rest) * kLanes;
      make_panel(part, transposed, terms, width, least(width, rest), panels);
    }
  }
}

// Computes a block of the result, of a factor that stays in a core's cache and of some panels.
static void multiply_block(Factor a, int64_t per_tile, const float* panels, Matrix c, int terms,
                           int rows, int columns, bool adds) {
  for (int first = 0, width; first < columns; first += width, panels += terms * width) {
    const int vectors = vectors_for(columns - first);
    MultiplyRows* multiply = vectors == kTileVectors       ? multiply_wide
                             : vectors == kTileVectors / 2 ? multiply_half
                                                           : multiply_narrow;
    width = vectors * kLanes;
    multiply(a, per_tile, panels, c.data + first, c.stride, terms, rows,
             least(width, columns - first), adds);
  }
}

// c = op(a) op(b), of so many rows and columns; or c += op(a) op(b). The result is finished, if so wanted,
// a block at a time.
static void multiply_and_finish(Matrix a, bool transpose_a, Matrix b, bool transpose_b, Matrix c,
                                int rows, int columns, int inner, bool adds, Finish* finish,
                                const void* product) {
  // A sum is cut into parts of nearly the same length.
  const int parts = inner > kTerms ? (inner + kTerms - 1) / kTerms : 1;
  for (int column = 0; column < columns; column += kBlockColumns) {
    const int wide = least(kBlockColumns, columns - column);
    for (int part = 0, from = 0, terms; part < parts; ++part, from += terms) {
      terms = (inner - from) / (parts - part);
      const int64_t begin = transpose_b ? (int64_t)column * b.stride + from
                                        : (int64_t)from * b.stride + column;
      make_panels((Matrix){b.data + begin, b.stride}, transpose_b, terms, wide, space.panels);
      const int most =
          terms > kBlock / kMostRows ? kBlock / terms / kTileRows * kTileRows : kMostRows;
      for (int row = 0, high; row < rows; row += high) {
        high = least(most, rows - row);
        Factor left = {a.data + (int64_t)row * a.stride + from, a.stride, 1};
        int64_t per_tile = (int64_t)kTileRows * a.stride;
        if (transpose_a) {
          const float* first = a.data + (int64_t)from * a.stride + row;
          per_tile = pack_rows(first, a.stride, high, terms, space.rows);
          left = (Factor){space.rows, 1, kTileRows};
        }
        const Matrix result = {c.data + (int64_t)row * c.stride + column, c.stride};
        multiply_block(left, per_tile, space.panels, result, terms, high, wide, adds || from > 0);
        if (finish && part == parts - 1) finish(product, result, high, wide);
      }
    }
  }
}
