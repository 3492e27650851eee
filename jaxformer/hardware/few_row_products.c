// Products of few rows with matrices, for XLA on CPUs, as a step of generation has them.
//
// Such a product takes as long as the matrix takes to be read. So it is read once, in the order in
// which it lies in memory, by all threads of XLA's own pool, and nothing of it is copied. XLA calls
// the functions at the end. All arrays are float32, each row after row; matrices with a row for each
// output are also int8 or bfloat16, and are widened as they are read.
//
// A number of the result is added up in the same order however many rows there are.

#define LINGERS
#include "custom_calls.h"
#include "vectors.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Of a block of the result, how many registers are a row, and the most rows. The sums of a block
// stay in registers, and leave some for the matrix.
#if defined(__AVX512F__)
enum { kVectors = 4, kRows = 6 };
#define DOT_ROWS 4
#else
enum { kVectors = 4, kRows = 3 };
#define DOT_ROWS 2
#endif
// Outputs and, above, rows of a block where the matrix has a row for each output.
enum { kOutputs = 4, kDotRows = DOT_ROWS };
// Columns of a block.
enum { kColumns = kLanes * kVectors };
// Sums are made of so many products at a time: what a block has of the matrix stays in the cache of
// a core for the next rows.
enum { kInner = 32 };
enum { kLineBytes = 64 };  // of the cache

// a b + c, rounded once: else the compiler rounds twice where it multiplies several at a time, so that
// a sum would depend on how many rows there are.
INLINE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// What to ask memory for while a block is computed, in the matrix's own rows: from where on, and how
// many lines of the cache. Each part of a block asks for a share of it: memory answers only so many
// questions at a time, and waits while nobody asks.
typedef struct {
  const char* from;
  int lines;
} Request;

// Returns the share of the next one of so many parts, and leaves the rest; from line to line it is so
// many bytes.
static Request take_share(Request* all, int parts, int64_t line_stride) {
  const Request share = {all->from, (all->lines + parts - 1) / parts};
  all->from += share.lines * line_stride;
  all->lines -= share.lines;
  return share;
}

// c = a b, or c += a b, of a block: so many rows, and so many registers of columns.
INLINE void multiply_block(Matrix a, Matrix b, Matrix c, int inner, bool adds, Request next,
                           const int rows, const int vectors) {
  Vector sums[kRows][kVectors];
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vectors; ++v) sums[r][v] = (Vector){0};
  for (int i = 0; i < inner; ++i) {
    const float* row = b.data + (int64_t)i * b.stride;
    for (int line = 0; line < next.lines; ++line)
      __builtin_prefetch(next.from + (int64_t)i * b.stride * sizeof(float) + line * kLineBytes);
    for (int v = 0; v < vectors; ++v) {
      const Vector numbers = *(const Vector*)(row + v * kLanes);
      for (int r = 0; r < rows; ++r) sums[r][v] += a.data[(int64_t)r * a.stride + i] * numbers;
    }
  }
// Else the compiler takes the sums through memory.
  UNROLL for (int r = 0; r < rows; ++r) {
    UNROLL for (int v = 0; v < vectors; ++v) {
      Vector* total = (Vector*)(c.data + (int64_t)r * c.stride + v * kLanes);
      if (adds) sums[r][v] += *total;
      *total = sums[r][v];
    }
  }
}

// The same for any number of rows, as even parts of at most kRows.
INLINE void multiply_rows(Matrix a, Matrix b, Matrix c, int rows, int inner, bool adds,
                          Request next, const int vectors) {
  for (int parts = (rows + kRows - 1) / kRows; parts > 0; --parts) {
    const int taken = (rows + parts - 1) / parts;
    const Request share = take_share(&next, parts, kLineBytes);
    switch (taken) {
#define CASE(n)                                                                            \
  case n:                                                                                  \
    multiply_block(a, b, c, inner, adds, share, n <= kRows ? n : kRows, vectors);          \
    break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
    }
    rows -= taken;
    a.data += (int64_t)taken * a.stride;
    c.data += (int64_t)taken * c.stride;
  }
}

