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
  // Mean and one over the root of the variance of each row.
  float* moments;
  float *y, *dx;
  // Of each block: the gradients of factor and bias, as far as they exist.
  float* parts;
  float eps;
  bool centres;
  int rows, width;
} Norms;

// Returns the sum of (x - shift)ᵖ of a row, of which p is 1 or 2.
INLINE float sum_of_powers(const float* x, int width, float shift, bool squares) {
  Vector sums[kSums] = {{0}};
  int i = 0;
  for (; i + kSums * kLanes <= width; i += kSums * kLanes)
    UNROLL for (int j = 0; j < kSums; ++j) {
      Vector moved = load(x + i + j * kLanes) - shift;
      if (squares) moved *= moved;
      sums[j] += moved;
    }
  for (; i + kLanes <= width; i += kLanes) {
    Vector moved = load(x + i) - shift;
    if (squares) moved *= moved;
    sums[0] += moved;
  }
  float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < width; ++i) sum += squares ? (x[i] - shift) * (x[i] - shift) : x[i] - shift;
  return sum;
}

INLINE void normalize_row(const Norms* p, int row) {
  const int width = p->width;
  const float* x = p->x + (int64_t)row * width;
  float* y = p->y + (int64_t)row * width;
  const float mean = p->centres ? sum_of_powers(x, width, 0, false) / width : 0;
  const float scale = 1 / sqrtf(sum_of_powers(x, width, mean, true) / width + p->eps);
  p->moments[2 * row] = mean;
  p->moments[2 * row + 1] = scale;
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    Vector result = (load(x + i) - mean) * scale;
    if (p->factor) result *= load(p->factor + i);
    if (p->bias) result += load(p->bias + i);
    store(y + i, result);
  }
  for (; i < width; ++i) {
    float result = (x[i] - mean) * scale;
    if (p->factor) result *= p->factor[i];
    if (p->bias) result += p->bias[i];
    y[i] = result;
  }
}

// With n the row without factor and bias, s its scale and g = dy · factor:
// dx = s (g - mean(g) - n mean(n g)), where the norm of a row's mean square has no mean(g).
INLINE void differentiate_row(const Norms* p, int row, float* of_factor, float* of_bias) {
  const int width = p->width;
  const float* x = p->x + (int64_t)row * width;
  const float* dy = p->dy + (int64_t)row * width;
  float* dx = p->dx + (int64_t)row * width;
  const float mean = p->moments[2 * row], scale = p->moments[2 * row + 1];
  Vector sums[2] = {{0}}, along[2] = {{0}};
  int i = 0;
  for (int turn = 0; i + kLanes <= width; i += kLanes, turn ^= 1) {
    const Vector n = (load(x + i) - mean) * scale;
    Vector g = load(dy + i);
    if (of_factor) store(of_factor + i, load(of_factor + i) + g * n);
    if (of_bias) store(of_bias + i, load(of_bias + i) + g);
    if (p->factor) g *= load(p->factor + i);
    sums[turn] += g;
    along[turn] += g * n;
  }
  float sum = total(sums[0] + sums[1]), product = total(along[0] + along[1]);
  for (; i < width; ++i) {
    const float n = (x[i] - mean) * scale;
    float g = dy[i];
    if (of_factor) of_factor[i] += g * n;
    if (of_bias) of_bias[i] += g;
    if (p->factor) g *= p->factor[i];
    sum += g;
    product += g * n;
  }
  const float shift = p->centres ? sum / width : 0, slope = product / width;
  for (i = 0; i + kLanes <= width; i += kLanes) {
    const Vector n = (load(x + i) - mean) * scale;
    Vector g = load(dy + i);
    if (p->factor) g *= load(p->factor + i);
    store(dx + i, (g - shift - n * slope) * scale);
  }
  for (; i < width; ++i) {
    const float n = (x[i] - mean) * scale, g = p->factor ? dy[i] * p->factor[i] : dy[i];
    dx[i] = (g - shift - n * slope) * scale;
  }
}

static void normalize(const Job* job, int block) {
  const Norms* p = (const Norms*)job;
  const int end = (block + 1) * kRows < p->rows ? (block + 1) * kRows : p->rows;
  for (int row = block * kRows; row < end; ++row) normalize_row(p, row);
}

static void differentiate(const Job* job, int block) {
  const Norms* p = (const Norms*)job;
  const int end = (block + 1) * kRows < p->rows ? (block + 1) * kRows : p->rows;
  float* part = p->parts + (int64_t)block * 2 * p->width;
  float *of_factor = p->factor ? part : NULL, *of_bias = p->bias ? part + p->width : NULL;
  for (int row = block * kRows; row < end; ++row) differentiate_row(p, row, of_factor, of_bias);
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

// Writes the sums of the parts of all blocks: every second row of so many numbers.
static void add_parts(const float* parts, int count, int width, float* sums) {
  if (sums == NULL) return;
  memset(sums, 0, width * sizeof(float));
  for (int part = 0; part < count; ++part)
    for (int i = 0; i < width; ++i) sums[i] += parts[(int64_t)part * 2 * width + i];
}

XLA_FFI_Error* jaxformer_norm_back(XLA_FFI_CallFrame* frame) {
  if (answers_question(frame)) return NULL;
  Norms* p = read_arguments(frame, differentiate);
  if (p == NULL) return fail(frame->api, "no memory for a norm");
  p->moments = argument(frame, 4)->data;
  p->dy = argument(frame, 5)->data;
  p->dx = result(frame, 0)->data;
  const int count = p->job.count, width = p->width;
  float* parts = calloc((size_t)count * 2 * width + 1, sizeof(float));
  if (parts == NULL) {
    free(p);
    return fail(frame->api, "no memory for a norm");
  }
  p->parts = parts;
  compute(p, frame);
  add_parts(parts, count, width, unless_empty(result(frame, 1)));
  add_parts(parts + width, count, width, unless_empty(result(frame, 2)));
  free(parts);
  return NULL;
}
