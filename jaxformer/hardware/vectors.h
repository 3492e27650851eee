// Vectors as wide as a register of this processor, and functions of their numbers.

#pragma once

#include <stdint.h>
#include <string.h>

// Before a loop with a constant number of rounds: makes its variables registers.
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE static inline __attribute__((always_inline))

// Numbers in a register.
#ifdef __AVX512F__
enum { kLanes = 16 };
#else
enum { kLanes = 8 };
#endif
// Numbers in a line of the cache.
enum { kLine = 16 };

// Unaligned, as XLA's arrays and the matrices in them may be.
typedef float Vector __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16), may_alias));

static inline Vector load(const float* from) { return *(const Vector*)from; }
static inline void store(float* to, Vector x) { *(Vector*)to = x; }
static inline Vector spread(float x) { return x - (Vector){0}; }

// Returns the next numbers of a row: a register full, or fewer and others that fill it.
INLINE Vector load_some(const float* from, const int count, float filling) {
  if (count == kLanes) return load(from);
  Vector x = spread(filling);
  memcpy(&x, from, count * sizeof(float));
  return x;
}

INLINE void store_some(float* to, const int count, Vector x) {
  if (count == kLanes) store(to, x);
  else memcpy(to, &x, count * sizeof(float));
}

// Returns a where the mask has ones, and b where it has zeros.
static inline Vector choose(Integers mask, Vector a, Vector b) {
  return (Vector)((mask & (Integers)a) | (~mask & (Integers)b));
}

// Returns the larger of each pair; b where one is no number.
static inline Vector larger(Vector a, Vector b) {
  // One instruction, of which compilers make more, and whose header takes 0.1 s to read.
#ifdef __AVX__
  Vector found;
  __asm__("vmaxps %2, %1, %0" : "=v"(found) : "v"(a), "v"(b));
  return found;
#else
  return choose(a > b, a, b);
#endif
}

// Returns the square root of each number.
static inline Vector root(Vector x) {
#ifdef __AVX__
  Vector found;
  __asm__("vsqrtps %1, %0" : "=v"(found) : "v"(x));
  return found;
#else
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// Returns the sum of the numbers.
static inline float total(Vector x) {
  Four sum = {0};
  UNROLL for (int i = 0; i < kLanes / 4; ++i) sum += ((const Four*)&x)[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Returns exp(x) of numbers of at most 0. With x = n log 2 + r a polynomial gives exp(r) (S.
// Moshier's, of the Cephes library), and n is its exponent. What float32 has only denormally is 0.
static inline Vector exponential(Vector x) {
  // To add this, and to take it away, rounds to the nearest whole number.
  const Vector rounder = spread(12582912.0f);
  const Vector n = (x * 1.44269504f + rounder) - rounder;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Integers is_tiny = x < spread(-87.0f);
  const Integers exponent = __builtin_convertvector(larger(n, spread(-126)), Integers);
  return (Vector)(~is_tiny & (Integers)(y * (Vector)((exponent + 127) << 23)));
}
