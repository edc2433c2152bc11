// An activation and its gradients (functions.cuh) on the host, of one gate, up, gradient and score after the other.
// Usage: activation INPUT OUTPUT; files of float32, (N, 4) in and (N, 4) out: h, gradients of gate, of up, and the score's. VALUE is the file.

#include <cmath>
#include <cstdio>
#include <cstring>

#define __device__
#define __forceinline__ inline
static float __fmul_rn(float a, float b) { return a * b; }  // compiled with contraction off
static float __fadd_rn(float a, float b) { return a + b; }
static float __frcp_rn(float a) { return 1.0f / a; }
static float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static float approx_exp2(float x) { return std::exp2(x); }  // a GPU's are instructions
static float approx_reciprocal(float x) { return 1.0f / x; }
#include VALUE

int main(int count, char** names) {
  if (count != 3) return 2;
  std::FILE *in = std::fopen(names[1], "rb"), *out = std::fopen(names[2], "wb");
  if (!in || !out) return 2;
  for (float row[4]; std::fread(row, sizeof row, 1, in) == 1;) {
    float made[4] = {0, 0, 0, 0};
    value_of(row[0], row[1], row + 2, 0, row[3], made[0], made[1], made[2], made[3]);
    if (std::fwrite(made, sizeof made, 1, out) != 1) return 3;
  }
  return std::fclose(out);
}