// c = a b, of a block: some rows of the matrix after the others, and of these all columns, so that
// memory is read in long pieces.
static void multiply_columns(Matrix a, Matrix b, Matrix c, int rows, int columns, int inner) {
  for (int start = 0; start < inner || start == 0; start += kInner) {
    const int length = inner - start < kInner ? inner - start : kInner;
    const bool adds = start > 0;
    const Matrix of_a = {a.data + start, a.stride};
    float* from = b.data + (int64_t)start * b.stride;
    int done = 0;
    for (; done + kColumns <= columns; done += kColumns) {
      const Matrix of_b = {from + done, b.stride}, of_c = {c.data + done, c.stride};
      const bool is_last = done + 2 * kColumns > columns;
      const float* after = from + (is_last ? (int64_t)kInner * b.stride : done + kColumns);
      const Request next = {(const char*)after, kColumns * sizeof(float) / kLineBytes};
      multiply_rows(of_a, of_b, of_c, rows, length, adds, next, kVectors);
    }
    for (; done + kLanes <= columns; done += kLanes) {
      const Matrix of_b = {from + done, b.stride}, of_c = {c.data + done, c.stride};
      multiply_rows(of_a, of_b, of_c, rows, length, adds, (Request){NULL, 0}, 1);
    }
    for (; done < columns; ++done) {
      for (int r = 0; r < rows; ++r) {
        const float* row = of_a.data + (int64_t)r * a.stride;
        float sum = 0;
        for (int i = 0; i < length; ++i)
          sum = multiply_add(row[i], from[(int64_t)i * b.stride + done], sum);
        float* total = c.data + (int64_t)r * c.stride + done;
        *total = adds ? *total + sum : sum;
      }
    }
  }
}

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int Places __attribute__((vector_size(4 * kLanes)));
#define PICK(a, b, ...) __builtin_shuffle(a, b, (Places){__VA_ARGS__})
#endif
// Adds the halves of each piece of two registers, and puts all sums into one.
#define FOLD(to, count, low, high)                                                      \
  for (int i = 0; i < count; ++i) {                                                     \
    const Vector x = (to)[2 * i], y = (to)[2 * i + 1];                                  \
    (to)[i] = PICK(x, y, low) + PICK(x, y, high);                                       \
  }
#define LIST(...) __VA_ARGS__

// Puts the sum of the numbers of each of kLanes registers into the first one.
INLINE void sum_registers(Vector v[kLanes]) {
#if defined(__AVX512F__)
  FOLD(v, 8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
       LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  FOLD(v, 4, LIST(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
       LIST(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
  FOLD(v, 2, LIST(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
       LIST(2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
  FOLD(v, 1, LIST(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
       LIST(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
#else
  FOLD(v, 4, LIST(0, 1, 2, 3, 8, 9, 10, 11), LIST(4, 5, 6, 7, 12, 13, 14, 15))
  FOLD(v, 2, LIST(0, 1, 4, 5, 8, 9, 12, 13), LIST(2, 3, 6, 7, 10, 11, 14, 15))
  FOLD(v, 1, LIST(0, 2, 4, 6, 8, 10, 12, 14), LIST(1, 3, 5, 7, 9, 11, 13, 15))
#endif
}

// A matrix with a row for each output: where it begins, how its numbers are stored, and how far apart
// its rows are, in bytes.
typedef enum { kFloat32, kBfloat16, kInt8 } Storage;
typedef struct {
  const char* data;
  int64_t stride;
} Rows;

// kLanes numbers, widened. Compilers make several instructions of what this is in general.
#if defined(__AVX512F__)
#define WIDEN_BFLOAT16(from) \
  _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void*)(from))), 16)
#define WIDEN_INT8(from) \
  _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void*)(from))))
#elif defined(__AVX2__)
#define WIDEN_BFLOAT16(from) \
  _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void*)(from))), 16)
#define WIDEN_INT8(from) \
  _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void*)(from))))
