// The softmax of a row of scores, of which only some are seen, in loops that compilers turn into
// instructions for many numbers at once.

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

// A row has room up to a multiple of this.
enum { kLanes = 16 };

// Replaces numbers of at most 0 by their exponentials, so many, and adds these up by lane. With
// x = n log 2 + r a polynomial gives exp(r) (S. Moshier's, of the Cephes library; within 1.2 ulp),
// and n is its exponent. What float32 has only denormally becomes 0.
static void exponentiate(float* row, int count, float shift, float* sums) {
  for (int at = 0; at < count; at += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      const float x = row[at + i] - shift;
      // To add this, and to take it away, rounds to the nearest whole number.
      const float rounder = 12582912.0f;
      const float n = (x * 1.44269504f + rounder) - rounder;
      const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
      float y = 1.9875691500e-4f;
      y = y * r + 1.3981999507e-3f;
      y = y * r + 8.3334519073e-3f;
      y = y * r + 4.1665795894e-2f;
      y = y * r + 1.6666665459e-1f;
      y = y * r + 5.0000001201e-1f;
      y = y * r * r + r + 1.0f;
      const bool is_tiny = x < -87.0f;
      union { uint32_t bits; float value; } power;
      power.bits = (uint32_t)((int32_t)(is_tiny ? 0.0f : n) + 127) << 23;
      const float found = is_tiny ? 0.0f : y * power.value;
      row[at + i] = found;
      sums[i] += found;
    }
  }
}

// Replaces scores by their exponentials beside the largest, 0 outside of the keys that are seen, and
// returns 1 over their sum; 0 if no key is seen. The row has room up to a multiple of kLanes.
static float weigh(float* row, int count, int first, int last) {
  const int from = first / kLanes * kLanes, to = (last + kLanes - 1) / kLanes * kLanes;
  float largest[kLanes], sums[kLanes] = {0}, shift = -INFINITY, sum = 0;
  if (first >= last) {
    memset(row, 0, count * sizeof(float));
    return 0;
  }
  for (int i = from; i < first; ++i) row[i] = -INFINITY;
  for (int i = last; i < to; ++i) row[i] = -INFINITY;
  for (int i = 0; i < kLanes; ++i) largest[i] = -INFINITY;
  for (int at = from; at < to; at += kLanes)
    for (int i = 0; i < kLanes; ++i)
      largest[i] = row[at + i] > largest[i] ? row[at + i] : largest[i];
  for (int i = 0; i < kLanes; ++i) shift = largest[i] > shift ? largest[i] : shift;
  exponentiate(row + from, to - from, shift, sums);
  for (int i = 0; i < kLanes; ++i) sum += sums[i];
  for (int i = 0; i < from; ++i) row[i] = 0;
  for (int i = to; i < count; ++i) row[i] = 0;
  return 1 / sum;
}
