// GELU of x + bias, alone and with its slope, and its gradients, of that slope: of some rows and columns
// of arrays.

#include <math.h>
#include <stdbool.h>

#include "vectors.h"

// Rows whose gradients make one part of the bias's, so that the sum does not depend on who computes it.
enum { kRowsOfPart = 16 };

// Returns erf(x), of a rational function on the numbers where it is not ±1 in float32 (Eigen's).
static inline Vector error_function(Vector x) {
  const Vector largest = spread(3.832506856900711f);
  x = -larger(-larger(x, -largest), -largest);
  const Vector s = x * x;
  Vector p = s * 0.00022905065861350646f + 0.0034082910107109506f;
  p = p * s + 0.050955695062380861f;
  p = p * s + 0.18520832239976145f;
  p = p * s + 1.128379143519084f;
  Vector q = s * -1.1791602954361697e-7f + 0.000023547966471313185f;
  q = q * s + 0.0010179625278914885f;
  q = q * s + 0.014070470171167667f;
  q = q * s + 0.11098505178285362f;
  q = q * s + 0.49746925110067538f;
  q = q * s + 1.0f;
  return x * p / q;
}

// Computes in Φ(in), and its slope Φ(in) + in φ(in).
INLINE Vector compute_exact(Vector in, Vector* slope) {
  const Vector cdf = 0.5f + 0.5f * error_function(in * 0.70710678118654752f);
  *slope = cdf + in * exponential(in * in * -0.5f) * 0.3989422804014327f;
  return in * cdf;
}

// Computes in s(2 u) with the logistic function s and u = root (in + 0.044715 in³), and its slope.
INLINE Vector compute_by_tanh(Vector in, Vector* slope, float root) {
  const Vector square = in * in;
  const Vector u = 2 * root * in * (1 + 0.044715f * square);
  // exp is of numbers of at most 0: s(-u) = 1 - s(u).
  const Integers is_negative = u < spread(0);
  const Vector power = exponential(choose(is_negative, u, -u));
  const Vector of_negative = power / (1 + power), of_positive = 1 / (1 + power);
  const Vector gate = choose(is_negative, of_negative, of_positive);
  *slope = gate + in * (of_negative * of_positive) * (2 * root * (1 + 3 * 0.044715f * square));
  return in * gate;
}

// Of so many numbers of a row. Slopes that nobody wants are not computed.
INLINE void activate_some(const float* x, const float* bias, float* y, float* slopes,
                          const int count, const bool with_slopes, const bool is_exact,
                          float root) {
  const Vector in = load_some(x, count, 0) + load_some(bias, count, 0);
  Vector slope;
  store_some(y, count, is_exact ? compute_exact(in, &slope) : compute_by_tanh(in, &slope, root));
  if (with_slopes) store_some(slopes, count, slope);
}

INLINE void activate_each(const float* x, const float* bias, float* y, float* slopes,
                          int64_t stride, int rows, int columns, const bool with_slopes,
                          const bool is_exact, float root) {
  for (int row = 0; row < rows; ++row, x += stride, y += stride, slopes += stride) {
    int i = 0;
    for (; i + kLanes <= columns; i += kLanes)
      activate_some(x + i, bias + i, y + i, slopes + i, kLanes, with_slopes, is_exact, root);
    if (i < columns)
      activate_some(x + i, bias + i, y + i, slopes + i, columns - i, with_slopes, is_exact, root);
  }
}

// Computes y of x and of a bias for each column, and slopes. All arrays have rows so far apart.
static void activate_rows(const float* x, const float* bias, float* y, float* slopes,
                          int64_t stride, int rows, int columns, float root) {
  // Without slopes the pointer is NULL, with which nothing may be computed.
  float* to = slopes ? slopes : y;
  if (root == 0 && slopes) activate_each(x, bias, y, to, stride, rows, columns, true, true, root);
  else if (root == 0) activate_each(x, bias, y, to, stride, rows, columns, false, true, root);
  else if (slopes) activate_each(x, bias, y, to, stride, rows, columns, true, false, root);
  else activate_each(x, bias, y, to, stride, rows, columns, false, false, root);
}

INLINE void differentiate_some(const float* dy, const float* slopes, float* dx, float* part,
                               const int count) {
  const Vector of_x = load_some(dy, count, 0) * load_some(slopes, count, 0);
  store_some(dx, count, of_x);
  if (part) store_some(part, count, load_some(part, count, 0) + of_x);
}

// Computes dx, and adds it to a part of the bias's gradient, unless that is NULL. All arrays have rows so
// far apart.
static void differentiate_rows(const float* dy, const float* slopes, float* dx, float* part,
                               int64_t stride, int rows, int columns) {
  for (int row = 0; row < rows; ++row, dy += stride, slopes += stride, dx += stride) {
    int i = 0;
    for (; i + kLanes <= columns; i += kLanes)
      differentiate_some(dy + i, slopes + i, dx + i, part ? part + i : NULL, kLanes);
    if (i < columns)
      differentiate_some(dy + i, slopes + i, dx + i, part ? part + i : NULL, columns - i);
  }
}