#else
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
#define WIDEN_BFLOAT16(from) (__builtin_convertvector(*(const Halves*)(from), Words) << 16)
#define WIDEN_INT8(from) __builtin_convertvector(*(const Bytes*)(from), Vector)
#endif

INLINE int size_of(Storage storage) {
  return storage == kFloat32 ? 4 : storage == kBfloat16 ? 2 : 1;
}

// Returns kLanes numbers of a row, widened; bfloat16 is the upper half of float32.
INLINE Vector load_stored(const char* from, Storage storage) {
  switch (storage) {
    case kBfloat16:
      return (Vector)WIDEN_BFLOAT16(from);
    case kInt8:
      return (Vector)WIDEN_INT8(from);
    default:
      return *(const Vector*)from;
  }
}

// Returns one number.
INLINE float load_one(const char* from, Storage storage) {
  if (storage == kInt8) return *(const int8_t*)from;
  float number;
  uint32_t word;
  uint16_t half;
  if (storage == kBfloat16) {
    memcpy(&half, from, sizeof half);
    word = (uint32_t)half << 16;
    memcpy(&number, &word, sizeof number);
  } else {
    memcpy(&number, from, sizeof number);
  }
  return number;
}

// Some outputs of a bᵀ for some rows: to[o * rows_in_all + r].
INLINE void multiply_outputs(Matrix a, Rows b, float* to, int rows_in_all, int inner, Request next,
                             const int outputs, const int rows, const Storage storage) {
  Vector sums[kOutputs * kDotRows];
  for (int j = 0; j < kOutputs * kDotRows; ++j) sums[j] = (Vector){0};
  const int size = size_of(storage);
  int i = 0;
  for (; i + kLanes <= inner; i += kLanes) {
    for (int line = 0; line < next.lines; ++line)
      __builtin_prefetch(next.from + line * b.stride + i * size);
    for (int o = 0; o < outputs; ++o) {
      const Vector numbers = load_stored(b.data + o * b.stride + i * size, storage);
      for (int r = 0; r < rows; ++r)
        sums[o * kDotRows + r] += *(const Vector*)(a.data + (int64_t)r * a.stride + i) * numbers;
    }
  }
  sum_registers(sums);
  float totals[kLanes];
  *(Vector*)totals = sums[0];
  for (int j = i; j < inner; ++j) {
    for (int o = 0; o < outputs; ++o) {
      const float number = load_one(b.data + o * b.stride + j * size, storage);
      for (int r = 0; r < rows; ++r) {
        float* total = totals + o * kDotRows + r;
        *total = multiply_add(a.data[(int64_t)r * a.stride + j], number, *total);
      }
    }
  }
  for (int o = 0; o < outputs; ++o)
    memcpy(to + (int64_t)o * rows_in_all, totals + o * kDotRows, rows * sizeof(float));
}

// The same for any number of rows.
INLINE void multiply_all_rows(Matrix a, Rows b, float* to, int rows, int inner, const int outputs,
                              const Storage storage) {
  Request next = {b.data + kOutputs * b.stride, kOutputs};
  int parts = (rows + kDotRows - 1) / kDotRows;
  for (int done = 0; done < rows; done += kDotRows, --parts) {
    const Matrix of_a = {a.data + (int64_t)done * a.stride, a.stride};
    const Request share = take_share(&next, parts, b.stride);
    switch (rows - done) {
#define CASE(n)                                                                            \
  case n:                                                                                  \
    multiply_outputs(of_a, b, to + done, rows, inner, share, outputs, n, storage);         \
    break;
      CASE(1)
#if DOT_ROWS > 2
      CASE(2) CASE(3)
#endif
      default:
        multiply_outputs(of_a, b, to + done, rows, inner, share, outputs, DOT_ROWS, storage);
#undef CASE
    }
  }
}

// Outputs of a block where the matrix has a row for each output.
enum { kOutputsOfBlock = 32 };

typedef struct {
  Job job;
  Matrix a, b;
  float* c;
  // Of a and of the result; of pairs, those of one.
  int rows, inner, outputs;
  // Of groups alone: where the rows of each begin.
  const int32_t* first;
  // Blocks of a matrix, and columns or outputs of each.
  int parts, width;
  // Of pairs alone: how many, and how many of them are a block.
  int pairs, pairs_of_block;
} Product;

