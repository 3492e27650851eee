// Norms of rows for XLA on CPUs, forward and backward.
//
// All arrays are float32. XLA makes several passes over the rows, one for each sum and one for what
// follows from it. Here a row stays in a core's cache until it is finished.

#include <math.h>

#include "custom_calls.h"
#include "vectors.h"

// Rows of a block. Sums over rows are made by block, so they do not depend on who computes them.
enum { kRows = 32 };

// Sums of numbers, several at a time: each vector waits for the one before.
enum { kSums = 4 };

typedef struct {
  Job job;
  // Without a factor or a bias the pointer is NULL.
  const float *x, *factor, *bias, *dy;
  // NULL, or the gradients that the rows have beside those of the norm.
  const float* beside;
  // Mean and one over the root of the variance of each row.
  float* moments;
  float *y, *dx;
  // Of each block: the gradients of factor and bias, as far as they exist.
  float* parts;
  float eps;
  bool centres;
  int rows, width;
} Norms;

INLINE Vector add_powers(Vector sum, const float* x, const int count, float shift,
                         const bool squares) {
  const Vector moved = load_some(x, count, shift) - shift;
  if (squares) return sum + moved * moved;
  return sum + moved;
}

// Returns the mean of (x - shift)ᵖ of a row, of which p is 1 or 2.
INLINE float mean_power(const float* x, int width, float shift, const bool squares) {
  Vector sums[kSums] = {{0}};
  int i = 0;
  for (; i + kSums * kLanes <= width; i += kSums * kLanes)
    UNROLL for (int j = 0; j < kSums; ++j)
      sums[j] = add_powers(sums[j], x + i + j * kLanes, kLanes, shift, squares);
  for (; i + kLanes <= width; i += kLanes)
    sums[0] = add_powers(sums[0], x + i, kLanes, shift, squares);
  if (i < width) sums[1] = add_powers(sums[1], x + i, width - i, shift, squares);
  return total((sums[0] + sums[1]) + (sums[2] + sums[3])) / width;
}

// Writes some numbers of a row, which begin at so many, without the mean and times the scale.
INLINE void normalize_some(const Norms* p, const float* x, float* y, int at, const int count,
                           float mean, float scale, const bool has_factor, const bool has_bias) {
  Vector result = (load_some(x + at, count, 0) - mean) * scale;
  if (has_factor) result *= load_some(p->factor + at, count, 0);
  if (has_bias) result += load_some(p->bias + at, count, 0);
  store_some(y + at, count, result);
}

INLINE void normalize_row(const Norms* p, int row, const bool has_factor, const bool has_bias) {
  const int width = p->width;
  const float* x = p->x + (int64_t)row * width;
  float* y = p->y + (int64_t)row * width;
  const float mean = p->centres ? mean_power(x, width, 0, false) : 0;
  const float scale = 1 / sqrtf(mean_power(x, width, mean, true) + p->eps);
  p->moments[2 * row] = mean;
  p->moments[2 * row + 1] = scale;
  int i = 0;
  for (; i + kLanes <= width; i += kLanes)
    normalize_some(p, x, y, i, kLanes, mean, scale, has_factor, has_bias);
  if (i < width) normalize_some(p, x, y, i, width - i, mean, scale, has_factor, has_bias);
}

// Of a row on the way back. With n the row without factor and bias, s its scale and g = dy · factor:
// dx = s (g - mean(g) - n mean(n g)), where the norm of a row's mean square has no mean(g).
typedef struct {
  const float *x, *dy, *beside;
  float *dx, *of_factor, *of_bias;
  float mean, scale;
} Row;

// Adds some numbers to the gradients of factor and bias, and to the sums of g and n g.
INLINE void add_some(const Norms* p, const Row* row, int at, const int count,
                     const bool has_factor, const bool has_bias, Vector* sum, Vector* along) {
  const Vector n = (load_some(row->x + at, count, row->mean) - row->mean) * row->scale;
  Vector g = load_some(row->dy + at, count, 0);
  float *of_factor = row->of_factor + at, *of_bias = row->of_bias + at;
  if (has_factor) store_some(of_factor, count, load_some(of_factor, count, 0) + g * n);
  if (has_bias) store_some(of_bias, count, load_some(of_bias, count, 0) + g);
  if (has_factor) g *= load_some(p->factor + at, count, 0);
  *sum += g;
  *along += g * n;
}

INLINE void differentiate_some(const Norms* p, const Row* row, int at, const int count,
                               const bool has_factor, float shift, float slope) {
  const Vector n = (load_some(row->x + at, count, 0) - row->mean) * row->scale;
  Vector g = load_some(row->dy + at, count, 0);
  if (has_factor) g *= load_some(p->factor + at, count, 0);
  Vector dx = (g - shift - n * slope) * row->scale;
  if (row->beside) dx += load_some(row->beside + at, count, 0);
  store_some(row->dx + at, count, dx);
}