// Products of the same rows with one matrix or several, which threads share as if they were one.
enum { kMostMatrices = 8 };
typedef struct {
  Job job;
  Matrix a;
  int rows, inner, matrices;
  // Columns of a block.
  int width;
  struct {
    float *b, *c;
    int outputs, first_block;
  } of[kMostMatrices];
} Products;

static void compute_columns(const Job* job, int block) {
  const Products* p = (const Products*)job;
  int i = p->matrices - 1;
  while (p->of[i].first_block > block) --i;
  const int outputs = p->of[i].outputs, first = (block - p->of[i].first_block) * p->width;
  const int rest = outputs - first;
  const Matrix b = {p->of[i].b + first, outputs}, c = {p->of[i].c + first, outputs};
  multiply_columns(p->a, b, c, p->rows, rest < p->width ? rest : p->width, p->inner);
}

// c = (a bᵀ)ᵀ, of some outputs.
INLINE void multiply_range(Matrix a, Rows b, float* c, int rows, int inner, int first, int end,
                           const Storage storage) {
  int o = first;
  for (; o + kOutputs <= end; o += kOutputs) {
    const Rows of_b = {b.data + o * b.stride, b.stride};
    multiply_all_rows(a, of_b, c + (int64_t)o * rows, rows, inner, kOutputs, storage);
  }
  for (; o < end; ++o) {
    const Rows of_b = {b.data + o * b.stride, b.stride};
    multiply_all_rows(a, of_b, c + (int64_t)o * rows, rows, inner, 1, storage);
  }
}

INLINE void compute_block_of_outputs(const Product* p, int block, const Storage storage) {
  const int first = block * kOutputsOfBlock;
  const int end = first + kOutputsOfBlock < p->outputs ? first + kOutputsOfBlock : p->outputs;
  const Rows b = {(const char*)p->b.data, (int64_t)p->inner * size_of(storage)};
  multiply_range(p->a, b, p->c, p->rows, p->inner, first, end, storage);
}

static void compute_outputs(const Job* job, int block) {
  compute_block_of_outputs((const Product*)job, block, kFloat32);
}

static void compute_outputs_of_bfloat16(const Job* job, int block) {
  compute_block_of_outputs((const Product*)job, block, kBfloat16);
}

static void compute_outputs_of_int8(const Job* job, int block) {
  compute_block_of_outputs((const Product*)job, block, kInt8);
}

// Products of pairs of matrices, each with rows of its own; of a block.
INLINE void compute_block_of_pairs(const Product* p, int block, const bool is_transposed) {
  const int first = block * p->pairs_of_block;
  const int end = first + p->pairs_of_block < p->pairs ? first + p->pairs_of_block : p->pairs;
  for (int64_t pair = first; pair < end; ++pair) {
    const Matrix a = {p->a.data + pair * p->rows * p->inner, p->inner};
    float* b = p->b.data + pair * p->inner * p->outputs;
    float* c = p->c + pair * p->rows * p->outputs;
    if (is_transposed) {
      const Rows of_b = {(const char*)b, (int64_t)p->inner * sizeof(float)};
      multiply_range(a, of_b, c, p->rows, p->inner, 0, p->outputs, kFloat32);
    } else {
      const Matrix of_b = {b, p->outputs}, of_c = {c, p->outputs};
      multiply_columns(a, of_b, of_c, p->rows, p->outputs, p->inner);
    }
  }
}

static void compute_pairs(const Job* job, int block) {
  compute_block_of_pairs((const Product*)job, block, false);
}

static void compute_pairs_by_transposed(const Job* job, int block) {
  compute_block_of_pairs((const Product*)job, block, true);
}