INLINE void differentiate_row(const Norms* p, const Row* row, const bool has_factor,
                              const bool has_bias) {
  const int width = p->width;
  Vector sum = {0}, along = {0};
  int i = 0;
  for (; i + kLanes <= width; i += kLanes)
    add_some(p, row, i, kLanes, has_factor, has_bias, &sum, &along);
  if (i < width) add_some(p, row, i, width - i, has_factor, has_bias, &sum, &along);
  const float shift = p->centres ? total(sum) / width : 0, slope = total(along) / width;
  for (i = 0; i + kLanes <= width; i += kLanes)
    differentiate_some(p, row, i, kLanes, has_factor, shift, slope);
  if (i < width) differentiate_some(p, row, i, width - i, has_factor, shift, slope);
}

// Of a block, compiled once for each kind of norm: a factor, a bias.
INLINE void compute_rows(const Norms* p, int block, const bool is_back, const bool has_factor,
                         const bool has_bias) {
  const int end = (block + 1) * kRows < p->rows ? (block + 1) * kRows : p->rows;
  for (int number = block * kRows; number < end; ++number) {
    if (!is_back) {
      normalize_row(p, number, has_factor, has_bias);
      continue;
    }
    const int64_t at = (int64_t)number * p->width;
    float* part = p->parts + (int64_t)block * 2 * p->width;
    const Row row = {p->x + at, p->dy + at, p->beside ? p->beside + at : NULL, p->dx + at, part,
                     part + p->width, p->moments[2 * number], p->moments[2 * number + 1]};
    differentiate_row(p, &row, has_factor, has_bias);
  }
}

INLINE void compute_block(const Norms* p, int block, const bool is_back) {
  if (p->factor && p->bias) compute_rows(p, block, is_back, true, true);
  else if (p->factor) compute_rows(p, block, is_back, true, false);
  else if (p->bias) compute_rows(p, block, is_back, false, true);
  else compute_rows(p, block, is_back, false, false);
}

static void normalize(const Job* job, int block) {
  compute_block((const Norms*)job, block, false);
}

static void differentiate(const Job* job, int block) {
  compute_block((const Norms*)job, block, true);
}

static float* unless_empty(const XLA_FFI_Buffer* buffer) {
  return buffer->dims[0] == 0 ? NULL : buffer->data;
}

// Returns what forward and backward have in common; NULL without memory.
static Norms* read_arguments(const XLA_FFI_CallFrame* frame, void (*compute)(const Job*, int)) {
  Norms* p = calloc(1, sizeof(Norms));
  if (p == NULL) return NULL;
  const XLA_FFI_Buffer* x = argument(frame, 0);
  const float* settings = argument(frame, 3)->data;
  p->job.compute = compute;
  p->x = x->data;
  p->factor = unless_empty(argument(frame, 1));
  p->bias = unless_empty(argument(frame, 2));
  p->eps = settings[0];
  p->centres = settings[1] != 0;
  p->rows = (int)x->dims[0];
  p->width = (int)x->dims[1];
  p->job.count = (p->rows + kRows - 1) / kRows;
  return p;
}

// A number takes about as long as so many operations of a product.
static const double kOperationsPerNumber = 20;

static void compute(Norms* p, const XLA_FFI_CallFrame* frame) {
  const double operations = kOperationsPerNumber * p->rows * p->width;
  finish(&p->job, frame, share_of_threads(frame, operations));
}

XLA_FFI_Error* jaxformer_norm(XLA_FFI_CallFrame* frame) {
  if (answers_question(frame)) return NULL;
  Norms* p = read_arguments(frame, normalize);
  if (p == NULL) return fail(frame->api, "no memory for a norm");
  p->y = result(frame, 0)->data;
  p->moments = result(frame, 1)->data;
  compute(p, frame);
  return NULL;
}

XLA_FFI_Error* jaxformer_norm_back(XLA_FFI_CallFrame* frame) {
  if (answers_question(frame)) return NULL;
  Norms* p = read_arguments(frame, differentiate);
  if (p == NULL) return fail(frame->api, "no memory for a norm");
  p->moments = argument(frame, 4)->data;
  p->dy = argument(frame, 5)->data;
  p->beside = unless_empty(argument(frame, 6));
  p->dx = result(frame, 0)->data;
  const int count = p->job.count, width = p->width;
  float* parts = calloc((size_t)count * 2 * width + 1, sizeof(float));
  if (parts == NULL) {
    free(p);
    return fail(frame->api, "no memory for a norm");
  }
  p->parts = parts;
  compute(p, frame);
  float *of_factor = unless_empty(result(frame, 1)), *of_bias = unless_empty(result(frame, 2));
  if (of_factor) add_parts(parts, count, 2 * width, width, of_factor);
  if (of_bias) add_parts(parts + width, count, 2 * width, width, of_bias);
  free(parts);
  return NULL;
}