static void compute_group(const Job* job, int block) {
  const Product* p = (const Product*)job;
  const int group = block / p->parts;
  const int64_t start = p->first[group];
  const int rows = p->first[group + 1] - (int)start;
  if (rows == 0) return;
  const int first = block % p->parts * p->width;
  const int rest = p->outputs - first;
  const Matrix a = {p->a.data + start * p->inner, p->inner};
  const Matrix b = {p->b.data + (int64_t)group * p->inner * p->outputs + first, p->outputs};
  const Matrix c = {p->c + start * p->outputs + first, p->outputs};
  multiply_columns(a, b, c, rows, rest < p->width ? rest : p->width, p->inner);
}

// Where a text is written by itself, XLA wants no threads for what lies between two products: those of
// the last one linger. So many rows at most have the window of a draft, too.
enum { kMostLingering = 4 };
// Of the matrix, in bytes: to hand less of it to another thread costs as much as it saves.
static const int64_t kLeastShare = 1 << 18, kLeastShareOfLingering = 1 << 16;

// Returns on how many threads products are best computed that read so many bytes of matrices.
static int count_threads(const XLA_FFI_CallFrame* frame, const Job* job, int64_t bytes) {
  const int64_t most = bytes / (job->lingers ? kLeastShareOfLingering : kLeastShare);
  if (most < 2) return 1;
  const int threads = pool_threads(frame);
  return most < threads ? (int)most : threads;
}

// Columns of a block, at most: what is made of them stays in the cache of a core.
enum { kMostColumns = 2048 };
// Each thread has one block, so that memory is read in long pieces. A product by a smaller matrix, in
// bytes, is over so soon that a thread may come late: each has several, which the others can take.
enum { kSmallShares = 4 };
static const int64_t kSmall = 1 << 21;

// Returns how many columns of a matrix a block has, where so many matrices are multiplied by.
static int block_width(int columns, int64_t bytes, int matrices, int threads) {
  // Of many matrices, or of some for each thread, one is a block.
  const bool is_whole = matrices % threads == 0 || matrices >= 4 * threads;
  const int shares = is_whole ? 1 : bytes < kSmall ? kSmallShares * threads : threads;
  const int share = (columns / shares + kColumns - 1) / kColumns * kColumns;
  return share > kMostColumns ? kMostColumns : share < kColumns ? kColumns : share;
}

// Makes a product with what all kinds of it have: rows, and a matrix or several. Returns NULL if there
// is no memory.
static Product* make_product(const XLA_FFI_CallFrame* frame,
                             void (*compute)(const Job* job, int block), bool is_transposed) {
  const XLA_FFI_Buffer* a = argument(frame, 0);
  const XLA_FFI_Buffer* b = argument(frame, 1);
  Product* p = calloc(1, sizeof(Product));
  if (p == NULL) return NULL;
  p->job.compute = compute;
  p->rows = (int)a->dims[a->rank - 2];
  p->inner = (int)a->dims[a->rank - 1];
  p->outputs = (int)b->dims[b->rank - (is_transposed ? 2 : 1)];
  p->a = (Matrix){a->data, p->inner};
  p->b = (Matrix){b->data, is_transposed ? p->inner : p->outputs};
  p->c = result(frame, 0)->data;
  return p;
}

static int64_t matrix_bytes(const Product* p, const Storage storage) {
  return (int64_t)p->inner * p->outputs * size_of(storage);
}

static XLA_FFI_Error* fail_for_memory(const XLA_FFI_CallFrame* frame) {
  return fail(frame->api, "no memory for a matrix product");
}

static XLA_FFI_Error* multiply(XLA_FFI_CallFrame* frame,
                               void (*compute)(const Job* job, int block), bool is_transposed,
                               Storage storage) {
  if (answers_question(frame)) return NULL;
  Product* p = make_product(frame, compute, is_transposed);
  if (p == NULL) return fail_for_memory(frame);
  p->job.lingers = p->rows <= kMostLingering;
  int matrices = 1, used = 1;
  if (argument(frame, 1)->rank == 3) {
    p->first = argument(frame, 2)->data;
    matrices = (int)argument(frame, 1)->dims[0];
    used = 0;
    for (int i = 0; i < matrices; ++i) used += p->first[i + 1] > p->first[i];
    // Rows after those of the last group are of none.
    const int64_t end = p->first[matrices];
    memset(p->c + end * p->outputs, 0, (p->rows - end) * p->outputs * sizeof(float));
  }
  const int64_t bytes = matrix_bytes(p, storage);
  const int threads = count_threads(frame, &p->job, used * bytes);
  p->width = is_transposed ? kOutputsOfBlock : block_width(p->outputs, bytes, used, threads);
  p->parts = (p->outputs + p->width - 1) / p->width;
  p->job.count = matrices * p->parts;
  finish(&p->job, frame, threads);
  return NULL;
}

static XLA_FFI_Error* multiply_pairs(XLA_FFI_CallFrame* frame,
                                     void (*compute)(const Job* job, int block),
                                     bool is_transposed) {
  if (answers_question(frame)) return NULL;
  Product* p = make_product(frame, compute, is_transposed);
  if (p == NULL) return fail_for_memory(frame);
  p->pairs = (int)argument(frame, 0)->dims[0];
  const int threads = count_threads(frame, &p->job, p->pairs * matrix_bytes(p, kFloat32));
  const int blocks = kSmallShares * threads;
  p->pairs_of_block = (p->pairs + blocks - 1) / blocks;
  p->job.count = (p->pairs + p->pairs_of_block - 1) / p->pairs_of_block;
  finish(&p->job, frame, threads);
  return NULL;
}

XLA_FFI_Error* jaxformer_few_rows(XLA_FFI_CallFrame* frame) {
  if (answers_question(frame)) return NULL;
  const int matrices = (int)frame->rets.size;
  if (matrices > kMostMatrices) return fail(frame->api, "too many matrices for one product");
  Products* p = calloc(1, sizeof(Products));
  if (p == NULL) return fail_for_memory(frame);
  const XLA_FFI_Buffer* a = argument(frame, 0);
  p->job.compute = compute_columns;
  p->rows = (int)a->dims[0];
  p->inner = (int)a->dims[1];
  p->a = (Matrix){a->data, p->inner};
  p->matrices = matrices;
  int outputs = 0;
  for (int i = 0; i < matrices; ++i) {
    const XLA_FFI_Buffer* b = argument(frame, 1 + i);
    p->of[i].b = b->data;
    p->of[i].c = result(frame, i)->data;
    p->of[i].outputs = (int)b->dims[1];
    outputs += p->of[i].outputs;
  }
  p->job.lingers = p->rows <= kMostLingering;
  const int64_t bytes = (int64_t)p->inner * outputs * sizeof(float);
  const int threads = count_threads(frame, &p->job, bytes);
  p->width = block_width(outputs, bytes, 1, threads);
  for (int i = 0; i < matrices; ++i) {
    p->of[i].first_block = p->job.count;
    p->job.count += (p->of[i].outputs + p->width - 1) / p->width;
  }
  finish(&p->job, frame, threads);
  return NULL;
}

XLA_FFI_Error* jaxformer_few_rows_bt(XLA_FFI_CallFrame* frame) {
  return multiply(frame, compute_outputs, true, kFloat32);
}

XLA_FFI_Error* jaxformer_few_rows_bt_bfloat16(XLA_FFI_CallFrame* frame) {
  return multiply(frame, compute_outputs_of_bfloat16, true, kBfloat16);
}

XLA_FFI_Error* jaxformer_few_rows_bt_int8(XLA_FFI_CallFrame* frame) {
  return multiply(frame, compute_outputs_of_int8, true, kInt8);
}

XLA_FFI_Error* jaxformer_few_rows_grouped(XLA_FFI_CallFrame* frame) {
  return multiply(frame, compute_group, false, kFloat32);
}

XLA_FFI_Error* jaxformer_few_rows_pairs(XLA_FFI_CallFrame* frame) {
  return multiply_pairs(frame, compute_pairs, false);
}

XLA_FFI_Error* jaxformer_few_rows_pairs_bt(XLA_FFI_CallFrame* frame) {
  return multiply_pairs(frame, compute_pairs_by_transposed, true);
}
